"""A logits processor with which greedy decoding of transformers samples, and assisted decoding stays exact.

The file needs torch alone, so that it can be copied.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SeededGumbel:
    """Makes greedy decoding sample from the model, by noise that depends on the seed and the position alone.

    model.generate(**inputs, do_sample=False, logits_processor=[SeededGumbel(7)], assistant_model=small)

    The argmax of log p + Gumbel noise is a sample from p. A drafted token is accepted if it is that argmax,
    so with an assistant model or prompt lookup the tokens are those of plain decoding at the same seed
    (docs/EXACT_ASSISTED.md). `generate` applies temperature, top-k and top-p only with do_sample=True: put
    their processors into the list, before this one.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns log p + noise in fp32, [B, V], of logits [B, V] behind input_ids [B, T]. T is the position;
        rows of a batch have different noise."""
        device = torch.device("cpu") if scores.device.type == "mps" else scores.device  # which lacks fp64
        generator = torch.Generator(device).manual_seed(hash((self.seed, input_ids.shape[1])))
        # In fp64, because rare tokens need noise larger than any that the 24 bits of fp32 can give.
        uniform = torch.rand(scores.shape, dtype=torch.float64, device=device, generator=generator)
        gumbel = -torch.log((-torch.log(uniform)).float())
        return scores.float().log_softmax(dim=-1) + gumbel.to(scores.device)
