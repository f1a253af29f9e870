"""The candidate cache of earlier distributions, and the chains drafted from it.

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

from adt_tree.grid import Grid
from adt_tree.tree import BatchShapes, DraftTree, leafy_chain_mask
from adt_tree.verify import Verdict, accepted_nodes

SEED_CELLS = ("above", "left", "both")
SEED_CONFIDENCE = -1.0  # raw log-confidence of a code copied from a neighbouring cell
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


class CandidateCache:
    """For every position ahead the best codes of a mixture of the distributions seen there, in which those
    read below the very code that now stands before the position, committed or drafted, have most weight
    (docs/METHOD.md)."""

    def __init__(
        self,
        grid: Grid,
        slots: int,
        candidates: int,
        seed_cells: str,
        num_codes: int,
        device: torch.device,
    ) -> None:
        """candidates: K; seed_cells: what a position not seen yet is copied from; num_codes: V."""
        self.grid, self.seed_cells, self.num_codes = grid, seed_cells, num_codes
        self.history = History(grid.size, slots, candidates, device)
        # The last column takes what falls outside an image.
        self._codes = torch.zeros(slots, grid.size + 1, dtype=torch.int64, device=device)
        self._position = torch.ones(slots, dtype=torch.int64, device=device)

    def prefill(self, slot: int, code: Tensor) -> None:
        """A new image takes the slot; code [] is its first."""
        self.history.clear(slot)
        self._codes[slot, 0] = code
        self._position[slot] = 1

    def release(self, slot: int) -> None:
        """The slot idles."""
        self._position[slot] = 1

    def observe(self, tree: DraftTree, perturbed: Tensor, verdict: Verdict) -> None:
        """Keep the best codes of every node's distribution under the noise of its position, perturbed
        [B, N, V], and write down what was committed."""
        value, code = perturbed.log_softmax(dim=-1).topk(self.history.candidates, dim=-1)
        kept = tree.valid & value[..., 0].isfinite()
        at = self._ahead(tree.depths).masked_fill(~kept, self.grid.size)
        self.history.write(at, tree.codes, code, value, newest_first(tree, verdict))
        column = torch.arange(verdict.codes.shape[1], device=verdict.codes.device)
        done = self._ahead(column).masked_fill(column >= verdict.count[:, None], self.grid.size)
        self._codes.scatter_(1, done, verdict.codes)
        self._position += verdict.count

    def stale(self) -> Tensor:
        """[B] whether the first open position was scored, but never below the code that now stands before
        it."""
        at = self._ahead(torch.zeros(1, dtype=torch.int64, device=self._codes.device))
        entries = self.history.entries(at)
        scored, fitting = entries.stamp >= 0, entries.before == self._last(at)[..., None]
        return (scored.any(dim=2) & ~(scored & fitting).any(dim=2))[:, 0]

    def candidates(self, length: int, width: int, first: Tensor | None = None) -> Candidates:
        """The best `width` of the next `length` positions, at least one of each; those never scored copy a
        neighbour. first [B]: the code believed at the first of them, if not its own best."""
        at = self._ahead(torch.arange(length, device=self._codes.device))
        codes, confidence = self._cached(at, width, first)
        fresh = ~confidence[..., 0].isfinite()
        first, second = self._neighbours(at, codes[..., 0], fresh)
        codes[..., 0] = first
        confidence[..., 0].masked_fill_(fresh, SEED_CONFIDENCE)
        if self.seed_cells == "both" and width > 1:
            unlike = fresh & (first != second)
            codes[..., 1] = torch.where(unlike, second, codes[..., 1])
            confidence[..., 1].masked_fill_(unlike, 2 * SEED_CONFIDENCE)
        return Candidates(codes, confidence)

    def _ahead(self, steps: Tensor) -> Tensor:
        """The positions [B, L] so many steps, [L] or [B, L], behind the first open one; grid.size is
        outside."""
        return (self._position[:, None] + steps).clamp(max=self.grid.size)

    def _neighbours(self, at: Tensor, codes: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [B, L] of positions at [B, L], and of their other neighbours: where fresh, copied from the
        cell above and the nearest known one to the left, in the order of seed_cells."""
        # Trees begin at the first open position, so what was ever scored is in front of what was not.
        known = torch.cat((self._last(at), codes), dim=1)
        left = known.gather(1, (~fresh).sum(dim=1, keepdim=True))
        width, found = self.grid.width, []
        above = self._codes.gather(1, (at[:, :width] - width).clamp(min=0))
        # A row at a time: the copied row may itself be copied.
        for cells, own, new in zip(*(x.split(width, dim=1) for x in (at, codes, fresh)), strict=True):
            above = above[:, : cells.shape[1]]
            above = torch.where(cells >= width, above, left)
            first, second = (left, above) if self.seed_cells == "left" else (above, left)
            above = torch.where(new, first, own)
            found.append((above, second.expand_as(above)))
        first, second = (torch.cat(part, dim=1) for part in zip(*found, strict=True))
        return first, second

    def _last(self, at: Tensor) -> Tensor:
        """[B, 1]: the committed code before the first of positions at [B, L]."""
        return self._codes.gather(1, (at[:, :1] - 1).clamp(min=0))

    def _cached(self, at: Tensor, width: int, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """Codes and log-confidences [B, L, width] that fit positions at [B, L], -inf where nothing was seen.

        What fits a position depends on the code before it, and so on. Instead of walking, all are looked up
        at once: below the best codes of the newest entries, and then below the best found so.
        """
        entries, last = self.history.entries(at), self._last(at)

        def before(chain: Tensor) -> Tensor:
            own = chain if first is None else torch.cat((first[:, None], chain[:, 1:]), dim=1)
            return torch.cat((last, own[:, :-1]), dim=1)

        chain = entries.below(before(entries.newest()))
        return entries.mixture(before(chain), width, self.num_codes)


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
