"""Self-drafting: the target's own earlier choices as draft trees (coupled Jacobi trees); no drafter network.

With position-keyed noise the choice at a position is a deterministic function of its prefix, so what the
target chose behind a rejected node is a good draft for the next step: its prefix has changed at one place,
and for images that decays within a few cells. Sources: SJD 2410.01699, SCD 2510.24211 (the coupling),
SJD-PAC 2603.18599 (trees). Only the coupled rule may verify such trees; it is exact whatever they hold.

Dimensions: B images, N nodes, L positions ahead, K candidates a position, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adt_tree.grid import Grid
from adt_tree.policy import TreeShape
from adt_tree.proposers.candidates import Candidates, History, grow_chains, newest_first
from adt_tree.roles import NoiseBelow, Prefix, Run, Setup, call
from adt_tree.tree import BatchShapes, DraftTree, root_only_tree
from adt_tree.verify import Verdict

SEED_CONFIDENCE = -1.0  # raw log-confidence of a code copied from a neighbouring cell


def make(setup: Setup) -> SelfDraftProposer:
    """Returns the proposer of self-draft and adt-self-draft."""
    model, target = setup.model, setup.target
    return SelfDraftProposer(
        model.grid,
        target.slots,
        setup.shape.width,
        setup.method.seeds,
        model.num_codes,
        target.device,
        target.run,
    )


class SelfDraftProposer:
    """A main chain of the best code of every position ahead, and alternatives by summed confidence.

    The codes of a position are the best of a mixture of the distributions seen there, in which those read
    below the very code that now stands before it, committed or drafted, have most weight (docs/METHOD.md). A
    shape's depth is the length of the main chain, its width the candidates per position, its budget all
    drafted nodes.
    """

    def __init__(
        self,
        grid: Grid,
        slots: int,
        candidates: int,
        seed_cells: str,
        num_codes: int,
        device: torch.device,
        run: Run = call,
    ) -> None:
        """candidates: K; seed_cells: what a position not seen yet is copied from; num_codes: V."""
        self.grid, self.seed_cells, self.num_codes, self._run = grid, seed_cells, num_codes, run
        self.history = History(grid.size, slots, candidates, device)
        # The last column takes what falls outside an image.
        self._codes = torch.zeros(slots, grid.size + 1, dtype=torch.int64, device=device)
        self._position = torch.ones(slots, dtype=torch.int64, device=device)

    def calls(self, shape: TreeShape) -> int:
        """No drafter passes."""
        return 0

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        """Nothing is known of a new image but its first code."""
        self.history.clear(slot)
        self._codes[slot, 0] = code
        self._position[slot] = 1

    def release(self, slot: int) -> None:
        """The slot idles."""
        self._position[slot] = 1

    def propose(
        self, shapes: BatchShapes, last_codes: Tensor, noise_below: NoiseBelow, committed: Sequence[int]
    ) -> DraftTree:
        """A chain with leaves per slot."""
        return self._run(self._draft, shapes.all_levels, last_codes)

    def _draft(self, shapes: BatchShapes, last_codes: Tensor) -> DraftTree:
        if shapes.empty:
            return root_only_tree(last_codes)
        return grow_chains(self.candidates(shapes.depth, shapes.width), shapes, last_codes)

    def observe(self, tree: DraftTree, perturbed: Tensor, features: Tensor, verdict: Verdict) -> None:
        """Keep the best codes of every node's distribution under the noise of its position, accepted or not,
        and write down what was committed. Their confidences stay as they are: correcting them by observed
        rates cost acceptance (docs/LOG.md)."""
        self._run(self._learn, tree, perturbed, verdict)

    def _learn(self, tree: DraftTree, perturbed: Tensor, verdict: Verdict) -> None:
        if tree.nodes > 1:  # a root alone is scored at the position that this very step commits
            value, code = perturbed.log_softmax(dim=-1).topk(self.history.candidates, dim=-1)
            kept = tree.valid & value[..., 0].isfinite()
            at = self._ahead(tree.depths).masked_fill(~kept, self.grid.size)
            self.history.write(at, tree.codes, code, value, newest_first(tree, verdict))
        column = torch.arange(verdict.codes.shape[1], device=verdict.codes.device)
        done = self._ahead(column).masked_fill(column >= verdict.count[:, None], self.grid.size)
        self._codes.scatter_(1, done, verdict.codes)
        self._position += verdict.count

    def candidates(self, length: int, width: int) -> Candidates:
        """The best `width` codes of the next `length` positions, at least one of each; those never scored
        copy a neighbour."""
        at = self._ahead(torch.arange(length, device=self._codes.device))
        codes, confidence = self._cached(at, width)
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

    def _cached(self, at: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Codes and log-confidences [B, L, width] that fit positions at [B, L], -inf where nothing was seen.

        What fits a position depends on the code before it, and so on. Instead of walking, all are looked up
        at once: below the best codes of the newest entries, and then below the best found so.
        """
        entries, last = self.history.entries(at), self._last(at)

        def before(chain: Tensor) -> Tensor:
            return torch.cat((last, chain[:, :-1]), dim=1)

        chain = entries.below(before(entries.newest()))
        return entries.mixture(before(chain), width, self.num_codes)
