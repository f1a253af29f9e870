"""SJD-SV, semantics verification (2609.13245): sjd that judges runs of drafts by one joint ratio. It is not
lossless.

A run is a maximal sequence of drafts whose probabilities p_i = p(x_i) do not fall. Its tail is the shortest
one that has a share of at least alpha of the run's summed probability. With one uniform u for the run, all of
it is accepted if u <= the product of r_i = p_i / q_i over the tail. Otherwise the last draft is dropped and
the product taken again, until the tail is empty. So the drafts before the tail are not judged themselves. The
draft after the last accepted one leaves the same residual as in sjd. In runs of one draft the two methods are
equal.

No code is published; the rule is known from notes on the paper. Example with alpha = 0.8: the five
probabilities sum to 2.0, and the last three, the tail, to 1.8.

    p_i    0.05   0.15   0.4   0.6   0.8        u <= r_3 r_4 r_5: all five are accepted
                        |----- tail -----|      else u <= r_3 r_4: four; else u <= r_3: three; else none

Dimensions: B images, L positions, N = L + 1 nodes, V codes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from adt_tree.method_on_model import MethodOnModel
from adt_tree.tree import DraftTree
from adt_tree.verify import Rejection, Rule
from lab.rivals.jacobi_window import JacobiWindow, Judge, decided, window_and_rule
from lab.rivals.windows import resample
from lab.settings import Runs


def make(setup: MethodOnModel) -> tuple[JacobiWindow, Rule]:
    """Returns the proposer of sjd-sv and its rule."""
    runs, exact = setup.method.relaxed_rule, Rejection(setup.batch.num_codes, static=True)
    assert isinstance(runs, Runs)
    return window_and_rule(setup, resample, RunJudge(runs, exact.judge))


class RunJudge:
    """The Judge of sjd-sv, for chains."""

    def __init__(self, runs: Runs, exact: Judge) -> None:
        """exact: the rule of sjd."""
        self._runs, self._exact = runs, exact

    def __call__(self, tree: DraftTree, p: Tensor, chances: Tensor) -> tuple[Tensor, Tensor]:
        codes = tree.codes[:, 1:, None]  # in a chain the parent of node n is node n - 1
        probability = ratio = p[:, :-1].gather(-1, codes)[..., 0]
        if tree.q is not None:
            ratio = ratio / tree.q[:, :-1].gather(-1, codes)[..., 0]
        accepted = self._accepted(probability, ratio, chances[:, 1:], tree.valid[:, 1:])
        return decided(self._exact, tree, p, F.pad(accepted, (1, 0)))

    def _accepted(self, probability: Tensor, ratio: Tensor, chances: Tensor, valid: Tensor) -> Tensor:
        """Returns [B, L] bool: the drafts that their own run accepts.

        probability, ratio [B, L]: p_i and p_i / q_i. chances [B, L]: the uniform of a run is that of the
        first position of its tail. In the masks [B, L, L] a row is a position, and its columns are others.
        """
        number = torch.arange(probability.shape[1], device=probability.device)
        start = self._starts(probability, valid)
        same_run = start[:, :, None] == start[:, None, :]
        later = number >= number[:, None]
        total = (probability[:, None] * same_run).sum(dim=-1)
        before = (probability[:, None] * (same_run & ~later)).sum(dim=-1)  # of the run, before each position
        # Sums of what comes before keep small probabilities, which vanish in a sum with large ones.
        light = before <= (1 - self._runs.sv_mass) * total
        tail = (number * (same_run & light[:, None])).amax(dim=-1)  # [B, L] where each position's tail begins
        judged = (number >= tail[..., None]) & (number <= number[:, None])
        joint = ratio[:, None].masked_fill(~judged, 1.0).prod(dim=-1)  # of the tail, up to each position
        passes = (chances.gather(1, tail) <= joint) & (number >= tail)
        return (same_run & later & passes[:, None]).any(dim=-1)

    def _starts(self, probability: Tensor, valid: Tensor) -> Tensor:
        """Returns the first position [B, L] of the run of each position. Invalid ones are no part of any."""
        number = torch.arange(probability.shape[1], device=probability.device)
        begins = F.pad(probability[:, 1:] < probability[:, :-1], (1, 0), value=True) | ~valid
        start = (number * begins).cummax(dim=1).values
        longest = self._runs.sv_run or probability.shape[1]
        return number - (number - start) % longest
