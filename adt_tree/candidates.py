"""Stale codes: the target's own choices behind rejected nodes, and the chains made of them.

Dimensions: B images, L levels, K candidates a position, N nodes, V codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adt_tree.calibrate import SEED, STALE
from adt_tree.grid import Grid
from adt_tree.seen import SeenLaws
from adt_tree.tree import DraftTree, leaves_mask
from adt_tree.verify import Verdict, accepted_nodes

SEED_CELLS = ("above", "left", "both")
SEED_CONFIDENCE = -1.0  # raw log-confidence of a code copied from a neighbouring cell
KEPT = 1e6  # a score no confidence reaches: the main chain comes first


@dataclass(frozen=True, slots=True)
class Candidates:
    """What is known of the next L positions, best first."""

    codes: Tensor  # [B, L, K] int64
    confidence: Tensor  # [B, L, K] raw log-confidence, -inf where there is no candidate
    source: Tensor  # [B, L, K] int64: who names the code, see calibrate


class CandidateCache:
    """For every position ahead the best codes of a mixture of the laws seen there, in which those read below
    the very code that now stands before the position, committed or drafted, have most weight
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
        if seed_cells not in SEED_CELLS:
            raise ValueError(f"seed_cells {seed_cells!r}: choose one of {', '.join(SEED_CELLS)}")
        self.grid, self.seed_cells, self.num_codes = grid, seed_cells, num_codes
        self.seen = SeenLaws(grid.size, slots, candidates, device)
        # The last column takes what falls outside an image.
        self._codes = torch.zeros(slots, grid.size + 1, dtype=torch.int64, device=device)
        self._position = torch.ones(slots, dtype=torch.int64, device=device)

    def prefill(self, slot: int, code: Tensor) -> None:
        """A new image takes the slot; code [] is its first."""
        self.seen.clear(slot)
        self._codes[slot, 0] = code
        self._position[slot] = 1

    def release(self, slot: int) -> None:
        """The slot idles."""
        self._position[slot] = 1

    def observe(self, tree: DraftTree, perturbed: Tensor, verdict: Verdict) -> None:
        """Keep the best codes of every node's law that is one; write down what was committed. perturbed: as
        Proposer.observe."""
        code, value = best_codes(perturbed, self.seen.candidates)
        law = tree.valid & value[..., 0].isfinite()
        at = self.ahead(tree.depths).masked_fill(~law, self.grid.size)
        self.seen.write(at, tree.codes, code, value, order_of_laws(tree, verdict))
        self.advance(verdict)

    def advance(self, verdict: Verdict) -> None:
        """Write down what was committed."""
        column = torch.arange(verdict.codes.shape[1], device=verdict.codes.device)
        done = self.ahead(column).masked_fill(column >= verdict.count[:, None], self.grid.size)
        self._codes.scatter_(1, done, verdict.codes)
        self._position += verdict.count

    def ahead(self, steps: Tensor) -> Tensor:
        """The positions [B, L] so many steps, [L] or [B, L], behind the first open one; grid.size is
        outside."""
        return (self._position[:, None] + steps).clamp(max=self.grid.size)

    def candidates(self, length: int, width: int) -> Candidates:
        """The best `width` of the next `length` positions, at least one of each; those never scored copy a
        neighbour."""
        at = self.ahead(torch.arange(length, device=self._codes.device))
        codes, confidence = self._fitting(at, width)
        fresh = ~confidence[..., 0].isfinite()
        first, second = self._neighbours(at, codes[..., 0], fresh)
        codes[..., 0] = first
        confidence[..., 0].masked_fill_(fresh, SEED_CONFIDENCE)
        if self.seed_cells == "both" and width > 1:
            unlike = fresh & (first != second)
            codes[..., 1] = torch.where(unlike, second, codes[..., 1])
            confidence[..., 1].masked_fill_(unlike, 2 * SEED_CONFIDENCE)
        source = torch.where(fresh, SEED, STALE)[..., None].expand_as(codes)
        return Candidates(codes, confidence, source)

    def _neighbours(self, at: Tensor, codes: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [B, L] of positions at [B, L], and of their other neighbours: where fresh, copied from the
        cell above and the nearest known one to the left, in the order of seed_cells."""
        # Trees begin at the first open position, so what was ever scored is in front of what was not.
        known = torch.cat((self._before(at), codes), dim=1)
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

    def _before(self, at: Tensor) -> Tensor:
        """[B, 1]: the committed code before the first of positions at [B, L]."""
        return self._codes.gather(1, (at[:, :1] - 1).clamp(min=0))

    def _fitting(self, at: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Codes and log-confidences [B, L, width] that fit positions at [B, L], -inf where no law was seen.

        What fits a position depends on the code before it, and so on: all are looked up at once, below the
        best codes of the newest laws, and then below the best found so.
        """
        around, root = self.seen.around(at), self._before(at)

        def before(chain: Tensor) -> Tensor:
            return torch.cat((root, chain[:, :-1]), dim=1)

        chain = around.below(before(around.newest()))
        return around.mixed(before(chain), width, self.num_codes)


def best_codes(perturbed: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """The best codes of every node's law under the noise of its position, perturbed [B, N, V], and their
    log-confidences, [B, N, K]."""
    value, code = perturbed.log_softmax(dim=-1).topk(candidates, dim=-1)
    return code, value


def order_of_laws(tree: DraftTree, verdict: Verdict) -> Tensor:
    """Which law of a position says most of it: [B, N] int64, all different, the best least.

    First the nodes with the most accepted nodes above them, for fewest of their prefix's codes are wrong;
    ties keep tree order, which puts the main chain first.
    """
    shared = (tree.ancestors & accepted_nodes(tree, verdict)[:, None]).sum(dim=2)
    return torch.arange(tree.nodes, device=shared.device) - shared * tree.nodes


def chain_scores(gain: Tensor, depth: Tensor, width: Tensor) -> Tensor:
    """Scores [B, L * K] of candidates by level and rank: the best of every level make a chain below the root,
    the others are leaves of it. -inf beyond each image's depth [B] and width [B], and where gain is.

    gain [B, L, K]: log acceptance rates, those of rank 0 finite. A leaf scores the sum of gains on its path;
    the chain scores KEPT less its level.
    """
    level, rank = (torch.arange(size, device=gain.device) for size in gain.shape[1:])
    sure = gain[..., 0]
    scores = (sure.cumsum(dim=1) - sure)[..., None] + gain
    scores[..., 0] = KEPT - level
    absent = (level[:, None] >= depth[:, None, None]) | (rank >= width[:, None, None])
    return scores.masked_fill_(absent, float("-inf")).flatten(1)


def grow_chains(
    found: Candidates,
    gain: Tensor,
    bins: Tensor | None,
    limits: Tensor,
    bounds: tuple[int, int, int],
    roots: Tensor,
) -> DraftTree:
    """The best `budget` candidates by chain_scores() below roots [B], the chain first; ties keep their order.

    gain (log acceptance rates) and bins (None: nobody calibrates) [B, L, K]; limits [B, 3]: each image's
    depth, width and budget; bounds: the largest budget, depth L and width K.
    """
    most, deepest, widest = bounds
    depth, width, budget = limits.unbind(1)
    scores = chain_scores(gain, depth, width)
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :most]
    which = F.pad(best, (1, 0))  # the root stands as the first candidate, whose parent is the root
    count = budget.minimum(scores.isfinite().sum(dim=1))
    node = torch.arange(which.shape[1], device=roots.device)
    valid = node <= count[:, None]
    which.masked_fill_(~valid, 0)  # and so does padding
    codes = found.codes.flatten(1).gather(1, which)
    codes[:, 0] = roots
    parents = which // gain.shape[2]  # level l hangs from the chain's node of level l - 1, which is node l
    return DraftTree(
        codes=codes,
        parents=parents,
        depths=parents + (node > 0),
        ancestors=leaves_mask(parents),
        valid=valid,
        depth=deepest,
        width=widest,
        bins=None if bins is None else bins.flatten(1).gather(1, which),
        tail=1,
    )
