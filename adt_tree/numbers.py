"""Reads the numbers of a user, who may give those of Python, numpy or torch. No torch.

Each function returns a plain number, or raises UserError, one line that names the number, its value and the
values that it may have.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from adt_tree.errors import UserError, shown


def integer(name: str, value: Any, least: int = 0) -> int:
    """Returns a whole number of any integral type but bool, from `least` on."""
    number = _index(value)
    if number is None or number < least:
        raise UserError(f"{name} {shown(value)}: give a whole number from {least} on")
    return number


def real(name: str, value: Any, most: float, above: float | None = None) -> float:
    """Returns a number from 0 to `most`, or, with `above`, more than that. NaN is none."""
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises the last
        number = math.nan
    if not 0 <= number <= most or (above is not None and number <= above):
        least = "0" if above is None else f"more than {above:g}"
        raise UserError(f"{name} {shown(value)}: give a number from {least} to {most:g}")
    return number


def as_seed(value: Any, name: str = "seed") -> int:
    """Returns a whole number of any integral type but bool, reduced to the signed 64 bits of torch."""
    number = _index(value)
    if number is None:
        raise UserError(f"{name} {shown(value)}: give a whole number")
    return (number + 2**63) % 2**64 - 2**63


def _index(value: Any) -> int | None:
    """Returns the integer that a value is; None if it is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # torch raises the last two for several elements
        return None


def store(instance: object, **values: object) -> None:
    """Sets fields of a frozen dataclass to their checked values, in its __post_init__."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)
