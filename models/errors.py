"""The exception of the loading side, whose message is meant for the user."""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or does not fit; the message is one line that says what to do.

    `faults` names every single thing that is wrong where the message names the first.
    """

    def __init__(self, message: str, faults: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.faults = list(faults) or [message]


def reason(error: BaseException) -> str:
    """An exception's first line, or its name."""
    line = str(error.args[0] if isinstance(error, KeyError) and error.args else error).partition("\n")[0]
    return line or type(error).__name__
