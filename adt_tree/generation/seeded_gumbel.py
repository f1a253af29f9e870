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
        generator = torch.Generator().manual_seed(hash((self.seed, input_ids.shape[1])))
        # Drawn on the CPU, so that it is the same on every device, and in fp64: rare tokens need large noise.
        uniform = torch.rand(scores.shape, dtype=torch.float64, generator=generator)
        gumbel = -torch.log(-torch.log(uniform))
        return scores.float().log_softmax(dim=-1) + gumbel.float().to(scores.device)
