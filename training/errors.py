"""The error of a stage whose message is meant for the user."""

from __future__ import annotations


class StageError(ValueError):
    """What the user can put right: one line that names the file or option and says what to do."""
