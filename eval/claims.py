"""Which process makes which image: locks on files, which the system drops with their process. No torch.

Several processes, on one machine or on many that share a file system, take images from one queue. A lock
needs no clock and no heartbeat: that of a process that was killed is free at once. POSIX record locks: they
hold between processes, not within one, and work over NFS.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eval.errors import UserError


@dataclass(frozen=True, slots=True)
class Worker:
    """This process among those of a launcher (accelerate launch, torchrun)."""

    rank: int = 0
    count: int = 1
    local_rank: int | None = None  # its place on its machine, and the number of its device

    @property
    def leads(self) -> bool:
        """Whether it speaks for all."""
        return self.rank == 0


def worker() -> Worker:
    """This process as RANK, WORLD_SIZE and LOCAL_RANK describe it; alone without. UserError if damaged."""
    if "WORLD_SIZE" not in os.environ:
        return Worker()
    values = {name: os.environ.get(name, "0") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    for name, value in values.items():
        if not value.isdecimal():
            raise UserError(f"{name}={value!r}: the launcher's variable is no number; unset it or repair it")
    rank, count, local = (int(value) for value in values.values())
    if rank >= count:
        raise UserError(f"RANK={rank} with WORLD_SIZE={count}: ranks count from 0; unset or repair them")
    return Worker(rank, count, local)


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


def _drop(handle: int, path: Path) -> None:
    """Remove a lock's file while it is held, then let go."""
    path.unlink(missing_ok=True)
    os.close(handle)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process is in the block that this file guards."""
    handle = _lock(path, wait=True)
    assert handle is not None
    try:
        yield
    finally:
        _drop(handle, path)


def keep_alone(path: Path) -> int | None:
    """Hold a lock until this process ends; None if another process holds it."""
    return _lock(path, wait=False)


class Claims:
    """The images that this process has in hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[str, int] = {}

    def _path(self, file: str) -> Path:
        return self.folder / f"{file}.claim"

    def take(self, file: str) -> bool:
        """Claim an image by its file's name; False if this or another process has it."""
        if file in self._held:
            return False
        self.folder.mkdir(exist_ok=True)
        handle = _lock(self._path(file), wait=False)
        if handle is None:
            return False
        os.ftruncate(handle, 0)
        os.write(handle, f"{socket.gethostname()} {os.getpid()}\n".encode())  # for a reader who wonders
        self._held[file] = handle
        return True

    def give_back(self, file: str) -> None:
        """Let go of an image: it is finished, or another process may make it."""
        handle = self._held.pop(file, None)
        if handle is not None:
            _drop(handle, self._path(file))

    def give_all_back(self) -> None:
        """Let go of everything."""
        for file in list(self._held):
            self.give_back(file)
