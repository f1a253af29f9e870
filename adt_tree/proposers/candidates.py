"""The history of earlier distributions, and the chains drafted from it.

Every pass says something about many positions ahead, most of it below drafts that are then rejected. It is
kept: for every position the best codes of the last distributions that the target gave there, each with the
code that stood before. For the same code at the same position has much the same distribution behind it,
whatever stands further above. Nothing of the vocabulary's size is stored.

Dimensions: B images, P positions of an image, N nodes of a pass, H entries a position, L levels, K candidates
an entry, V codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adt_tree.tree import BatchShapes, DraftTree, leafy_chain_mask
from adt_tree.verify import Verdict, accepted_nodes

CHAIN_SCORE = 1e6  # no confidence is as high: the main chain comes first
HISTORY = 8  # entries kept per position, which sees a handful of passes before it is reached
EMPTY = -1
SAME_CODE = 2**40  # more than the stamps of any run
# How many times as much as another an entry counts (docs/LOG.md): read below the very code that stands before
# the position; by the newest pass that read the position; the newest of all.
BELOW, LATE, NEWEST = 10.0, 2.0, 2.0


@dataclass(frozen=True, slots=True)
class Candidates:
    """What is known of the next L positions, best first."""

    codes: Tensor  # [B, L, K] int64
    confidence: Tensor  # [B, L, K] log-confidence, -inf where there is no candidate


class History:
    """The last HISTORY distributions of every position: K codes and log-confidences of each, the code it was
    read below, and a stamp that grows from pass to pass.

    One row of the tensors is one position of one image. Position P takes what is not to be kept, and is never
    read, so that writing needs no condition.
    """

    def __init__(self, positions: int, slots: int, candidates: int, device: torch.device) -> None:
        """positions: P; candidates: K."""
        self._none, self.candidates = positions, candidates
        rows = slots * (positions + 1)  # one image after another
        self._starts = torch.arange(0, rows, positions + 1, device=device)[:, None]
        self._before = torch.full((rows, HISTORY), EMPTY, device=device)
        self._stamp = torch.full((rows, HISTORY), EMPTY, device=device)
        self._codes = torch.zeros(rows, HISTORY, candidates, dtype=torch.int64, device=device)
        self._confidence = torch.zeros(rows, HISTORY, candidates, device=device)
        self._next = torch.zeros(rows, dtype=torch.int64, device=device)
        self._passes = torch.zeros((), dtype=torch.int64, device=device)

    def clear(self, slot: int) -> None:
        """Forget an image."""
        rows = slice(slot * (self._none + 1), (slot + 1) * (self._none + 1))
        self._before[rows] = self._stamp[rows] = EMPTY

    def write(self, at: Tensor, before: Tensor, codes: Tensor, confidence: Tensor, order: Tensor) -> None:
        """Keep a pass's distributions of positions at [B, N] (P: not kept), read below the codes before
        [B, N]: codes and log-confidences [B, N, K]. Of one position's the least in order [B, N], all
        different, counts as the newest; of more than HISTORY the least are kept."""
        same = at.unsqueeze(2) == at.unsqueeze(1)
        rank = (same & (order.unsqueeze(1) < order.unsqueeze(2))).sum(dim=2)
        last = same.sum(dim=2).clamp(max=HISTORY) - 1
        dropped = rank >= HISTORY
        row = self._starts + at.masked_fill(dropped, self._none)
        # Each position's entries are a ring. The best of a pass goes in last: it is overwritten last.
        place = (row * HISTORY + (self._next[row] + last - rank) % HISTORY).flatten()
        self._passes += 1
        stamp = (self._passes * HISTORY - 1 - rank).masked_fill(dropped | (at == self._none), EMPTY)
        self._stamp.view(-1).index_copy_(0, place, stamp.flatten())
        self._before.view(-1).index_copy_(0, place, before.flatten())
        self._codes.flatten(0, 1).index_copy_(0, place, codes.flatten(0, 1))
        self._confidence.flatten(0, 1).index_copy_(0, place, confidence.flatten(0, 1))
        self._next.index_add_(0, row.flatten(), torch.ones_like(place))

    def entries(self, at: Tensor) -> Entries:
        """What is kept of positions at [B, L]."""
        rows = (self._starts + at).flatten()
        held = (self._before, self._stamp, self._codes, self._confidence)
        return Entries(*(part.index_select(0, rows).unflatten(0, at.shape) for part in held))


@dataclass(frozen=True, slots=True)
class Entries:
    """The earlier distributions of some positions."""

    before: Tensor  # [B, L, H] the codes they were read below
    stamp: Tensor  # [B, L, H] how new they are
    codes: Tensor  # [B, L, H, K]
    confidence: Tensor  # [B, L, H, K]

    def newest(self) -> Tensor:
        """The best code [B, L] of each position's newest entry."""
        return self._best(self.stamp)

    def below(self, code: Tensor) -> Tensor:
        """The best code [B, L] of the newest entry read below code [B, L], or where there is none of the
        newest of all."""
        return self._best(self.stamp + SAME_CODE * (self.before == code[..., None]))

    def mixture(self, code: Tensor, width: int, num_codes: int) -> tuple[Tensor, Tensor]:
        """The best `width` of V = num_codes codes and their log-confidences [B, L, width] by a mixture of all
        entries, in which those read below code [B, L], and newer ones, weigh more; -inf where there is
        none."""
        latest = self.stamp.amax(dim=2, keepdim=True)
        weight = (self.stamp >= 0).float()
        for times, these in (
            (BELOW, self.before == code[..., None]),
            (LATE, self.stamp > latest - HISTORY),
            (NEWEST, self.stamp == latest),
        ):
            weight = torch.add(weight, weight * these, alpha=times - 1)
        share = weight / weight.sum(dim=2, keepdim=True).clamp(min=1.0)
        parts = (share[..., None] * self.confidence.exp()).flatten(2)
        mass = parts.new_zeros(*code.shape, num_codes).scatter_add_(2, self.codes.flatten(2), parts)
        most, codes = mass.topk(width, dim=2)
        return codes, most.clamp(max=1.0).log()

    def _best(self, stamp: Tensor) -> Tensor:
        which = stamp.argmax(dim=2, keepdim=True)
        return self.codes[..., 0].gather(2, which)[..., 0]


