"""Runs one part of a GPU check in a new process: it starts cold, and can be killed at its time limit."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from adt_tree.errors import UserError
from eval.gpu.measure import items_of, measure
from eval.runs.process import ROOT, environment

TESTS = "tests"
KEY = ("model", "precision", "method", "mode")  # items that agree in these fields share one row
Send = Callable[[str, str, Any], None]
Work = Callable[[str, str, Connection], None]


def work(part: str, device: str, connection: Connection) -> None:
    """Measures a part in the new process and sends messages (kind, name, value) through the connection.

    The first kinds are "environment" and "plan", whose value is the list of the names of all items. Then one
    message per item follows: its figures as "rows" or "tests", or the reason for their lack as "left_out" or
    "failed".
    """

    def send(kind: str, name: str, value: Any) -> None:
        connection.send((kind, name, value))

    send("environment", part, environment(device))
    if part == TESTS:
        run_tests(send)
        return
    # With empty caches torch.compile generates every kernel, as it does in a user's first run.
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        send("plan", part, [str(item) for item in items_of(part, torch.device(device))])
        for item, outcome in measure(part, torch.device(device)):
            if not isinstance(outcome, Exception):
                key = {"model": item.model, "method": item.method, "mode": item.mode}
                send("rows", str(item), {**key, **outcome})
            elif isinstance(outcome, UserError | torch.OutOfMemoryError):
                send("left_out", str(item), str(outcome).partition(". ")[0])
            else:
                traceback.print_exception(outcome)
                reason = str(outcome).partition("\n")[0]
                send("failed", str(item), f"{type(outcome).__name__}: {reason}")


def run_part(part: str, device: str, seconds: float, work: Work = work) -> dict[str, Any]:
    """Runs a part in a new process, kills the process after `seconds`, and returns the results sent by then.

    The result has the part's environment, rows, counts of tests and seconds; "left_out" and "failed" map the
    names of the other items to the reason. work: the function that the process runs.
    """
    result: dict[str, Any] = {"environment": {}, "rows": [], "tests": [], "left_out": {}, "failed": {}}
    pending, plan = [part], {part}
    context = get_context("spawn")  # CUDA survives no fork
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(part, device, sender), daemon=True)
    started = time.monotonic()
    process.start()
    sender.close()
    ended, reason = "left_out", f"its part ran out of its {seconds:.0f} s"
    try:
        while receiver.poll(max(0.0, started + seconds - time.monotonic())):
            kind, name, value = receiver.recv()
            if kind == "plan":
                pending, plan = value, set(value)
            elif kind == "environment":
                result[kind] = value
            else:
                pending.remove(name)
                if kind in ("rows", "tests"):
                    result[kind].append(value)
                else:
                    result[kind][name] = value
    except EOFError:
        process.join()
        ended, reason = "failed", f"its process ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join()
    result[ended] |= dict.fromkeys(pending, reason)
    left_out = result["left_out"]
    if left_out.keys() == plan and len(set(left_out.values())) == 1:  # one line for the whole part is enough
        result["left_out"] = {part: next(iter(left_out.values()))}
    return {**result, "rows": merged(result["rows"]), "seconds": round(time.monotonic() - started, 1)}


def merged(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row for each model, precision, method and mode, with the figures of all its items."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for item in figures:
        rows.setdefault(tuple(item[name] for name in KEY), {}).update(item)
    return list(rows.values())


class Counter:
    """A plugin of pytest that counts tests and names those that fail."""

    def __init__(self) -> None:
        self.passed, self.skipped, self.failed = 0, 0, list[str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Is called for set-up, call and tear-down of every test."""
        self.passed += report.when == "call" and report.passed
        self.skipped += report.skipped
        if report.failed:
            self.failed.append(report.nodeid)


def run_tests(send: Send) -> None:
    """Runs the tests that are marked gpu and sends their counts, or the reason why they could not run."""
    if find_spec("pytest") is None:
        send("left_out", TESTS, "pytest is not installed")
        return
    import pytest

    counter = Counter()
    # Without the options of pyproject.toml, which ask for plugins of pytest that may be missing.
    words = "-q -o addopts= -p no:cacheprovider -m gpu".split()
    status = int(pytest.main([*words, str(ROOT / "tests" / "test_gpu.py")], plugins=[counter]))
    if status > 1:
        send("failed", TESTS, f"pytest ended with status {status}; its output is above")
    elif counter.skipped and not counter.passed + len(counter.failed):
        send("left_out", TESTS, f"all {counter.skipped} were skipped")
    else:
        send("tests", TESTS, vars(counter))
