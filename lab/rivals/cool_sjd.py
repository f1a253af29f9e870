"""Cool-SD's rule (2601.09212) in the window of sjd. The paper has it on EAGLE-1's drafts, so this variant is
ours.

It is not lossless. The level of a draft is its place in the window, so most of a long window is judged more
strictly than in sjd.
"""

from __future__ import annotations

from adt_tree.method_on_model import MethodOnModel
from adt_tree.verify import Rule
from lab.rivals.cool_sd import annealed
from lab.rivals.jacobi_window import JacobiWindow, window_and_rule
from lab.rivals.sjd import resample


def make(setup: MethodOnModel) -> tuple[JacobiWindow, Rule]:
    """Returns the proposer of cool-sjd and its rule."""
    return window_and_rule(setup, resample, annealed(setup).judge)
