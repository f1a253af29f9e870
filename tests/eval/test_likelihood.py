"""bench --quality: mean -log p per code, by the definition."""

from __future__ import annotations

import pytest
import torch

from adt_tree.grid import Grid
from adt_tree.sampling import PassSampling, log_probs
from adt_tree.settings import Sampling
from eval.quality import nll
from tests.support.tabular import TabularTarget, append, table

CODES = [2, 0, 3, 1, 1, 2]


@pytest.mark.parametrize("nodes", [1, 2, 32])
@pytest.mark.parametrize("row_ends", [False, True])
def test_nll(nodes: int, row_ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of codes of a pass does not matter. Row ends are in the prefix, and not in the mean."""
    monkeypatch.setattr("eval.quality.NODES", nodes)
    grid, sampling = Grid(2, 3, row_ends=row_ends), Sampling(guidance=1.5)
    logits = table(1, grid.length)
    log_p, state, expected = (
        log_probs(logits, PassSampling.uniform(sampling, logits.device)),
        torch.tensor(0),
        [],
    )
    cells = [*CODES[:3], *([None] if row_ends else []), *CODES[3:]]
    for code in cells:
        if code is not None:
            expected.append(float(log_p[state, code]))
        state = append(state, torch.tensor(code or 0))
    measured = nll(TabularTarget(logits, grid, 1), sampling, None, CODES)
    assert measured == pytest.approx(-sum(expected) / 6, abs=1e-6)
    assert measured != pytest.approx(
        nll(TabularTarget(logits, grid, 1), sampling, None, CODES[::-1]), abs=1e-2
    )
