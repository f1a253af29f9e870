"""Files that are written whole or not at all, and those that grow by a line. No torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from adt_tree.errors import reason


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to fill, which takes the place of path at the block's end: a reader sees the old or the new.

    What fails in the block leaves path as it was, and nothing beside it. OSError names path; what torch.save
    and safetensors raise on a full disk becomes one.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(0o644)
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        if isinstance(error, SafetensorError | RuntimeError):
            raise OSError(f"{path} cannot be written: {_cause(error)}") from error
        raise


def _cause(error: BaseException) -> str:
    """The system's words, which torch.save's own error hides if it writes to a stream; else the error's."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, OSError):
        link = link.__context__
    return link.strerror if link is not None and link.strerror else reason(error)


def append_line(path: Path, line: str) -> None:
    """Add a line; a kill may leave it torn, which readers must bear. OSError names the path."""
    try:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
