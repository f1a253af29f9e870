"""Locks on files, which the system drops with the process that holds them; the files stay. No torch.

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


def lock(path: Path, wait: bool) -> int | None:
    """A handle that holds the lock on a file, made if missing, until it is closed or this process ends.

    None if another process holds it and wait is false.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        os.close(handle)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return None
        raise UserError(
            f"{path}: cannot be locked ({error.strerror}); choose an --output_dir on a file system that "
            "has locks"
        ) from None
    return handle


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process is in the block that this file guards."""
    handle = lock(path, wait=True)
    assert handle is not None
    try:
        yield
    finally:
        os.close(handle)
