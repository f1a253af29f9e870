"""Stale codes: the target's own choices behind rejected nodes, and the chains made of them.

Dimensions: B images, L levels, K candidates a position, N nodes, V codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adt_tree.calibrate import SEED, STALE
from adt_tree.grid import Grid
from adt_tree.seen import SeenLaws
from adt_tree.tree import DraftTree, Pool, rows_at, select
from adt_tree.verify import Verdict, accepted_nodes

SEED_CELLS = ("above", "left", "both")
SEED_CONFIDENCE = -1.0  # raw log-confidence of a code copied from a neighbouring cell
KEPT = 1e6  # a score no confidence reaches: the main chain stays whatever the budget leaves out
NEVER = -1e4  # log acceptance rate of what cannot be


@dataclass(frozen=True, slots=True)
class Candidates:
    """What is known of the next L positions, best first."""

    codes: Tensor  # [B, L, K] int64
    confidence: Tensor  # [B, L, K] raw log-confidence, -inf where there is no candidate
    source: Tensor  # [B, L, K] int64: who names the code, see calibrate


class StaleCodes:
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

    def observe(self, tree: DraftTree, log_p: Tensor, gumbel: Tensor, verdict: Verdict) -> None:
        """Keep the best codes of every node's law that is one; write down what was committed."""
        code, value = best_codes(tree, log_p, gumbel, self.seen.candidates)
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
        """The best `width` of the next `length` positions; those never scored copy a neighbour."""
        at = self.ahead(torch.arange(length, device=self._codes.device))
        codes, confidence = self._fitting(at, width)
        known = confidence[..., 0].isfinite()
        self._codes.scatter_(1, at, codes[..., 0])  # candidates stand in for codes that do not exist yet
        left = self._last_known(at, codes[..., 0], known)
        # A row at a time: the copied row may itself be copied.
        for start in range(0, length, self.grid.width):
            part = slice(start, start + self.grid.width)
            cells, fresh = at[:, part], ~known[:, part]
            row_above = self._codes.gather(1, (cells - self.grid.width).clamp(min=0))
            above = torch.where(cells >= self.grid.width, row_above, left[:, part])
            first, second = (left[:, part], above) if self.seed_cells == "left" else (above, left[:, part])
            codes[:, part, 0] = torch.where(fresh, first, codes[:, part, 0])
            confidence[:, part, 0] = torch.where(fresh, SEED_CONFIDENCE, confidence[:, part, 0])
            if self.seed_cells == "both" and width > 1:
                fresh = fresh & (first != second)
                codes[:, part, 1] = torch.where(fresh, second, codes[:, part, 1])
                confidence[:, part, 1] = torch.where(fresh, 2 * SEED_CONFIDENCE, confidence[:, part, 1])
            self._codes.scatter_(1, cells, codes[:, part, 0])
        source = torch.where(known, STALE, SEED)[..., None].expand_as(codes)
        return Candidates(codes, confidence, source)

    def _fitting(self, at: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Codes and log-confidences [B, L, width] that fit positions at [B, L], -inf where no law was seen.

        What fits a position depends on the code before it, and so on: all are looked up at once, below the
        best codes of the newest laws, and then below the best found so.
        """
        around, root = self.seen.around(at), self._codes.gather(1, (at[:, :1] - 1).clamp(min=0))

        def before(chain: Tensor) -> Tensor:
            return torch.cat((root, chain[:, :-1]), dim=1)

        chain = around.below(before(around.newest()))
        return around.mixed(before(chain), width, self.num_codes)

    def _last_known(self, at: Tensor, codes: Tensor, known: Tensor) -> Tensor:
        """[B, L]: the nearest candidate before each position that was ever scored, else the root."""
        root = self._codes.gather(1, (at[:, :1] - 1).clamp(min=0))
        column = torch.arange(1, at.shape[1] + 1, device=at.device)
        latest = torch.where(known, column, 0).cummax(dim=1).values.roll(1, dims=1)
        latest[:, 0] = 0
        return torch.cat((root, codes), dim=1).gather(1, latest)


def best_codes(tree: DraftTree, log_p: Tensor, gumbel: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """The best codes of every node's law under the noise of its position, and their log-confidences,
    [B, N, K]."""
    value, code = (log_p + rows_at(gumbel, tree.depths)).log_softmax(dim=-1).topk(candidates, dim=-1)
    return code, value


def order_of_laws(tree: DraftTree, verdict: Verdict) -> Tensor:
    """Which law of a position says most of it: [B, N] int64, all different, the best least.

    First the nodes with the most accepted nodes above them, for fewest of their prefix's codes are wrong;
    ties keep tree order, which puts the main chain first.
    """
    shared = (tree.ancestors & accepted_nodes(tree, verdict)[:, None]).sum(dim=2)
    return torch.arange(tree.nodes, device=shared.device) - shared * tree.nodes


def chains(codes: Tensor, gain: Tensor, bins: Tensor) -> Pool:
    """Below the root a chain of the best candidates, and at every level of it the other candidates as leaves.

    codes, gain (log acceptance rate, -inf: none) and bins [B, L, K]. A score is the sum of gains on the path;
    the chain itself scores KEPT less its depth.
    """
    images, length, _ = codes.shape
    level = torch.arange(length, device=codes.device)
    sure = gain[..., 0].clamp(min=NEVER)
    along = sure.cumsum(dim=1)
    kept = (KEPT - 1 - level).where(along > NEVER, NEVER)
    # The chain comes first, as parents must; along - sure is the sum above a level.
    scores = torch.cat((kept, ((along - sure)[..., None] + gain[..., 1:]).flatten(1)), dim=1)
    scores = scores.masked_fill(scores <= NEVER, float("-inf"))
    code, bucket = (torch.cat((x[..., 0], x[..., 1:].flatten(1)), dim=1) for x in (codes, bins))
    above = torch.cat((level, level.repeat_interleave(codes.shape[2] - 1)))
    return Pool(code, scores, (above - 1).expand(images, -1), 1 + above, bucket, tail=1)


def pool_of_chains(found: Candidates, gain: Tensor, bins: Tensor, depth: Tensor, width: Tensor) -> Pool:
    """chains() of the candidates found that each image's depth [B] and width [B] admit.

    gain (log acceptance rates) and bins [B, L, K].
    """
    length, candidates = found.codes.shape[1:]
    below = torch.arange(length, device=depth.device) >= depth[:, None]
    wider = torch.arange(candidates, device=depth.device) >= width[:, None]
    absent = below[..., None] | wider[:, None] | ~found.confidence.isfinite()
    return chains(found.codes, gain.masked_fill(absent, float("-inf")), bins)


def grow_chains(
    found: Candidates, gain: Tensor, bins: Tensor, limits: Tensor, bounds: tuple[int, int, int], roots: Tensor
) -> DraftTree:
    """The best `budget` nodes of pool_of_chains() below roots [B].

    limits [B, 3]: each image's depth, width and budget; bounds: the largest budget, depth L and width K.
    """
    depth, width, budget = limits.unbind(1)
    return select(pool_of_chains(found, gain, bins, depth, width), budget, roots, bounds)
