"""Reads files that may be damaged, and writes files so that a reader never sees half of one. No torch.

Every file of this project is written here, and every file from outside is read under `reading`. An error
names the file in one line: damaged files give a CheckpointError; a full disk, a missing folder and a missing
permission give an OSError.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from safetensors import SafetensorError

from adt_tree.errors import CheckpointError, UserError, reason, shown

LFS_POINTER = b"version https://git-lfs"
WEB_PAGE = (b"<!doctype", b"<html", b"<?xml")


@contextmanager
def reading(path: Path, remedy: str = "fetch it again") -> Iterator[None]:
    """Turns an exception of the block into a CheckpointError that names the file, the fault and the remedy.

    Damaged bytes lead the readers of JSON, YAML, safetensors, pickles and tokenizers to exceptions of any
    class, so all of them are caught. A KeyError means that a field is missing. A MemoryError and a UserError,
    whose message is complete, pass through.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: {_fault(path, error)}: {remedy}") from error


def _fault(path: Path, error: Exception) -> str:
    """Returns a description of the fault of a file that raised `error` when it was read."""
    if not path.exists():
        return "does not exist"
    start = b""
    if path.is_file() and os.access(path, os.R_OK):
        with path.open("rb") as file:
            start = file.read(64).lstrip().lower()
    if start.startswith(LFS_POINTER):
        return "is a pointer of git-lfs, not the file itself (git lfs pull)"
    if start.startswith(WEB_PAGE):
        return "is a web page, such as one that asks for a login or a licence"
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    if type(error) is ValueError:  # mostly ours, and fit for the user; libraries raise other classes
        return reason(error)
    kinds = {json.JSONDecodeError: "is not JSON", UnicodeDecodeError: "is not UTF-8 text"}
    return f"{kinds.get(type(error), 'is damaged or truncated')} ({reason(error)})"


def expanded(path: str | os.PathLike[str]) -> str:
    """Returns a path as text, with the user's home folder in place of a leading ~ and the variables of the
    environment in place of $NAME. UserError for a value that is none."""
    try:
        return os.path.expandvars(os.path.expanduser(os.fspath(path)))
    except TypeError:
        raise UserError(f"path {shown(path)}: give a text or a path") from None


def read_text(path: Path) -> str:
    """Returns the content of a UTF-8 file without its byte-order mark. Its line ends stay as they are. Call
    it under `reading`, which names the file in an error."""
    return path.read_bytes().decode("utf-8-sig")


def lines_of(content: str) -> list[str]:
    """Returns the lines of a text, which end at a line feed, a carriage return or both. U+2028 is a character
    like any other."""
    return [line.removesuffix("\n") for line in io.StringIO(content, newline=None)]


def read_json(path: Path, remedy: str = "fetch it again") -> Any:
    """Returns the content of a JSON file. Raises CheckpointError if it is missing or damaged."""
    with reading(path, remedy):
        content = json.loads(read_text(path))
    return content


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary file to fill; when the block ends it takes the place of `path` in one step.

    A reader sees the old file or the new one. If the block fails, `path` stays as it was and the temporary
    file is removed. An OSError names `path`. The errors of torch.save and safetensors on a full disk become
    OSErrors.
    """
    part = path.with_name(f".{path.name[:40]}.{token_hex(8)}")
    try:
        part.touch(exist_ok=False)
        usual = part.stat().st_mode & 0o777
        yield part
        with suppress(PermissionError):  # safetensors hides its files from others; not all disks permit this
            part.chmod(usual)
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        if isinstance(error, SafetensorError | RuntimeError):
            raise OSError(f"{path} cannot be written: {_cause(error)}") from error
        raise


def _cause(error: BaseException) -> str:
    """Returns the operating system's message, which an error of torch.save hides, or else the error's own."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, OSError):
        link = link.__context__
    return link.strerror if link is not None and link.strerror else reason(error)


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file completely or not at all."""
    with replacing(path) as part:
        part.write_bytes(data)


def json_text(content: object, indent: int | None = None, ascii_only: bool = True) -> str:
    """Returns JSON, in which null stands for a number that is not finite: JSON has no NaN and no Infinity."""
    finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
    return json.dumps(finite, indent=indent, ensure_ascii=ascii_only)


def write_json(path: Path, content: object, indent: int | None = 1) -> None:
    """Writes JSON as UTF-8, completely or not at all. Any text can be written."""
    text = json_text(content, indent, ascii_only=False) + "\n"
    # A path or an argument that is not UTF-8 reaches Python as lone surrogates, which UTF-8 cannot encode.
    # The backslash notation that replaces them is valid JSON for such a character.
    write_atomic(path, text.encode(errors="backslashreplace"))


def append_json(path: Path, entry: Mapping[str, Any]) -> None:
    """Appends an entry as a line of JSON, in one write, which neither a kill nor another process divides."""
    with path.open("ab", buffering=0) as stream:
        stream.write(f"{json_text(entry)}\n".encode())


def read_json_lines(path: Path, remedy: str) -> list[dict[str, Any]]:
    """Returns the entries of a file of append_json, oldest first; none if there is no file. Raises
    CheckpointError if a line is damaged."""
    if not path.exists():
        return []
    with reading(path, remedy):
        entries = [dict(json.loads(line)) for line in read_text(path).splitlines()]
    return entries
