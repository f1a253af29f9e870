"""What the ADT-Tree paper (2512.21857) measured on Anole-7b: to stand beside our figures, never for them.

Only what is known to us: greedy decoding, no table of temperature 1. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# table -> (arm, temperature) -> speed-up over plain decoding, tau, mean depth of the trees; None: not known
PAPER: dict[str, dict[tuple[str, float], tuple[float, float | None, float]]] = {
    "coco": {
        ("eagle2", 0.0): (1.62, None, 5.0),
        ("lantern", 0.0): (3.03, None, 5.0),
        ("adt", 0.0): (2.21, 3.40, 3.86),
        ("adt_lantern", 0.0): (3.13, 4.86, 5.15),
    },
    "parti": {("adt_lantern", 0.0): (3.05, 3.97, 4.31)},
}
HEADINGS = ("paper SR", "paper tau", "paper depth")
PROMPTS = {"coco": "100 captions of MS-COCO 2017", "parti": "PartiPrompts"}


def concerns(table: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the paper has a figure for any row of ours."""
    return any((row["arm"], row["temperature"]) in PAPER[table] for row in rows)


def cells(table: str, arm: str, temperature: float) -> list[str]:
    """The paper's figures for a row of ours."""
    found = PAPER[table].get((arm, temperature), (None, None, None))
    return ["-" if value is None else f"{value:.2f}" for value in found]


def note(table: str) -> str:
    """Where the paper's figures come from."""
    return f"Paper: Anole-7b on {PROMPTS[table]}, its own engine and GPU; -: not known to us."
