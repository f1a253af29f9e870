"""Writes files so that a reader never sees half of one. Every file of this project is written here. No torch.

An error names the file: a full disk, a missing folder and a missing permission each give an OSError whose
message is fit for the user.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from adt_tree.errors import UserError, reason


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary file to fill; when the block ends it takes the place of `path` in one step.

    A reader sees the old file or the new one. If the block fails, `path` stays as it was and the temporary
    file is removed. An OSError names `path`; what torch.save and safetensors raise on a full disk becomes an
    OSError too.
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
    """Returns the operating system's message, which torch.save hides behind its own, or else the error's."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, OSError):
        link = link.__context__
    return link.strerror if link is not None and link.strerror else reason(error)


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file completely or not at all."""
    with replacing(path) as part:
        part.write_bytes(data)


def write_json(path: Path, content: object, indent: int | None = 1) -> None:
    """Writes JSON as UTF-8, completely or not at all. Any text can be written."""
    text = json.dumps(content, indent=indent, ensure_ascii=False) + "\n"
    # A path or an argument that is not UTF-8 reaches Python as lone surrogates, which UTF-8 cannot encode.
    # The backslash notation that replaces them is JSON's own for such a character.
    write_atomic(path, text.encode(errors="backslashreplace"))


def make_folder(path: Path) -> None:
    """Makes a folder, and those around it, unless it is there. Raises UserError if it is a file."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; give a folder")
    path.mkdir(parents=True, exist_ok=True)


def append_line(path: Path, line: str) -> None:
    """Appends a line. A kill may leave it incomplete, so readers must ignore an incomplete last line."""
    try:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
