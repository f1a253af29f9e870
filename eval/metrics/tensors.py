"""What the feature networks share: state dicts that are another network's become one clear line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from models.errors import CheckpointError, reason


@contextmanager
def checked(path: Path, wanted: str) -> Iterator[None]:
    """Missing tensors, and those whose shapes do not fit together, become a CheckpointError."""
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"{path}: tensor {error.args[0]} is missing; give the {wanted}") from None
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: it is no {wanted} ({reason(error)})") from None
