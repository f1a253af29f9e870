"""The outside yardstick: transformers' model of the same checkpoint, one code per pass, a static cache.

Janus draws by its own generate(). Chameleon's masks image tokens, so this is the loop it would run: both
guidance rows in one batch, the next code appended to a StaticCache. Dimensions: R rows (guidance branches), T
tokens, V codes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import ChameleonForConditionalGeneration, JanusForConditionalGeneration, StaticCache
from transformers.utils import logging

from adt_tree.errors import UserError
from adt_tree.noise import Noise
from adt_tree.records import Decoded, Step
from adt_tree.roles import Request
from adt_tree.sampling import Sampling, log_probs
from eval.bench import Configuration
from models.model import DTYPES, Model


class TransformersDecoder:
    """The AR baseline by transformers, with our distribution and noise: our image, up to rounding."""

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
            codes, clocks = [], [time.perf_counter()]
            for code in self._codes(request):
                codes.append(code)
                clocks.append(time.perf_counter())
            seconds = [after - before for before, after in pairwise(clocks)]
            yield _decoded(request, self.model, codes, seconds)

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


class JanusDecoder:
    """transformers' generate(generation_mode="image"): our tokens at temperature 0, its own draws above."""

    def __init__(self, net: JanusForConditionalGeneration, model: Model, sampling: Sampling) -> None:
        """UserError without guidance, which generate() does not run."""
        if sampling.branches == 1:
            raise UserError("--reference transformers with --cfg 1: generate() always guides; leave one out")
        self.net, self.model, self.sampling = net, model, sampling

    @torch.inference_mode()
    def decode(self, requests: Iterable[Request]) -> Iterator[Decoded]:
        """One image at a time; a step's time is the mean of the image."""
        sampling, device = self.sampling, self.net.device
        drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        for request in requests:
            started = time.perf_counter()
            tokens = torch.tensor([request.prompt.conditional], device=device)
            torch.manual_seed(request.seed)
            found = self.net.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                generation_mode="image",
                guidance_scale=sampling.guidance,
                do_sample=not sampling.greedy,
                **({} if sampling.greedy else drawn),
            )
            codes = found[0].tolist()
            mean = (time.perf_counter() - started) / len(codes)
            yield _decoded(request, self.model, codes, [mean] * len(codes))


def _decoded(request: Request, model: Model, codes: list[int], seconds: list[float]) -> Decoded:
    """An image of which every code took so long; the first is the prompt's, each other one a call's."""
    cells = enumerate(map(model.grid.cell, range(len(codes))))
    steps = [Step(number, *cell, 0, 0, 0, 0, 1e3 * seconds[number]) for number, cell in cells][1:]
    return Decoded(request.name, request.seed, codes, steps, sum(seconds), target_calls=len(steps))


def decoders(
    folder: Path, model: Model, samplings: Iterable[Sampling], max_prompt: int
) -> dict[Configuration, TransformersDecoder | JanusDecoder]:
    """The checkpoint as transformers loads it, in the model's precision and on its device, decoding at every
    temperature."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    janus = model.spec.name == "janus_pro"
    kind: Any = JanusForConditionalGeneration if janus else ChameleonForConditionalGeneration
    net = kind.from_pretrained(folder, dtype=DTYPES[model.precision], local_files_only=True)
    net = net.to(model.device).eval()
    found: dict[Configuration, TransformersDecoder | JanusDecoder] = {}
    for own in dict.fromkeys(samplings):
        own_draws = janus and not own.greedy
        configuration = Configuration("transformers", own.temperature, 1, exact=not own_draws)
        decoder = JanusDecoder(net, model, own) if janus else TransformersDecoder(net, model, own, max_prompt)
        found[configuration] = decoder
    return found
