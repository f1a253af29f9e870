"""One owner at a time for the files of a folder. No torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from adt_tree.errors import UserError


@contextmanager
def owned(folder: Path, work: Sequence[str] = ()) -> Iterator[None]:
    """Makes a folder, and lets no other process own it, or the same work in it, until the block ends.

    The system holds the lock, on this host and over NFS, and frees it when the process ends, even if it is
    killed. work: names of the images that this process alone makes; others may make other images in the
    folder. Raises UserError that names the owner.
    """
    folder.mkdir(parents=True, exist_ok=True)
    share = f".{hashlib.sha256(chr(10).join(work).encode()).hexdigest()[:8]}" if work else ""
    path = folder / f"{share}.lock"
    while True:
        try:
            stream = path.open("a+")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder)) from error
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            raise UserError(
                f"{folder} is in use by {stream.read() or 'another process'}: wait until it ends, or choose "
                f"another folder; if there is no such process, remove {path}"
            ) from None
        except OSError as error:
            print(
                f"warning: {folder}: {error.strerror}, so let no other process write there", file=sys.stderr
            )
        if path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat()):
            break
        stream.close()  # its last owner has removed it in the meantime
    with stream:
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {platform.node()}")
        stream.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
