"""The one exception whose message is meant for the user."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can put right: one line that names the thing, its value and what to do."""
