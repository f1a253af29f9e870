"""Methods by what tests vary: the distribution, the tree and who drafts."""

from __future__ import annotations

from adt_tree.method import Method
from adt_tree.policy import AdaptiveTree, TreeShape
from adt_tree.sampling import Sampling


def method_of(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    cfg: float = 3.0,
    *,
    static: str | None = None,
    shape: TreeShape | None = None,
    adapt: AdaptiveTree | None = None,
    drafter: str = "eagle",
) -> Method:
    """A method with at most one of static, shape and adapt; without a tree the AR baseline."""
    sampling, tree = Sampling(temperature, top_k, top_p, cfg), static or shape or adapt
    if tree is None:
        return Method("ar", sampling)
    names = {"eagle": ("eagle-1" if static else "eagle-2", "adt-tree")}
    fixed, adaptive = names.get(drafter, (drafter, f"adt-{drafter}"))
    return Method(adaptive if adapt else fixed, sampling, tree)
