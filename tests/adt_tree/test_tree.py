"""Trees as arrays: the selection step of EAGLE-2, and the published static lists."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adt_tree.policy import TreeShape
from adt_tree.static_trees import MC_SIM_7B_63, STATIC_TREES, chain
from adt_tree.tree import BatchShapes, DraftTree, Pool, Topology, select
from tests.support.decoding import CPU
from tests.support.golden import values

INF = float("inf")


def slow_ancestors(parents: list[int]) -> Tensor:
    """Returns the ancestor mask, computed node by node."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node in range(1, len(parents)):
        mask[node] |= mask[parents[node]]
    return mask


# A pool of two levels: nodes 0-2 below the root, then two children each of 0 and 1.
PARENTS = torch.tensor([[-1, -1, -1, 0, 0, 1, 1]])
DEPTHS = torch.tensor([1, 1, 1, 2, 2, 2, 2])
CODES = torch.tensor([[10, 11, 12, 20, 21, 22, 23]])


def pick(scores: list[float], budget: int) -> DraftTree:
    """Selects a tree from the pool."""
    pool = Pool(CODES, torch.tensor([scores]), PARENTS, DEPTHS)
    return select(pool, BatchShapes.of([TreeShape(2, 3, budget)], CPU), torch.tensor([7]))


SCORES = [-0.1, -0.5, -3.0, -0.3, -2.0, -0.6, -4.0]


@pytest.mark.parametrize("budget", [*range(1, 8), 50])
def test_select_is_closed_at_ties(budget: int) -> None:
    """If a child's score equals its parent's, the parent comes first, whatever the budget."""
    for scores in (
        [0.0] * 7,
        [-1.0, 0.0, -1.0, -1.0, -1.0, 0.0, 0.0],
        [-2.0, -1.0, -2.0, -2.0, -2.0, -1.0, -1.0],
    ):
        tree = pick(scores, budget)
        assert tree.nodes == min(budget, 7) + 1 and bool(tree.valid.all())
        names = {code: place for place, code in enumerate(CODES[0].tolist())}
        for node in range(1, tree.nodes):
            parent = int(PARENTS[0, names[int(tree.codes[0, node])]])
            held = int(tree.codes[0, int(tree.parents[0, node])])
            assert held == (7 if parent < 0 else int(CODES[0, parent]))
            assert int(tree.parents[0, node]) < node


def test_select_pads_smaller_images_with_invalid_leaves() -> None:
    scores = torch.tensor([SCORES, [-0.1, -0.2, -INF, -INF, -INF, -0.4, -INF]])
    two = [x.expand(2, -1) for x in (CODES, PARENTS)]
    roots = torch.tensor([7, 8])
    shapes = BatchShapes.of([TreeShape(2, 3, 2), TreeShape(2, 3, 5)], CPU)
    tree = select(Pool(two[0], scores, two[1], DEPTHS), shapes, roots)
    assert tree.valid.sum(1).tolist() == [3, 4]
    assert tree.codes[0, :3].tolist() == [7, 10, 20]
    assert tree.codes[1, :4].tolist() == [8, 10, 11, 22]
    assert tree.parents[1, :4].tolist() == [0, 0, 0, 2]
    padding = ~tree.valid
    assert not bool(tree.parents[padding].any())
    for row in range(2):
        assert torch.equal(tree.ancestors[row], slow_ancestors(tree.parents[row].tolist()))
        inner = set(tree.parents[row, tree.valid[row]].tolist())
        assert not inner & set(padding[row].nonzero().flatten().tolist())


@pytest.mark.parametrize("name", STATIC_TREES)
def test_static_trees_are_the_released_ones(name: str) -> None:
    recorded, tree = values("static_trees")[name], Topology(STATIC_TREES[name])
    assert sorted(map(list, STATIC_TREES[name])) == sorted(recorded["choices"])
    assert tree.depths == recorded["positions"]
    mask = torch.tensor([[int(digit) for digit in row] for row in recorded["mask"]], dtype=torch.bool)
    assert torch.equal(tree.ancestors(), mask)
    rows = []
    for leaf in sorted(set(range(len(tree.parents))) - set(tree.parents)):
        path = [leaf]
        while path[0]:
            path.insert(0, tree.parents[path[0]])
        rows.append(path + [-1] * (tree.depth + 1 - len(path)))
    assert sorted(rows) == sorted(recorded["retrieve"])
    # The place of each node's code in a list of the root and then the top-10 tables of all expanded nodes.
    expanded = [node for level in tree.levels for node in level]
    places = [
        1 + 10 * expanded.index(parent) + rank for parent, rank in zip(tree.parents, tree.ranks, strict=True)
    ]
    assert [0, *places[1:]] == recorded["tree_indices"]
    below = [[level.index(node) for node in level] for level in tree.levels]
    assert [len(level) for level in below[1:]] == [len(level) for level in recorded["drafter_indices"]]


def test_order_of_a_list_does_not_matter() -> None:
    shuffled = [list(path) for path in reversed(MC_SIM_7B_63)]
    assert Topology(shuffled).parents == Topology(MC_SIM_7B_63).parents
    assert Topology(chain(3)).parents == [0, 0, 1, 2]
