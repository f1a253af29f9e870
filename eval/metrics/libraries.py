"""The optional packages of requirements-eval.txt, imported when a metric first needs one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from eval.errors import UserError
from models.tools.torchvision_guard import mend_torchvision


def library(name: str) -> Any:
    """The module of that name. UserError if its package is not installed."""
    mend_torchvision()
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(
            f"this metric needs the package {error.name}: pip install -r requirements-eval.txt"
        ) from None
