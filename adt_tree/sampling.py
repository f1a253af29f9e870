"""The distribution that is sampled: guidance, temperature, top-k and top-p, each defined once.

Dimensions: G guidance branches (2: conditional, unconditional; 1: no guidance), B images, V codes. This file
calls methods of tensors and no function of torch, so that importing it does not import torch.
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
    top_p_first: bool = False  # true: top-p before top-k, as in the released EAGLE code

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(f"temperature {self.temperature}: it must not be negative")
        if self.top_k < 0:
            raise UserError(f"top_k {self.top_k}: it must not be negative (0 keeps every code)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p}: it must lie in (0, 1]")

    @property
    def greedy(self) -> bool:
        """True if the argmax is taken: up to a temperature of 1e-5, as in the published code."""
        return self.temperature <= 1e-5

    @property
    def branches(self) -> int:
        """Rows per image in a pass: 2 under classifier-free guidance, else 1."""
        return 1 if self.guidance == 1 else 2


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The settings of images in flight that differ in them: entry b of a tensor belongs to slot b.

    log_probs() computes for a row the same as under the row's Sampling, on a CPU bit for bit. On CUDA the
    last bit can differ, because CUDA multiplies by the reciprocal of a number, but divides by a tensor.
    """

    temperature: Tensor  # [B] fp32; 1 for a greedy image
    greedy: Tensor  # [B] bool: no filter applies
    guidance: Tensor  # [B] fp32
    top_k: int
    top_p: Tensor | float  # [B] fp32, inf for an image without this filter; 1.0 if no image has it
    top_p_first: bool

    def spread(self, dims: int) -> RowSampling:
        """Returns the settings with their tensors shaped for logits [G, B, ..., V] of `dims` dimensions."""
        shape = (-1, *[1] * (dims - 2))
        top_p = self.top_p if isinstance(self.top_p, float) else self.top_p.view(shape)
        temperature, greedy, guidance = self.temperature, self.greedy, self.guidance
        tensors = temperature.view(shape), greedy.view(shape), guidance.view(shape)
        return RowSampling(*tensors, self.top_k, top_p, self.top_p_first)


def guide(logits: Tensor, guidance: float | Tensor) -> Tensor:
    """Returns u + s (c - u), s the guidance, from logits [G, ..., V]: c is branch 0, conditional, and u is
    branch 1. A single branch is returned as it is."""
    if logits.shape[0] == 1:
        return logits[0]
    return logits[1].lerp(logits[0], guidance)


def keep_top_k(logits: Tensor, top_k: int, spared: Tensor | None = None) -> Tensor:
    """Sets every logit below the top_k-th largest to -inf; ties with it stay. 0 filters nothing. spared
    [..., 1] bool: rows that are not filtered."""
    if top_k == 0 or top_k >= logits.shape[-1]:
        return logits
    least = logits.topk(top_k, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    if spared is not None:
        least = least.masked_fill(spared, float("-inf"))
    return logits.masked_fill(logits < least, float("-inf"))


def keep_top_p(logits: Tensor, top_p: float | Tensor) -> Tensor:
    """Keeps the smallest set of most probable codes whose mass reaches top_p, and sets the other logits to
    -inf. The most probable code always stays."""
    if isinstance(top_p, float | int) and top_p >= 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    beyond = before >= top_p
    beyond[..., 0] = False  # a top_p below the smallest number of fp32 is 0
    return logits.masked_fill(beyond.scatter(-1, order, beyond), float("-inf"))


def log_probs(logits: Tensor, sampling: Sampling | RowSampling) -> Tensor:
    """Returns log p = log softmax(filter(guided / T)) in fp32, [..., V] from logits [G, ..., V].

    At temperature 0 no filter applies, and the result is log softmax(guided): its argmax is the code, and its
    values are the confidences by which trees grow and LANTERN's relaxation is measured. Under a RowSampling
    logits are [G, B, ..., V].
    """
    spared = None
    if isinstance(sampling, RowSampling):
        sampling = sampling.spread(logits.dim())
        spared = sampling.greedy
    guided = guide(logits.float(), sampling.guidance)
    if sampling.greedy is True:
        return guided.log_softmax(dim=-1)
    scaled = guided / sampling.temperature
    if sampling.top_p_first:
        return keep_top_k(keep_top_p(scaled, sampling.top_p), sampling.top_k, spared).log_softmax(dim=-1)
    return keep_top_p(keep_top_k(scaled, sampling.top_k, spared), sampling.top_p).log_softmax(dim=-1)
