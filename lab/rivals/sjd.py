"""Speculative Jacobi decoding (SJD, 2410.01699): codes after the first rejected draft are sampled anew."""

from __future__ import annotations

from torch import Tensor

from adt_tree.method_on_model import MethodOnModel
from adt_tree.verify import Rule
from lab.rivals.jacobi_window import JacobiWindow, Judged, sample, window_and_rule


def make(setup: MethodOnModel) -> tuple[JacobiWindow, Rule]:
    """Returns the proposer of sjd and its rule."""
    return window_and_rule(setup, resample)


def resample(judged: Judged) -> Tensor:
    """Samples a new code from p after every node.

    It takes the uniform of `recovered` again. That is sound: a step uses one `recovered`, at the position
    after the last accepted draft, and the new codes only at later positions.
    """
    return sample(judged.p, judged.chances)
