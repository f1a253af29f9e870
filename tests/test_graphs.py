"""Recorded parts of a step give the images and the steps of direct calls, and read nothing but static
buffers. On the CPU, tests.tape stands in for CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adt_tree import Pipeline
from adt_tree.engine import Engine, build
from adt_tree.errors import CheckpointError
from adt_tree.grid import Grid, Raster
from adt_tree.method import Method
from adt_tree.policy import AdaptiveTree, TreeShape
from adt_tree.proposers.eagle import EagleProposer
from adt_tree.proposers.self_draft import SelfDraftProposer
from adt_tree.records import Decoded
from adt_tree.rivals.jacobi_window import JacobiWindow
from adt_tree.roles import Request, run_directly
from adt_tree.sampling import Sampling
from models.family import ALIGNMENTS
from models.graphs import CudaRecorder, GraphRunner, context_bucket, row_bucket
from models.loading import pick_graphs
from tests import test_row_ends as lined
from tests.checkpoints import Checkpoints, load
from tests.decoding import codes_of
from tests.methods import RELAXED
from tests.tape import Machine
from tests.test_engine import IMAGES, PLAIN, TREE, drafted_methods, exact_methods, new_engine, one_of_each


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


def test_a_cpu_has_no_graphs(tiny_checkpoint: Path) -> None:
    assert not Pipeline.from_pretrained(str(tiny_checkpoint), device="cpu").model.graphs
    with pytest.raises(CheckpointError, match="cuda_graphs"):
        Pipeline.from_pretrained(str(tiny_checkpoint), device="cpu", cuda_graphs=True)


def graphs_of(target: object) -> GraphRunner | None:
    """Returns the graph runner of a target, or None without graphs."""
    run = getattr(target, "run", None)
    return run if isinstance(run, GraphRunner) else None


def steps(images: Iterator[Decoded]) -> dict[str, object]:
    """Returns the codes of every image, and its steps without their times."""
    return {i.name: (i.codes, [(s.position, s.nodes, s.accepted) for s in i.steps]) for i in images}


CASES = [(method, 3) for method in one_of_each(exact_methods(Sampling()) + drafted_methods(Sampling()))]
CASES += [(method, 1) for method in one_of_each(exact_methods(PLAIN))]


@pytest.mark.parametrize(("method", "slots"), CASES, ids=str)
def test_captured_passes_are_the_direct_ones(method: Method, slots: int) -> None:
    """Idle slots, and rows that only pad a pass, have no effect."""
    captured, direct = (new_engine(method, slots, graphs) for graphs in (True, False))
    assert steps(captured.decode(IMAGES)) == steps(direct.decode(IMAGES))
    assert captured.target.run.captured > 1 and captured.target.cache.store.isfinite().all()


@pytest.mark.parametrize("name", ["ar", "self-draft", "eagle-2"])
def test_row_ends(name: str) -> None:
    engine = lined.new_engine(Method(name, Sampling(), lined.TREES[name]), 2, graphs=True)
    assert codes_of(engine.decode(lined.IMAGES)) == lined.reference("sampled", 4, 4)
    assert graphs_of(engine.target).captured > 1


TREES = {"ar": None, "eagle-2": TreeShape(4, 3, 12)}


@pytest.mark.parametrize(
    ("name", "alignment"), [("self-draft", ALIGNMENTS[0]), *(("eagle-2", which) for which in ALIGNMENTS)]
)
def test_models(name: str, alignment: str, tiny_checkpoint: Path) -> None:
    """Graphs do not change a loaded model's images, in either alignment of its drafter."""
    outputs = []
    model = replace(load("emoji", tiny_checkpoint), alignment=alignment)
    prompts = [model.encode(text) for text in ("sun", "red heart", "pizza")]
    requests = [Request(str(n), prompt, n) for n, prompt in enumerate(prompts)]
    method = Method(name, Sampling(), TREES.get(name, TreeShape(9, 3, 20)))
    for graphs in (True, False):
        engine = build(replace(model, graphs=graphs), method, 2, max(p.length for p in prompts))
        assert (graphs_of(engine.target) is not None) == graphs
        outputs.append([(i.name, i.codes, i.drafter_calls) for i in engine.decode(requests)])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", ["eagle-2", "self-draft"])
