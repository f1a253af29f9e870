"""The errors whose message is meant for the user: one line that names the thing, its value and what to do.

`main.py` prints the line and exits with status 2. Any other ValueError is a fault of ours. The functions that
read the numbers of a user, who may give those of Python, numpy or torch, return plain ones or raise such an
error.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST_REASON = 200  # characters


class UserError(ValueError):
    """Something the user can put right: an option, a file, a prompt, a variable of the environment."""


class NoRoom(UserError):
    """Decoding needs more memory or positions than there are; a smaller tree, batch or prompt may fit."""


class CheckpointError(UserError):
    """A checkpoint, or another file, that is missing, damaged or does not fit.

    `faults` lists everything that is wrong with it; the message names the first.
    """

    def __init__(self, message: str, faults: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.faults = list(faults) or [message]


def reason(error: BaseException) -> str:
    """Returns an exception's message on one line, shortened if it is long, or the exception's name."""
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    return " ".join(text.split())[:LONGEST_REASON] or type(error).__name__


def shown(value: object) -> str:
    """Returns a value as a message shows it: on one line, at most 40 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def refuse_other(stored: Mapping[str, Any], now: Mapping[str, Any], subject: str, remedy: str) -> None:
    """Raises UserError for the first name in `now` whose stored value differs or is missing.

    subject: start of the message, before the name, such as "runs/a was trained with".
    """
    for name, value in now.items():
        if stored.get(name) != value:
            raise UserError(f"{subject} {name} = {stored.get(name)!r}, now it is {value!r}: {remedy}")


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


def instance(name: str, value: Any, kind: type) -> None:
    """Raises UserError unless a value is of that class."""
    if not isinstance(value, kind):
        raise UserError(f"{name} {shown(value)}: give a {kind.__name__}")


def as_seed(value: Any, name: str = "seed") -> int:
    """Returns a whole number of any integral type but bool, reduced to the signed 64 bits of torch."""
    number = _index(value)
    if number is None:
        raise UserError(f"{name} {shown(value)}: give a whole number")
    return (number + 2**63) % 2**64 - 2**63


def _index(value: Any) -> int | None:
    """Returns the integer that a value is; None if it is none."""
    try:
        kind = str(getattr(value, "dtype", type(value).__name__))  # bool, torch.bool
        return None if kind.endswith("bool") else operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # torch raises the last two for several elements
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether memory ran out. torch's error for a CPU is a plain RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def store(instance: object, values: Mapping[str, object]) -> None:
    """Sets fields of a frozen dataclass to their checked values, in its __post_init__."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)
