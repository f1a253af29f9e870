"""Locks on files, which the system drops with the process that holds them. No torch.

They hold between processes, not within one; their files stay and mean nothing.
"""

from __future__ import annotations

from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

from adt_tree.errors import UserError


def alone(path: Path, wait: bool = True) -> AcquireReturnProxy:
    """The lock on a file, held until the with block of it ends, or as long as it is kept.

    Timeout if another process holds it and wait is False.
    """
    # A soft lock would outlive a killed process.
    lock = FileLock(path, is_singleton=True, fallback_to_soft=False)
    try:
        return lock.acquire(blocking=wait)
    except Timeout:
        raise
    except OSError as error:
        raise UserError(
            f"{path}: cannot be locked ({error.strerror}); choose an --output_dir on a file system that has "
            "locks"
        ) from None
