"""The distribution that is sampled: guidance, temperature, top-k and top-p, each defined once.

Dimensions: G guidance branches (2: conditional, unconditional; 1: no guidance), B images, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adt_tree.settings import Sampling


@dataclass(frozen=True, slots=True)
class PassSampling:
    """The settings of a pass: numbers, which may differ from image to image, on the device, and on the host
    which filters any image needs, so that no filter runs for nothing."""

    # [B, 4] fp32, or one row for all images: temperature, guidance, top_p (inf: no such filter), and 1 if no
    # filter applies at all, else 0
    numbers: Tensor
    all_greedy: bool  # no image needs a temperature or a filter
    any_greedy: bool  # top-k must spare some images
    top_k: int  # 0: no image needs this filter
    has_top_p: bool  # false: no image needs this filter
    top_p_first: bool

    @staticmethod
    def of(numbers: Tensor, samplings: Sequence[Sampling]) -> PassSampling:
        """Returns the settings of images with these samplings, whose rows are `numbers`. top_k and the order
        of the filters must be the same in all."""
        filtered = [sampling for sampling in samplings if not sampling.greedy]
        return PassSampling(
            numbers,
            all_greedy=not filtered,
            any_greedy=len(filtered) < len(samplings),
            top_k=samplings[0].top_k,
            has_top_p=any(sampling.top_p < 1 for sampling in filtered),
            top_p_first=samplings[0].top_p_first,
        )

    @staticmethod
    def uniform(sampling: Sampling, device: torch.device) -> PassSampling:
        """Returns the settings of a pass whose images all have this sampling."""
        return PassSampling.of(torch.tensor([sampling.row], dtype=torch.float32, device=device), [sampling])


def guide(logits: Tensor, guidance: float | Tensor) -> Tensor:
    """Returns u + s (c - u), s the guidance, from logits [G, ..., V]: c is branch 0, conditional, and u is
    branch 1. A single branch is returned as it is."""
    if logits.shape[0] == 1:
        return logits[0]
    return logits[1].lerp(logits[0], guidance)


def keep_top_k(logits: Tensor, top_k: int, spared: Tensor | None = None) -> Tensor:
    """Sets every logit below the top_k-th largest to -inf; ties with it stay. 0 filters nothing. spared
    [..., 1]: not 0 for rows that are not filtered."""
    if top_k == 0 or top_k >= logits.shape[-1]:
        return logits
    least = logits.topk(top_k, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    if spared is not None:
        least = least.masked_fill(spared > 0, float("-inf"))
    return logits.masked_fill(logits < least, float("-inf"))


def keep_top_p(logits: Tensor, top_p: float | Tensor) -> Tensor:
    """Keeps the smallest set of most probable codes whose mass reaches top_p, and sets the other logits to
    -inf. The most probable code always stays."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    beyond = before >= top_p
    beyond[..., 0] = False  # a top_p below the smallest number of fp32 is 0
    return logits.masked_fill(beyond.scatter(-1, order, beyond), float("-inf"))


def force(log_p: Tensor, forced: Tensor | None) -> Tensor:
    """Returns log_p [..., V], one-hot on code 0 where `forced` [...] is true; None: nowhere."""
    if forced is None:
        return log_p
    one_hot = log_p.masked_fill(forced[..., None], float("-inf"))
    one_hot[..., :1].masked_fill_(forced[..., None], 0.0)
    return one_hot


def log_probs(logits: Tensor, sampling: PassSampling, forced: Tensor | None = None) -> Tensor:
    """Returns log p = log softmax(filter(guided / T)) in fp32, [B, ..., V] from logits [G, B, ..., V].

    At temperature 0 no filter applies, and the result is log softmax(guided): its argmax is the code, and its
    values are the confidences by which trees grow and LANTERN's relaxation is measured. forced [B, ...] bool:
    where the model has no choice, because the position is a row end; log p is one-hot on code 0 there. It is
    set last, because logits of -inf would make guidance NaN.
    """
    return force(filtered(logits, sampling).log_softmax(dim=-1), forced)


def filtered(logits: Tensor, sampling: PassSampling) -> Tensor:
    """Returns filter(guided / T) in fp32, [B, ..., V] from logits [G, B, ..., V]."""
    shape = (-1, *[1] * (logits.dim() - 2))
    temperature, guidance, top_p, greedy = (column.view(shape) for column in sampling.numbers.unbind(1))
    guided = guide(logits.float(), guidance)
    if sampling.all_greedy:
        return guided
    kept = guided / temperature
    if sampling.has_top_p and sampling.top_p_first:
        kept = keep_top_p(kept, top_p)
    kept = keep_top_k(kept, sampling.top_k, greedy if sampling.any_greedy else None)
    if sampling.has_top_p and not sampling.top_p_first:
        kept = keep_top_p(kept, top_p)
    return kept
