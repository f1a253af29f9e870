"""The AR baseline of another implementation, to time ours against: transformers' Chameleon, which generates
one code per pass over a static cache.

Its generate() masks image tokens, so this file has the loop that it would run: both guidance rows in one
batch, the next code appended to a StaticCache.

Dimensions: R rows (guidance branches), T tokens, V codes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import ChameleonForConditionalGeneration, StaticCache
from transformers.utils import logging

from adt_tree.noise import Noise
from adt_tree.records import Decoded, Step
from adt_tree.roles import Request
from adt_tree.sampling import PassSampling, log_probs
from adt_tree.settings import Sampling
from eval.harness import Configuration
from models.model import DTYPES, Model


@dataclass(frozen=True, slots=True)
class Image:
    """The outcome of a step that generates a whole image (eval.harness.Outcome)."""

    finished: list[Decoded]

    @property
    def committed(self) -> int:
        """Number of codes of the image."""
        return sum(len(image.codes) for image in self.finished)


class TransformersDecoder:
    """Chameleon in transformers. It samples as our AR baseline does: the same image, up to rounding."""

    def __init__(
        self, net: ChameleonForConditionalGeneration, model: Model, sampling: Sampling, max_prompt: int
    ) -> None:
        """net: may be shared with other decoders. Every decoder has its own cache."""
        self.net, self.model, self.sampling = net, model, sampling
        self.noise = Noise(model.num_codes, silent=sampling.greedy)
        self.capacity = max_prompt + model.grid.size
        self.cache = StaticCache(config=net.config, max_cache_len=self.capacity)

    @torch.inference_mode()
    def steps(self, requests: Iterable[Request]) -> Iterator[Image]:
        """Yields one outcome for each image. The pass over the prompt generates the first code, and one
        target call each of the others."""
        for request in requests:
            codes, clocks = [], [time.perf_counter()]
            for code in self._codes(request):
                codes.append(code)
                clocks.append(time.perf_counter())
            seconds = [after - before for before, after in pairwise(clocks)]
            cells = enumerate(map(self.model.grid.cell, range(len(codes))))
            steps = [Step(n, at.row, at.column, 0, 0, 0, 0, 1e3 * seconds[n]) for n, at in cells][1:]
            image = Decoded(request.name, request.seed, codes, steps, sum(seconds), target_calls=len(steps))
            yield Image([image])

    def _codes(self, request: Request) -> Iterator[int]:
        """Yields codes in raster order. Rows are padded on the left; positions count from the first token."""
        device, rows = self.net.device, self.sampling.branches
        prompts = [request.prompt.conditional, request.prompt.unconditional][:rows]
        width = max(map(len, prompts))
        tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        pad = torch.tensor([[width - len(p)] for p in prompts], device=device)
        unpadded = torch.arange(self.capacity, device=device)[None] >= pad
        positions = (torch.arange(width, device=device) - pad).clamp(min=0)
        self.cache.reset()
        seed = torch.full((1,), request.seed, device=device)
        settings = PassSampling.uniform(self.sampling, positions.device)
        for number in range(self.model.grid.size):
            logits = self._pass(tokens, unpadded[:, : width + number], positions)
            at = torch.full((1, 1), number, device=device)
            code = (log_probs(logits[:, None, None], settings) + self.noise.gumbel(seed, at)).argmax()
            yield int(code)
            tokens = (code + self.model.first_code).expand(rows, 1)
            positions = width + number - pad

    def _pass(self, tokens: Tensor, unpadded: Tensor, positions: Tensor) -> Tensor:
        """Returns the logits [R, V] of the codes that may follow tokens [R, T].

        unpadded: the mask over all tokens so far, False at the padding. positions [R, T].
        """
        hidden = self.net.model(
            input_ids=tokens,
            attention_mask=unpadded,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        first = self.model.first_code
        return self.net.lm_head(hidden[:, -1])[:, first : first + self.model.num_codes].float()


def decoders(
    folder: Path, model: Model, samplings: Iterable[Sampling], max_prompt: int
) -> dict[Configuration, TransformersDecoder]:
    """Returns a decoder for each sampling. All share one network, which transformers loads from the folder in
    the precision and on the device of `model`."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kind: Any = ChameleonForConditionalGeneration  # its from_pretrained is not typed
    net = kind.from_pretrained(folder, dtype=DTYPES[model.precision], local_files_only=True)
    net = net.to(model.device).eval()
    return {
        Configuration("transformers", sampling.temperature, 1): TransformersDecoder(
            net, model, sampling, max_prompt
        )
        for sampling in dict.fromkeys(samplings)
    }
