"""Stand-ins for parts of a GPU check, which hang or die. This module imports little, because each runs in a
new process."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

ENVIRONMENT = {"commit": "abc", "device": "a GPU", "torch": "2.13", "date": "today"}
ROW = {"model": "anole", "precision": "bf16", "method": "ar", "mode": "graphs", "step_ms": 1.0}


def slow(name: str, device: str, connection: Connection) -> None:
    """Runs a part of two items and hangs in the second."""
    connection.send(("environment", name, ENVIRONMENT))
    connection.send(("plan", name, ["first", "second"]))
    connection.send(("rows", "first", ROW))
    time.sleep(600)


def crash(name: str, device: str, connection: Connection) -> None:
    """Runs a part whose process dies."""
    connection.send(("plan", name, ["first", "second"]))
    connection.send(("left_out", "first", "it is too large"))
    os._exit(7)
