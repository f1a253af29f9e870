"""Adaptive draft trees for visual autoregressive models: the method, and its front door, Pipeline.

    from adt_tree import Pipeline, Sampling, AdaptiveTree, Lantern

Pipeline, its LoadOptions, generate, the decoding method for transformers, and SeededGumbel, a logits
processor for it, need torch, and are imported when they are first used.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from adt_tree.method import METHODS, Method
from adt_tree.policy import AdaptiveTree, TreeShape
from adt_tree.settings import Lantern, Sampling
from adt_tree.static_trees import StaticTree

__all__ = [
    "METHODS", "AdaptiveTree", "Lantern", "LoadOptions", "Method", "Output", "Pipeline", "Sampling",
    "SeededGumbel", "StaticTree", "TreeShape", "generate",
]  # fmt: skip
LAZY = {  # name -> its file
    "LoadOptions": "pipeline", "Output": "pipeline", "Pipeline": "pipeline",
    "SeededGumbel": "generation.seeded_gumbel", "generate": "generation.generate",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in LAZY:
        raise AttributeError(f"module 'adt_tree' has no attribute {name!r}")
    try:
        return getattr(import_module(f"adt_tree.{LAZY[name]}"), name)
    except ImportError as error:
        if hint := _other_models():
            raise ImportError(hint) from error
        raise


def _other_models() -> str:
    """Returns what to do if `import models` does not find this checkout's package; "" if it does."""
    root, spec = Path(__file__).resolve().parent.parent, find_spec("models")
    if spec is None:
        return "ADT-Tree's package models is not here: run `pip install -e .` in a checkout of ADT-Tree"
    place = Path(spec.origin or next(iter(spec.submodule_search_locations or [""]))).resolve()
    if place.is_relative_to(root / "models"):
        return ""
    return f"{place} hides ADT-Tree's package models ({root / 'models'}): rename it, or take it off sys.path"
