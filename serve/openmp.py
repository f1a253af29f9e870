"""Runs functions of torch in threads that end with them, so that one thread alone keeps a team of OpenMP.

OpenMP gives every thread that computes a team of workers, which lives as long as the thread. While the
workers of all teams fit the cores, they wait for work by spinning. As soon as there are more, all of them
sleep between two operations, and waking them takes longer than most operations of a decoding step: on two
cores a second team makes decoding half as fast (docs/LOG.md). The decoding thread therefore keeps its team,
and everything else that computes runs here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

Result = TypeVar("Result")


def in_new_thread(threads: int, function: Callable[..., Result], *arguments: object) -> Result:
    """Returns function(*arguments), computed in a new thread that has the name of the calling one and a team
    of `threads` OpenMP threads.

    The size of the team is a setting of each calling thread, and the rounding of convolutions depends on it,
    so pictures equal those of generate_images only with the size that the main thread has. Raises what the
    function raises. Ctrl-C ends the wait, but not the function.
    """
    future = Future[Result]()

    def run() -> None:
        torch.set_num_threads(threads)
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=threading.current_thread().name, daemon=True).start()
    return future.result()
