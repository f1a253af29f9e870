"""The refusal of an option that would change nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from adt_tree.errors import UserError
from cli.parser import as_written


def refuse_unread(options: Any, names: Iterable[str], reason: str) -> None:
    """Raises UserError for the first of these options whose value is not the command's default.

    reason: why the option is not read.
    """
    defaults = {item.name: item.default for item in fields(options)}
    for name in names:
        if getattr(options, name) != defaults[name]:
            raise UserError(f"{as_written(options, name) or f'--{name}'}: {reason}; leave it out")
