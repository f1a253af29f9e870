"""The shapes of trees from which `--total_token auto` chooses."""

from __future__ import annotations

from dataclasses import dataclass, replace

from adt_tree.policy import PLAIN, AdaptiveTree, TreeShape, self_drafted

# Drafted nodes of a chain that is about as long as a row, and of a tree that is about as long as two. Another
# candidate is that chain with LEAVES leaves, which is best with one image in flight where rows are cheap.
LEAST_CHAIN, MOST_CHAIN, LEAST_TREE, MOST_TREE, LEAVES = 11, 23, 31, 63, 4
# Candidates of a drafter network as (levels, drafted nodes): True if passes are rounded up to buckets, False
# if every row of a pass costs. The tree that the model has by default is among the candidates as well.
NETWORK_TREES = {False: ((2, 3), (4, 6), (8, 12)), True: ((2, 7), (4, 15), (8, 63))}


@dataclass(frozen=True, slots=True)
class AutoTree:
    """Trees whose size is chosen while decoding; the type of Method.tree for `--total_token auto`."""

    # The tree that a drafter network grows by default. Candidates vary depth and budget of a TreeShape, and
    # the budget alone of an AdaptiveTree. None: trees are self-drafted.
    base: TreeShape | AdaptiveTree | None = None

    def __str__(self) -> str:
        """Returns the name of these trees in the fingerprint of a run."""
        return f"auto, from {self.base}" if isinstance(self.base, AdaptiveTree) else "auto"

    @property
    def largest(self) -> TreeShape | None:
        """The shape, or the greatest shape, of the base."""
        return None if self.base is None else self.base.largest

    def candidates(self, row_width: int, buckets: bool) -> list[TreeShape]:
        """Returns the shapes to choose from, smallest first; the first is plain decoding.

        row_width: cells of a raster row, W; a chain of W - 1 codes ends just before the cell below its root,
        and longer ones gain less. buckets: the target rounds the rows of a pass, root included, up to 8, 16,
        32, 64 or 128, as under CUDA graphs, so that a smaller tree in the same bucket saves nothing.
        """
        if self.largest is not None:
            return _network_shapes(self.largest, buckets, isinstance(self.base, AdaptiveTree))
        if buckets:
            return [PLAIN, *map(_chain, (7, 15)), *(_across(nodes, row_width) for nodes in (31, 63, 127))]
        chain = min(max(row_width - 1, LEAST_CHAIN), MOST_CHAIN)
        tree = min(max(2 * row_width - 1, LEAST_TREE), MOST_TREE)
        leafy = replace(self_drafted(chain + LEAVES), depth=chain)
        return [PLAIN, *map(_chain, (3, 7, chain)), leafy, _across(tree, row_width)]


def _chain(length: int) -> TreeShape:
    return TreeShape(length, 1, length)


def _across(budget: int, row_width: int) -> TreeShape:
    """Returns a self-drafted tree whose main chain reaches beyond the cell below its root, if it can."""
    shape = self_drafted(budget)
    return replace(shape, depth=max(shape.depth, min(row_width + 1, budget)))


def _network_shapes(largest: TreeShape, buckets: bool, adaptive: bool) -> list[TreeShape]:
    """Returns the candidates around the default tree of a drafter network.

    adaptive: depths are chosen elsewhere, so a candidate has the greatest depth that its budget allows.
    """
    shapes = {largest}
    for depth, budget in NETWORK_TREES[buckets]:
        shapes.add(TreeShape(min(largest.depth, budget) if adaptive else depth, largest.width, budget))
    return [PLAIN, *sorted(shapes, key=lambda shape: (shape.budget, shape.depth))]
