"""Adaptive draft trees for visual autoregressive models: the method, and its front door, Pipeline.

    from adt_tree import Pipeline, Sampling, AdaptiveTree, Lantern

Pipeline, its LoadOptions, generate, the decoding method for transformers, and SeededGumbel, a logits
processor for it, need torch, and are imported when they are first used.
"""

from importlib import import_module

from adt_tree.method import METHODS, Lantern, Method
from adt_tree.policy import AdaptiveTree, TreeShape
from adt_tree.sampling import Sampling
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
    return getattr(import_module(f"adt_tree.{LAZY[name]}"), name)
