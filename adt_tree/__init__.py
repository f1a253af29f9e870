"""Adaptive draft trees for visual autoregressive models: the method, and its front door, Pipeline.

    from adt_tree import Pipeline, Sampling, AdaptiveTree, Lantern

Pipeline and generate, the decoding method for transformers, need torch and the models, and are imported when
they are first used.
"""

from importlib import import_module

from adt_tree.method import METHODS, Lantern, Method
from adt_tree.policy import AdaptiveTree, TreeShape
from adt_tree.sampling import Sampling
from adt_tree.static_trees import StaticTree

__all__ = [
    "METHODS", "AdaptiveTree", "Lantern", "Method", "Output", "Pipeline", "Sampling", "StaticTree",
    "TreeShape", "generate",
]  # fmt: skip
LAZY = {"Output": "pipeline", "Pipeline": "pipeline", "generate": "generation.generate"}  # name -> its file


def __getattr__(name: str) -> object:
    if name not in LAZY:
        raise AttributeError(f"module 'adt_tree' has no attribute {name!r}")
    return getattr(import_module(f"adt_tree.{LAZY[name]}"), name)