def newest_first(tree: DraftTree, verdict: Verdict) -> Tensor:
    """Which distribution of a position says most of it: [B, N] int64, all different, the best least.

    First the nodes with the most accepted nodes above them, for fewest of their prefix's codes are wrong;
    ties keep tree order, which puts the main chain first.
    """
    shared = (tree.ancestors & accepted_nodes(tree, verdict)[:, None]).sum(dim=2)
    return torch.arange(tree.nodes, device=shared.device) - shared * tree.nodes


def grow_chains(found: Candidates, shapes: BatchShapes, last_codes: Tensor) -> DraftTree:
    """The best code of every level as a chain below last_codes [B], and the best others as its leaves.

    A leaf's score is the summed log-confidence of its path; the chain's nodes come first, in their order, and
    ties keep theirs. found: at least as long and as wide as the greatest shape; a level's best is finite.
    """
    depth, width, budget = shapes.limits.unbind(1)
    level, rank = (torch.arange(size, device=last_codes.device) for size in found.codes.shape[1:])
    best = found.confidence[..., 0]
    path = (best.cumsum(dim=1) - best)[..., None] + found.confidence  # [B, L, K]
    scores = path.clone()
    scores[..., 0] = CHAIN_SCORE - level
    absent = (level[:, None] >= depth[:, None, None]) | (rank >= width[:, None, None])
    scores = scores.masked_fill_(absent, float("-inf")).flatten(1)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, : shapes.budget]
    which = F.pad(order, (1, 0))  # the root stands as the first candidate, whose parent is the root
    count = budget.minimum(scores.isfinite().sum(dim=1))
    node = torch.arange(which.shape[1], device=last_codes.device)
    valid = node <= count[:, None]
    which.masked_fill_(~valid, 0)  # and so does padding
    codes = found.codes.flatten(1).gather(1, which)
    codes[:, 0] = last_codes
    parents = which // len(rank)  # level l hangs from the chain's node of level l - 1, which is node l
    return DraftTree(
        codes=codes,
        parents=parents,
        depths=parents + (node > 0),
        ancestors=leafy_chain_mask(parents),
        valid=valid,
        depth=shapes.depth,
        width=shapes.width,
        confidence=path.flatten(1).gather(1, which).masked_fill(node == 0, 0.0),
        leafy_chain=True,
    )
