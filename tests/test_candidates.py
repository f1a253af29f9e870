"""The sizes of trees from which `--total_token auto` chooses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adt_tree.budget.candidates import AutoTree
from adt_tree.engine import candidate_shapes, largest_target
from adt_tree.errors import UserError
from adt_tree.grid import Grid
from adt_tree.method import Demand
from adt_tree.policy import AdaptiveTree
from adt_tree.sampling import Sampling
from tests.test_budget import CANDIDATES


def test_what_does_not_fit_is_left_out_with_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    def target(slots: int, sampling: Sampling, max_nodes: int, max_prompt: int, demand: Demand) -> int:
        if max_nodes > 8:
            raise UserError("out of memory")
        return max_nodes

    model: Any = SimpleNamespace(target=target)
    shapes = list(CANDIDATES)
    assert largest_target(model, Sampling(), shapes, slots=1, max_prompt=9, demand=Demand()) == 8
    assert [shape.budget for shape in shapes] == [0, 3, 7]
    notices = capsys.readouterr().err.splitlines()
    assert len(notices) == 3 and all("auto" in line and "out of memory" in line for line in notices)
    assert "32" in notices[0] and "20" in notices[1] and "16" in notices[2]


def test_candidates_of_wide_rows_on_a_device_of_buckets() -> None:
    """Every tree fills a bucket. The main chain of a large one reaches beyond the cell below its root."""
    wide = AutoTree().candidates(row_width=48, buckets=True)
    assert [shape.num_nodes for shape in wide] == [1, 8, 16, 32, 64, 128]
    assert wide[-2].depth == 49 and wide[-1].depth == 63


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_tree_that_no_image_has_room_for_is_no_candidate(device: str) -> None:
    """All its timed steps would be cut, so that it would be tried for ever. The policy of a drafter network
    chooses depths within a candidate, so its candidates stay."""
    codebook = SimpleNamespace(device=torch.device(device))
    model: Any = SimpleNamespace(grid=Grid(4, 4), num_codes=64, codebook=codebook)
    depths = {"cpu": [0, 3, 7, 11, 11], "cuda": [0, 7]}
    assert [shape.depth for shape in candidate_shapes(AutoTree(), model)] == depths[device]
    for grid, smaller in ((Grid(3, 3), [0, 3]), (Grid(2, 3), [0, 3]), (Grid(1, 3), [0, 1])):
        model.grid = grid
        expected = smaller if device == "cpu" else [0, 1]
        assert [shape.depth for shape in candidate_shapes(AutoTree(), model)] == expected
    base = AdaptiveTree()
    assert candidate_shapes(AutoTree(base), model)[-1].depth == base.largest.depth
