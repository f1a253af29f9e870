"""The outside yardstick: transformers' Chameleon on the same checkpoint, one code a pass, a static cache.

Its generate() masks image tokens, so this is the loop generate() would run: both guidance rows in one
batch, the next code appended to a StaticCache. Dimensions: R rows (guidance branches), T tokens, V codes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from adt_tree.noise import Noise
from adt_tree.records import Decoded, Step
from adt_tree.roles import Request
from adt_tree.sampling import Sampling, log_probs
from eval.session import synchronise
from models.model import DTYPES, Model
from models.tools.torchvision_guard import mend_torchvision
from models.transformer import DecoderConfig

mend_torchvision()  # before transformers looks for torchvision
from transformers import ChameleonConfig, ChameleonForConditionalGeneration, StaticCache  # noqa: E402
from transformers.utils import logging  # noqa: E402

STEPS = 64  # tokens that step_ms times


class TransformersDecoder:
    """Plain decoding by transformers, drawing with the same law and noise as ours."""

    def __init__(
        self, net: ChameleonForConditionalGeneration, model: Model, sampling: Sampling, max_prompt: int
    ) -> None:
        """net: shared by every temperature; a cache of its own for each decoder."""
        self.net, self.model, self.sampling = net, model, sampling
        noise = Noise(model.num_codes, silent=sampling.greedy)
        self.noise = noise.table(1, model.grid.size, net.device)
        self.most = max_prompt + model.grid.size
        self.cache = StaticCache(config=net.config, max_cache_len=self.most)

    @torch.inference_mode()
    def decode(self, requests: Iterable[Request]) -> Iterator[Decoded]:
        """One image at a time."""
        for request in requests:
            started = time.perf_counter()
            image = Decoded(request.name, request.seed, [])
            for number, code in enumerate(self._codes(request)):
                row, column = self.model.grid.cell(number)
                image.codes.append(code)
                if number:
                    image.steps.append(Step(number, row, column, 0, 0, 0, 0, 0.0))
                    image.target_calls += 1
            image.seconds = time.perf_counter() - started
            yield image

    def _codes(self, request: Request) -> Iterator[int]:
        """Codes in raster order; rows are padded on the left and their positions start after the padding."""
        device, rows = self.net.device, self.sampling.branches
        prompts = [request.prompt.conditional, request.prompt.unconditional][:rows]
        width = max(map(len, prompts))
        tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        pad = torch.tensor([[width - len(p)] for p in prompts], device=device)
        seen = torch.arange(self.most, device=device)[None] >= pad
        positions = (torch.arange(width, device=device) - pad).clamp(min=0)
        self.noise.begin(0, request.seed)
        self.cache.reset()
        for number in range(self.model.grid.size):
            logits = self._pass(tokens, seen[:, : width + number], positions)
            at = torch.full((1, 1), number, device=device)
            code = (log_probs(logits[:, None, None], self.sampling) + self.noise.at(at)).argmax()
            yield int(code)
            tokens = (code + self.model.first_code).expand(rows, 1)
            positions = width + number - pad

    def _pass(self, tokens: Tensor, seen: Tensor, positions: Tensor) -> Tensor:
        """Logits [R, V] of the image codes after the last token."""
        hidden = self.net.model(
            input_ids=tokens,
            attention_mask=seen,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        first = self.model.first_code
        return self.net.lm_head(hidden[:, -1])[:, first : first + self.model.num_codes].float()


def load_net(folder: Path, precision: str, device: torch.device) -> ChameleonForConditionalGeneration:
    """The checkpoint as transformers loads it."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    net = ChameleonForConditionalGeneration.from_pretrained(
        folder, dtype=DTYPES[precision], local_files_only=True
    )
    return net.to(device).eval()


def random_net(
    shape: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> ChameleonForConditionalGeneration:
    """transformers' Chameleon of a decoder's dimensions, with random weights and one image token."""
    config = ChameleonConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_positions,
        vocabulary_map={"<image>": 3, "IMGIMGAZ": 4},
    )
    with torch.device(device):
        return ChameleonForConditionalGeneration._from_config(config, dtype=dtype).eval()


@torch.inference_mode()
def step_ms(net: ChameleonForConditionalGeneration, before: int, compiled: bool) -> float:
    """Milliseconds a token of generate() with a static cache: two rows behind prompts of `before` tokens.

    It draws from the whole vocabulary but for image tokens. compiled: let it compile, which it does on CUDA.
    """
    tokens = torch.full((2, before), 1, device=net.device)

    def seconds(new: int) -> float:
        started = time.perf_counter()
        net.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            min_new_tokens=new,
            max_new_tokens=new,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
            eos_token_id=None,
            cache_implementation="static",
            disable_compile=not compiled,
        )
        synchronise(net.device)
        return time.perf_counter() - started

    seconds(STEPS)  # compiled, where it is, and warm
    return round(1e3 * (seconds(STEPS) - seconds(1)) / (STEPS - 1), 3)
