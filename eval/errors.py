"""The exception whose message is meant for the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Something the user can put right: one line that names the thing, its value and what to do."""


@contextmanager
def refusals() -> Iterator[None]:
    """What the block refuses by a ValueError is the user's to put right."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error