def test_positions_on_three_axes(name: str, checkpoints: Checkpoints) -> None:
    """Positions start at the first code of each image, which differs once a slot takes the next prompt."""
    model = replace(checkpoints["glm_image"].load(), grid=Grid(4, 5, before=(Raster(2, 3),)))
    pipe, other = Pipeline(model), Pipeline(replace(model, graphs=True))
    method = Method(name, Sampling(guidance=1.0), TREES.get(name, TreeShape(9, 3, 20)))
    texts = ("sun", "red heart, and a text that is longer", "pizza")
    codes_by_mode = [part(texts, method, seed=5, batch_size=2).codes for part in (pipe, other)]
    assert codes_by_mode[0] == codes_by_mode[1] and len({tuple(codes) for codes in codes_by_mode[0]}) == 3


def test_shape_buckets() -> None:
    counts = (1, 2, 8, 9, 35, 59, 64, 65, 128, 129)
    assert [row_bucket(n) for n in counts] == [1, 8, 8, 16, 64, 64, 64, 128, 128, 192]
    assert [context_bucket(n, 1024) for n in (0, 1, 256, 257, 1000, 1024)] == [0, 256, 256, 512, 1024, 1024]


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
        engine = new_engine(Method("eagle-2", Sampling(), TREES["eagle-2"]), 2, graphs=True)
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


def updated_tensors(engine: Engine) -> list[Tensor]:
    """Returns everything that the parts of a step update in place: lengths and contents of caches, and the
    proposer's state per position."""
    proposer = engine.drafting[0] if engine.drafting else None
    networks = [engine.target, *([proposer.drafter] if isinstance(proposer, EagleProposer) else [])]
    caches = [getattr(network, "tokens", network).cache for network in networks]
    tensors = [cache.length for cache in caches]
    for cache in caches:
        tensors += [cache.store[:, row, :, :, :length] for row, length in enumerate(cache.length.tolist())]
    if isinstance(proposer, SelfDraftProposer):
        history, slots = proposer.history, engine.target.slots
        tensors += [proposer._neighbours.codes[:, :-1], proposer._position, history._passes]
        # The last row of each image receives the entries that are dropped.
        for rows in (history._before, history._stamp, history._codes, history._confidence, history._next):
            tensors.append(rows.unflatten(0, (slots, -1))[:, :-1])
    if isinstance(proposer, JacobiWindow):
        tensors += [proposer.codes, proposer.q]
    return [x.clone() for x in tensors]


@pytest.mark.parametrize("name", ["ar", "eagle-2", "adt-tree", "self-draft", "sjd-pac", *RELAXED])
@pytest.mark.parametrize("rows_end", [False, True])
def test_every_step_leaves_what_direct_calls_leave(rows_end: bool, name: str, machine: Machine) -> None:
    """This holds after every step, also after one in which a part was recorded."""
    adaptive = AdaptiveTree(depth_max=3, depth_start=2, width_max=3)
    tree = adaptive if name == "adt-tree" else (TREES | RELAXED).get(name, TREE)
    method, images = Method(name, Sampling(), tree), lined.IMAGES if rows_end else IMAGES
    make = lined.new_engine if rows_end else new_engine
    captured = make(method, 2, graphs=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.model.GraphRunner", lambda recorder: run_directly)
        direct = make(method, 2, graphs=True)  # in the same shapes
    assert direct.target.few_shapes
    recordings = set()
    for _, _ in zip(captured.steps(images), direct.steps(images), strict=True):
        recordings.add(machine.recordings)
        for one, other in zip(updated_tensors(captured), updated_tensors(direct), strict=True):
            assert torch.equal(one, other)
    assert len(recordings) > 1
