"""Locks on files, which the system drops with the process that holds them. No torch.

POSIX record locks: they hold between processes, not within one, and work over NFS.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eval.errors import UserError


def _lock(path: Path, wait: bool) -> int | None:
    """A handle that holds the lock on a file, made if missing; None if another process holds it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _same(handle, path):
                return handle
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise UserError(
                f"{path}: cannot be locked ({error.strerror}); choose an --output_dir on a file system that "
                "has locks"
            ) from None
        os.close(handle)  # its file was removed while we waited: lock the one that is there now


def _same(handle: int, path: Path) -> bool:
    try:
        there, mine = os.stat(path), os.fstat(handle)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process is in the block that this file guards."""
    handle = _lock(path, wait=True)
    assert handle is not None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held
        os.close(handle)


def keep_alone(path: Path) -> int | None:
    """Hold a lock until this process ends; None if another process holds it."""
    return _lock(path, wait=False)
