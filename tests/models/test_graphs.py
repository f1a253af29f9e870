"""Recorded parts of a step give the images and the steps of direct calls, and read nothing but static
buffers. On the CPU, tests.support.tape stands in for CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import lab.methods
from adt_tree import Pipeline
from adt_tree.grid import Grid, Raster
from adt_tree.method import Method
from adt_tree.padding import Padding
from adt_tree.records import Decoded
from adt_tree.settings import Sampling
from models.graphs import CudaRecorder, GraphRunner
from models.loading import pick_graphs
from tests.adt_tree import test_row_ends as lined
from tests.adt_tree.test_engine import (
    IMAGES,
    PLAIN,
    TREE,
    drafted_methods,
    exact_methods,
    new_engine,
    one_of_each,
)
from tests.support.checkpoints import Checkpoints
from tests.support.decoding import codes_of
from tests.support.tape import Machine


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Puts a recorder that works on the CPU in the place of CUDA's."""
    recorder = Machine()
    monkeypatch.setattr("models.model.CudaRecorder", lambda device: recorder)
    return recorder


@pytest.mark.parametrize(
    ("asked", "device", "used"),
    [(None, "cuda", True), (None, "cuda:1", True), (None, "cpu", False), (False, "cuda", False)],
)
def test_graphs_are_the_default_on_cuda(asked: bool | None, device: str, used: bool) -> None:
    assert pick_graphs(asked, device) is used


def graphs_of(target: object) -> GraphRunner | None:
    """Returns the graph runner of a target, or None without graphs."""
    run = getattr(target, "run", None)
    return run if isinstance(run, GraphRunner) else None


def steps(images: Iterator[Decoded]) -> dict[str, object]:
    """Returns the codes of every image, and its steps without their times."""
    return {i.name: (i.codes, [(s.position, s.nodes, s.accepted) for s in i.steps]) for i in images}


METHODS = one_of_each(exact_methods(Sampling()) + drafted_methods(Sampling()))
RIVALS = ("sjd-pac", "gsd")  # one whose window is a tree, and a relaxed one; the others draft as these do
CASES = [(m, 3) for m in METHODS if m.spec not in lab.methods.RIVALS or m.name in RIVALS]
CASES += [(Method("eagle-2", PLAIN, TREE), 1)]


@pytest.mark.parametrize(("method", "slots"), CASES, ids=str)
def test_captured_passes_are_the_direct_ones(method: Method, slots: int) -> None:
    """Idle slots, and rows that only pad a pass, have no effect."""
    captured, direct = (new_engine(method, slots, graphs) for graphs in (True, False))
    assert steps(captured.decode(IMAGES)) == steps(direct.decode(IMAGES))
    assert captured.target.run.captured > 1 and captured.target.cache.store.isfinite().all()


@pytest.mark.parametrize("name", ["self-draft", "eagle-2"])
def test_row_ends(name: str) -> None:
    engine = lined.new_engine(Method(name, Sampling(), lined.TREES[name]), 2, graphs=True)
    assert codes_of(engine.decode(lined.IMAGES)) == lined.reference("sampled", 4, 4)
    assert graphs_of(engine.target).captured > 1


def test_positions_on_three_axes(checkpoints: Checkpoints, machine: Machine) -> None:
    """Positions start at the first code of each image, which differs once a slot takes the next prompt."""
    model = replace(checkpoints["glm_image"].load(), grid=Grid(4, 5, before=(Raster(2, 3),)))
    method = Method("eagle-2", Sampling(guidance=1.0), TREE)
    texts = ("sun", "red heart, and a text that is longer", "pizza")
    direct, captured = (
        Pipeline(replace(model, graphs=graphs))(texts, method, seed=5, batch_size=2)
        for graphs in (False, True)
    )
    assert captured.codes == direct.codes and len({tuple(codes) for codes in direct.codes}) == 3
    assert captured.stats["target_calls"] == direct.stats["target_calls"] and machine.recordings > 1


def test_shape_buckets() -> None:
    counts = (1, 2, 8, 9, 35, 59, 64, 65, 128, 129)
    assert [Padding(few=True).nodes(n) for n in counts] == [1, 8, 8, 16, 64, 64, 64, 128, 128, 192]
    bounds = [Padding(few=True, cells=1024).committed([n])[0] for n in (0, 1, 256, 257, 1000, 1024)]
    assert bounds == [256, 256, 256, 512, 1024, 1024]


def doubling(by: Tensor) -> Callable[[Tensor, int], Tensor]:
    """Returns a function that multiplies its two inputs by a tensor that is updated in place."""
    return lambda x, more: more * x * by


def check_results(run: GraphRunner, device: torch.device) -> None:
    """Checks the results of three graphs, for another shape and another `more` each, and that a replay sees a
    tensor that was updated in place. Results of one shape are one tensor, which other functions read in
    place."""
    by, three = torch.tensor(2.0, device=device), torch.ones(3, device=device)
    double = doubling(by)
    results = [run(double, three, 1).tolist(), run(double, 5 * three, 1).tolist()]
    results += [run(double, three, 3).tolist(), run(double, torch.ones(4, device=device), 1).tolist()]
    by.fill_(7.0)
    results.append(run(double, three, 1).tolist())
    assert results == [[2.0] * 3, [10.0] * 3, [6.0] * 3, [2.0] * 4, [7.0] * 3]
    assert run.captured == 3
    first = run(double, three, 1)
    assert run(torch.neg, first).tolist() == [-7.0] * 3
    assert run(double, three, 2) is first and run(torch.neg, first).tolist() == [-14.0] * 3


def test_results_hold_until_the_next_call() -> None:
    check_results(GraphRunner(Machine()), torch.device("cpu"))


def test_the_first_call_runs_a_function_once() -> None:
    run, total = GraphRunner(Machine()), torch.zeros(2)
    assert [run(total.add_, torch.ones(2)).tolist() for _ in range(3)] == [[1.0] * 2, [2.0] * 2, [3.0] * 2]
    assert total.tolist() == [3.0] * 2 and run.captured == 1


@pytest.mark.parametrize("fail_at", [1, 4])
def test_a_failed_recording_leaves_plain_calls(fail_at: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The codes stay the same, and one line on stderr gives the reason."""
    machine = Machine(fail_at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.model.CudaRecorder", lambda device: machine)
        engine = new_engine(Method("eagle-2", Sampling(), TREE), 2, graphs=True)
    direct = new_engine(engine.method, 2)
    assert codes_of(engine.decode(IMAGES)) == codes_of(direct.decode(IMAGES))
    assert machine.recordings == fail_at and engine.target.run.captured == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "out of graphs" in line


def test_a_recording_out_of_memory_is_tried_once_more() -> None:
    machine = Machine(1, torch.OutOfMemoryError)
    run, x = GraphRunner(machine), torch.ones(2)
    assert [run(torch.neg, x).tolist() for _ in range(2)] == [[-1.0] * 2] * 2
    assert (machine.freed, machine.recordings, run.captured) == (1, 2, 1)


def test_a_capture_that_cannot_end_leaves_the_stream_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.graph leaves the capture's stream current if the capture raises at its end."""
    current = ["before"]

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        current[0] = "capture"
        yield
        raise RuntimeError("capture_end")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "capture")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    with pytest.raises(RuntimeError, match="capture_end"):
        CudaRecorder(torch.device("cuda")).record(lambda: None)
    assert current == ["before"]
