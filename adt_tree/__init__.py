"""Adaptive draft trees for visual autoregressive models: the method, and its front door, Pipeline.

    from adt_tree import Pipeline, Sampling, AdaptiveTree, Lantern

Names are resolved when they are first used: importing the package alone costs nothing.
"""

from importlib import import_module

_HOMES = {
    "Pipeline": "adt_tree.pipeline",
    "Output": "adt_tree.pipeline",
    "Method": "adt_tree.method",
    "METHODS": "adt_tree.method",
    "Lantern": "adt_tree.method",
    "Sampling": "adt_tree.sampling",
    "AdaptiveTree": "adt_tree.policy",
    "TreeShape": "adt_tree.policy",
}
__all__ = ["METHODS", "AdaptiveTree", "Lantern", "Method", "Output", "Pipeline", "Sampling", "TreeShape"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'adt_tree' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
