"""The errors whose message is meant for the user: one line that names the thing, its value and what to do.

`main.py` prints the line and exits with status 2. Any other ValueError is a fault of ours.
"""

from __future__ import annotations

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
