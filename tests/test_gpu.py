"""What needs a CUDA device; `main.py gpu_check` runs these."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adt_tree.method import Method, build
from adt_tree.policy import TreeShape
from adt_tree.roles import Request
from adt_tree.tree import to_device
from eval.gpu_parts import waits, warm_up
from models.graphs import CudaRecorder, GraphRunner
from models.model import Model
from tests.loading import load
from tests.methods import method_of
from tests.test_graphs import Doubling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
TREES = {
    "ar": {},
    "static": {"static": "mc_sim_7b_63"},
    "dynamic": {"shape": TreeShape(4, 3, 12)},
    "jacobi": {"shape": TreeShape(9, 3, 20), "drafter": "self-draft"},
    "hybrid": {"shape": TreeShape(9, 3, 20), "drafter": "hybrid"},
}


def opened(folder: Path, device: str, graphs: bool = False) -> Model:
    """The tiny model in fp32."""
    return replace(load("emoji", str(folder), None, "fp32", device, True), graphs=graphs)


def drawn(model: Model, method: Method) -> dict[str, list[int]]:
    """Three images in two slots."""
    openings = [model.encode(text) for text in ("sun", "red heart", "pizza")]
    arm = build(model, method, 2, max(o.length for o in openings))
    return {i.name: i.codes for i in arm.decode(Request(str(n), o, n) for n, o in enumerate(openings))}


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", TREES)
def test_tokens_are_the_cpus(name: str, temperature: float, graphs: bool, tiny_checkpoint: Path) -> None:
    expected = drawn(opened(tiny_checkpoint, "cpu"), method_of(temperature, 0, 1.0, 3.0))
    method = method_of(temperature, 0, 1.0, 3.0, **TREES[name])
    assert drawn(opened(tiny_checkpoint, "cuda", graphs), method) == expected


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_a_cycle_waits_once(name: str, graphs: bool, tiny_checkpoint: Path) -> None:
    model = opened(tiny_checkpoint, "cuda", graphs)
    opening = model.encode("sun")
    arm = build(model, method_of(1.0, 0, 1.0, 3.0, **TREES[name]), 1, opening.length)
    warm_up(arm, Request("0", opening, 0))
    assert waits(arm, Request("0", opening, 0), torch.device("cuda")) <= 1


def test_captured_results_are_the_callers() -> None:
    by = torch.tensor(2.0, device="cuda")
    run, double = GraphRunner(CudaRecorder()), Doubling(by)
    ones = torch.ones(3, device="cuda")
    one, two = run(double, 1, ones), run(double, 1, 5 * ones)
    other = run(double, 3, torch.ones(4, device="cuda"))
    by.fill_(7.0)
    last = run(double, 1, ones)
    assert [x.tolist() for x in (one, two, other, last)] == [[2.0] * 3, [10.0] * 3, [6.0] * 4, [7.0] * 3]


def test_to_device() -> None:
    moved = [to_device([n, n + 1], torch.device("cuda")) for n in range(50)]
    assert [x.tolist() for x in moved] == [[n, n + 1] for n in range(50)]
