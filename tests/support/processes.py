"""Commands in processes of their own. They are forked from a server without threads that has imported this
file, so that the imports of a command take no time."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

import torch

from cli import extract_code, generate_images, generate_train_data
from storage.run_folder import RunFolder

IMPORTED = (extract_code, generate_images, generate_train_data)
SERVER = get_context("forkserver")
SERVER.set_forkserver_preload([__name__])
Stop = tuple[signal.Signals, str, int]  # a signal before the n-th call of a method of RunFolder


def perform(words: list[str], environment: dict[str, str], output: Path | None, stop: Stop | None) -> None:
    """Is a process that runs a command on one thread. output: a folder for what it prints."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    printed = (os.devnull, os.devnull) if output is None else (output / "out", output / "err")
    for stream, path in enumerate((os.devnull, *printed)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), stream)
    if stop is not None:
        signal_before(*stop)
    sys.argv[1:] = words
    runpy.run_path("main.py", run_name="__main__")


def signal_before(number: signal.Signals, step: str, count: int) -> None:
    """Makes this process get a signal before its `count`-th call of a method of RunFolder."""
    calls, original = list[str](), getattr(RunFolder, step)

    def stopping(*arguments: object) -> object:
        calls.append(step)
        if len(calls) == count:
            os.kill(os.getpid(), number)
        return original(*arguments)

    setattr(RunFolder, step, stopping)


def started(words: list[str], output: Path | None = None, stop: Stop | None = None) -> BaseProcess:
    """Starts a command, and returns its process."""
    process = SERVER.Process(target=perform, args=(words, dict(os.environ), output, stop))
    process.start()
    return process


def finished(process: BaseProcess, output: Path) -> CompletedProcess[str]:
    """Returns what a process has printed once it has ended, and its exit status, or the negative number of
    the signal that ended it."""
    process.join()
    out, err = ((output / name).read_text() for name in ("out", "err"))
    return CompletedProcess([], process.exitcode or 0, out, err)


def signalled(
    number: signal.Signals, words: list[str], before: str = "add", count: int = 2
) -> CompletedProcess[str]:
    """Runs a command in a process that gets a signal before its `count`-th call of a method of RunFolder."""
    with TemporaryDirectory() as folder:
        return finished(started(words, Path(folder), (number, before, count)), Path(folder))
