"""The methods that must make the AR baseline's images, one of every kind, and the relaxed rivals, with trees
small enough for tiny models."""

from __future__ import annotations

from collections.abc import Sequence

from adt_tree.pipeline import Pipeline
from adt_tree.policy import AdaptiveTree, TreeSettings, TreeShape
from adt_tree.settings import Sampling
from adt_tree.static_trees import StaticTree
from models.model import Model

TREES: dict[str, TreeSettings] = {
    "eagle-1": StaticTree("mc_sim_7b_63"),
    "eagle-2": TreeShape(5, 4, 14),
    "adt-tree": AdaptiveTree(depth_max=6, width_max=4, depth_start=4, width_start=3, budget=14),
    "self-draft": TreeShape(9, 3, 20),
}
RELAXED: dict[str, TreeSettings] = dict.fromkeys(("gsd", "sjd-sv", "cool-sjd"), TreeShape(5, 1, 5))
RELAXED |= {"cool-sd": StaticTree("mc_sim_7b_63")}


def check_exact(
    model: Model,
    texts: Sequence[str],
    sampling: Sampling,
    methods: Sequence[str] = tuple(TREES),
    batch_sizes: Sequence[int] = (3,),
) -> list[list[int]]:
    """Checks that every method makes the AR baseline's codes for the texts, and that it accepts some drafts.
    Returns those codes."""
    pipe, calls = Pipeline(model), []
    expected = pipe(texts, "ar", sampling=sampling, seed=100).codes
    assert len({tuple(codes) for codes in expected}) > len(texts) // 2
    for name in methods:
        for batch_size in batch_sizes:
            options = {"sampling": sampling, "tree": TREES[name], "seed": 100, "batch_size": batch_size}
            out = pipe(texts, name, **options)
            assert out.codes == expected, (name, batch_size)
            calls.append(out.stats["target_calls"])
    assert min(calls) < model.grid.size - 1
    return expected
