"""Self-drafting: draft trees of the target's choices in earlier passes (coupled Jacobi trees), without a
drafter network.

With noise keyed by position, the target's choice at a position is a deterministic function of its prefix.
So the choices below a rejected node are good drafts for the next step: their prefix has changed at one
place, and in images the effect of a change fades within a few cells. Sources: SJD 2410.01699, SCD 2510.24211
(the coupling), SJD-PAC 2603.18599 (trees). Only the coupled rule may verify such trees; it is exact for any
tree.

Dimensions: B images, N nodes, L positions ahead, K candidates a position, V codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adt_tree.method_on_model import MethodOnModel
from adt_tree.policy import TreeShape
from adt_tree.proposers.candidates import Candidates, History, grow_chains, newest_first
from adt_tree.proposers.neighbours import Neighbours
from adt_tree.roles import Batch, Prefix, StepStart
from adt_tree.tree import BatchShapes, DraftTree
from adt_tree.verify import Rule, Verdict

SEED_CONFIDENCE = -1.0  # log-confidence of a code that is copied from a neighbouring cell


def make(setup: MethodOnModel) -> tuple[SelfDraftProposer, Rule]:
    """Returns the proposer of self-draft and adt-self-draft, and its rule."""
    return SelfDraftProposer(setup.batch, setup.shape.width, Neighbours.of(setup)), setup.rule()


class SelfDraftProposer:
    """Drafts a main chain of the best codes of the positions ahead, with the best other candidates as leaves.

    The candidates of a position are the best codes of a mixture of the distributions that earlier passes
    computed there. Distributions scored below the code that now precedes the position, committed or drafted,
    weigh most (docs/METHOD.md). The depth of a shape is the length of the main chain, its width the number of
    candidates per position, its budget the number of drafted nodes.
    """

    def __init__(self, batch: Batch, candidates: int, neighbours: Neighbours) -> None:
        """candidates: K. neighbours: of these images, to copy to unscored positions."""
        self.grid, self._run = batch.grid, batch.run
        self.history = History(batch.grid.length, batch.slots, candidates, batch.device)
        self._neighbours = neighbours

    def calls(self, shape: TreeShape) -> int:
        return 0

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        self._neighbours.begin(slot, code)
        self.begin(slot, 1)

    def begin(self, slot: int, position: int) -> None:
        self.history.clear(slot)

    def know(self, codes: Tensor) -> None:
        self._neighbours.codes.copy_(codes)

    def release(self, slot: int) -> None: ...

    def propose(self, start: StepStart) -> DraftTree:
        return self._run(self._draft, start.shapes.all_levels, start.last_codes, start.positions)

    def _draft(self, shapes: BatchShapes, last_codes: Tensor, positions: Tensor) -> DraftTree:
        return grow_chains(self.candidates(positions, shapes.depth, shapes.width), shapes, last_codes)

    def observe(
        self, tree: DraftTree, perturbed: Tensor, features: Tensor, verdict: Verdict, positions: Tensor
    ) -> None:
        self._run(self._learn, tree, perturbed, verdict, positions)

    def _learn(self, tree: DraftTree, perturbed: Tensor, verdict: Verdict, positions: Tensor) -> None:
        """Stores the best codes of every node's distribution, accepted or not, and the committed codes.

        The log-confidences are stored uncorrected: a correction by observed rates of acceptance made
        acceptance worse (docs/LOG.md).
        """
        value, code = perturbed.log_softmax(dim=-1).topk(self.history.candidates, dim=-1)
        usable = tree.valid & value[..., 0].isfinite()
        at = self._neighbours.ahead(positions, tree.depths).masked_fill(~usable, self.grid.length)
        self.history.write(at, tree.codes, code, value, newest_first(tree, verdict))
        self._neighbours.commit(positions, verdict.codes, verdict.count)

    def candidates(self, positions: Tensor, length: int, width: int) -> Candidates:
        """Returns the best `width` codes of `length` positions, the first of which are `positions` [B]. A
        position that was never scored has the codes of its neighbours, so that every position has at least
        one candidate."""
        at = self._neighbours.ahead(positions, torch.arange(length, device=positions.device))
        codes, confidence = self._from_history(at, width)
        fresh = ~confidence[..., 0].isfinite()
        first, second = self._neighbours.fill(at, codes[..., 0], fresh)
        codes[..., 0] = first
        confidence[..., 0].masked_fill_(fresh, SEED_CONFIDENCE)
        if self._neighbours.cells == "both" and width > 1:
            different = fresh & (first != second)
            codes[..., 1] = torch.where(different, second, codes[..., 1])
            confidence[..., 1].masked_fill_(different, 2 * SEED_CONFIDENCE)
        return Candidates(codes, confidence)

    def _from_history(self, at: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Returns the best codes and their log-confidences, [B, L, width], of the history for positions `at`
        [B, L]; -inf where it has too few.

        The best codes of a position depend on the code before it, which depends on the one before that. To
        avoid a walk along the chain, all positions are looked up at once, in three rounds: the newest codes,
        the codes below those, and the mixtures below these.
        """
        entries, last = self.history.entries(at), self._neighbours.last(at)

        def before(chain: Tensor) -> Tensor:
            return torch.cat((last, chain[:, :-1]), dim=1)

        chain = entries.below(before(entries.newest()))
        return entries.mixture(before(chain), width)
