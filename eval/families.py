"""What options say of each model family, by option; all of it is in the ModelSpecs. No torch."""

from __future__ import annotations

import argparse

from adt_tree.policy import BUDGET, SELF_DRAFTED, AdaptiveTree, self_drafted
from models.registry import SPECS
from models.spec import EMBEDDED_TREE

MODELS = tuple(SPECS)
# option -> the only models that read it
READ_BY = {
    option: tuple(name for name, spec in SPECS.items() if option in spec.options)
    for option in dict.fromkeys(option for spec in SPECS.values() for option in spec.options)
}
# Who drafts unless a network is asked for.
FASTEST = {name: "jacobi" for name, spec in SPECS.items() if spec.method == "self-draft"}
ADAPT = AdaptiveTree()
ADAPT_OF = {"eagle": ADAPT, "self-draft": SELF_DRAFTED, "jacobi": SELF_DRAFTED, "hybrid": SELF_DRAFTED}
SELF_SHAPE = self_drafted(BUDGET)
SHAPE_OF = {"eagle": EMBEDDED_TREE, **dict.fromkeys(("self-draft", "jacobi", "hybrid"), SELF_SHAPE)}
DEFAULT_TREE = SPECS["emoji"].static_tree
# Token shifts that differ from the published one.
ALIGNMENT = {name: spec.token_shift for name, spec in SPECS.items() if spec.token_shift != "published"}
# Trees that differ from the embedded model's.
RELEASED = {name: spec.tree for name, spec in SPECS.items() if spec.tree != EMBEDDED_TREE}
STATIC_OF = {name: spec.static_tree for name, spec in SPECS.items() if spec.static_tree != DEFAULT_TREE}


def static_of(args: argparse.Namespace) -> str:
    """The static tree that --static_tree means."""
    return args.tree_choices or SPECS[args.model].static_tree
