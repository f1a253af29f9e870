"""The codes that steps are expected to accept, by the number of levels of their trees."""

from __future__ import annotations

# Image steps: a step with B images in flight counts as B of them.
MEMORY = 2000.0  # image steps over which the acceptance of a level or of a candidate is averaged
# The growth law holds where nothing is measured yet: a share FIRST_HITS of the steps accepts a code, and the
# codes that a tree of d levels accepts grow as d ** EXPONENT (docs/LOG.md). So the share of the steps that
# accept a code of one level promises the share of the next one. The promise counts as much as LAW_STEPS image
# steps of a tree that has that level.
FIRST_HITS, EXPONENT, LAW_STEPS = 0.5, 0.7, 40.0
# Self-drafted trees with more nodes score a position more often before it is read, so that they accept more
# codes of every level: nodes ** REFINEMENT, from REFINING_NODES nodes on, root included (docs/LOG.md).
REFINEMENT, REFINING_NODES = 0.2, 8


def law(depth: int) -> float:
    """Returns the number of codes that a tree of so many levels accepts by the growth law."""
    return FIRST_HITS * depth**EXPONENT


def refinement_of(nodes: int) -> float:
    """Returns the factor by which a self-drafted tree with so many nodes, root included, accepts more codes
    than one of at most REFINING_NODES nodes with as many levels."""
    return max(1.0, nodes / REFINING_NODES) ** REFINEMENT


class Levels:
    """How many steps accept a code of each level, counted over the last image steps whose trees had it.

    Images differ, and so do the regions of an image. So two candidates cannot be compared by the codes that
    each accepted at its time. But the levels of a shallow tree are levels of a deep one too: they show at any
    time what a shallower candidate would accept. What a deeper one would accept beyond them follows from the
    deeper trees of earlier steps: from the share of those that accepted a code of a level among those that
    reached it. This is the product-limit estimator of Kaplan and Meier, for which a step that accepts its
    whole tree is censored.
    """

    def __init__(self, deepest: int) -> None:
        """deepest: number of levels of the deepest tree."""
        # By level: image steps whose tree had the level, those that accepted all codes above it, times the
        # refinement for level 1, and those that accepted a code of it. Each level forgets by its own steps.
        # Deep trees are tried seldom, and several of their trials together must tell what they accept.
        self._drafted = [0.0] * (deepest + 1)
        self._reached = [0.0] * (deepest + 1)
        self._accepted = [0.0] * (deepest + 1)

    def count(self, depth: int, accepted: int, refinement: float) -> None:
        """Adds one step of one image, whose tree had at least one level. refinement: that of its tree, which
        concerns its first level alone: it makes more steps reach the others."""
        decay = 1 - 1 / MEMORY
        for level in range(1, depth + 1):
            self._drafted[level] = self._drafted[level] * decay + 1
            self._reached[level] = self._reached[level] * decay + (level <= accepted + 1)
            self._accepted[level] = self._accepted[level] * decay + (level <= accepted)
        self._reached[1] += refinement - 1

    def steps(self, depth: int) -> float:
        """Returns the number of image steps whose trees had at least so many levels, older ones with less
        weight."""
        return self._drafted[depth]

    def accepted_codes(self) -> list[float]:
        """Returns the expected number of accepted codes of a tree of 0, 1, 2, ... levels, whose refinement is
        1."""
        codes, share, growth_above = [0.0], 1.0, 1.0  # so that level 1 promises FIRST_HITS
        for level in range(1, len(self._reached)):
            growth, law_steps = law(level) - law(level - 1), LAW_STEPS * share
            promised = law_steps * growth / growth_above
            share *= (self._accepted[level] + promised) / (self._reached[level] + law_steps)
            codes.append(codes[-1] + share)
            growth_above = growth
        return codes
