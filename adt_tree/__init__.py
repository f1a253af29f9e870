"""Adaptive draft trees for visual autoregressive models: the method, and its front door, Pipeline.

    from adt_tree import Pipeline, Sampling, AdaptiveTree, Lantern

Pipeline, which needs torch and the models, is resolved when it is first used.
"""

from adt_tree.method import METHODS, Lantern, Method
from adt_tree.policy import AdaptiveTree, TreeShape
from adt_tree.sampling import Sampling

__all__ = ["METHODS", "AdaptiveTree", "Lantern", "Method", "Output", "Pipeline", "Sampling", "TreeShape"]


def __getattr__(name: str) -> object:
    if name not in ("Output", "Pipeline"):
        raise AttributeError(f"module 'adt_tree' has no attribute {name!r}")
    from adt_tree import pipeline

    return getattr(pipeline, name)
