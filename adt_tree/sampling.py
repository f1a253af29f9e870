"""The distribution that is sampled: guidance, temperature, top-k and top-p, each defined once.

Dimensions: G guidance branches (2: conditional, unconditional; 1: no guidance), V codes. This file calls
tensors' own methods only, so that importing it does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from adt_tree.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """The settings of the distribution. Temperature 0 is greedy decoding; top_k 0, top_p 1 and guidance 1
    each switch their step off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    guidance: float = 3.0
    top_p_first: bool = False  # the released EAGLE code's order of the two filters

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(f"temperature {self.temperature}: it must not be negative")
        if self.top_k < 0:
            raise UserError(f"top_k {self.top_k}: it must not be negative (0 keeps every code)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p}: it must lie in (0, 1]")

    @property
    def greedy(self) -> bool:
        """Whether the argmax is taken, which the published code does up to a temperature of 1e-5."""
        return self.temperature <= 1e-5

    @property
    def branches(self) -> int:
        """Rows per image in a pass: 2 under classifier-free guidance, else 1."""
        return 1 if self.guidance == 1 else 2


def guide(logits: Tensor, guidance: float) -> Tensor:
    """Returns u + s (c - u), s the guidance, from logits [G, ..., V]: c is branch 0, conditional, and u is
    branch 1. A single branch is returned as it is."""
    if logits.shape[0] == 1:
        return logits[0]
    return logits[1].lerp(logits[0], guidance)


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Sets every logit below the top_k-th largest to -inf; ties with it stay. 0 keeps all."""
    if top_k == 0 or top_k >= logits.shape[-1]:
        return logits
    least = logits.topk(top_k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, float("-inf"))


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keeps the smallest set of most probable codes whose mass reaches top_p, and sets the other logits to
    -inf. The most probable code always stays."""
    if top_p >= 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    beyond = before >= top_p
    return logits.masked_fill(beyond.scatter(-1, order, beyond), float("-inf"))


def log_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Returns log p = log softmax(filter(guided / T)) in fp32, [..., V] from logits [G, ..., V].

    At temperature 0 no filter applies, and the result is log softmax(guided): its argmax is the code, and its
    values are the confidences by which trees grow and LANTERN's relaxation is measured.
    """
    guided = guide(logits.float(), sampling.guidance)
    if sampling.greedy:
        return guided.log_softmax(dim=-1)
    scaled = guided / sampling.temperature
    if sampling.top_p_first:
        return keep_top_k(keep_top_p(scaled, sampling.top_p), sampling.top_k).log_softmax(dim=-1)
    return keep_top_p(keep_top_k(scaled, sampling.top_k), sampling.top_p).log_softmax(dim=-1)
