"""Captured passes: the images and steps of direct passes, from static buffers alone. On the CPU tests.tape
takes the recorder's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adt_tree.engine import Engine, build
from adt_tree.method import Method
from adt_tree.policy import TreeShape
from adt_tree.records import Decoded
from adt_tree.roles import Request
from adt_tree.sampling import Sampling
from models.graphs import MOST, WARM_UPS, GraphRunner, GraphTarget, context_bucket, row_bucket
from models.spec import ALIGNMENTS
from tests import test_engine_separators as separators
from tests.checkpoints import load
from tests.decoding import codes_of
from tests.tape import SPOILT, Launches, Machine
from tests.test_engine import IMAGES, PLAIN, drafted_methods, exact_methods, made


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """What captures in the place of CUDA."""
    own = Machine()
    monkeypatch.setattr("models.model.CudaRecorder", lambda: own)
    return own


def graphs_of(target: object) -> GraphRunner | None:
    """Who captures a target's passes, whatever wraps it; None: nobody."""
    tokens = getattr(target, "tokens", target)
    return tokens.graphs if isinstance(tokens, GraphTarget) else None


def steps(images: Iterator[Decoded]) -> dict[str, object]:
    """Codes, and what every target call was but for its clock."""
    return {i.name: (i.codes, [(s.position, s.nodes, s.accepted) for s in i.steps]) for i in images}


CASES = exact_methods(Sampling()) + exact_methods(PLAIN) + drafted_methods(Sampling())


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("method", CASES, ids=str)
def test_captured_passes_are_the_direct_ones(method: Method, slots: int) -> None:
    """Idle slots and rows that nobody reads leave nothing behind."""
    captured, direct = (made(method, slots, graphs) for graphs in (True, False))
    assert steps(captured.decode(IMAGES)) == steps(direct.decode(IMAGES))
    assert captured.target.graphs.captured > 1 and captured.target.cache.store.isfinite().all()


@pytest.mark.parametrize("name", ["ar", "self-draft", "eagle-2"])
def test_row_separators(name: str) -> None:
    engine = separators.made(Method(name, Sampling(), separators.TREES[name]), 2, graphs=True)
    assert codes_of(engine.decode(separators.IMAGES)) == separators.reference("sampled", 4, 4)
    assert graphs_of(engine.target).captured > 1


# Of a step, beside the graphs.
LAUNCHES = {"ar": 45, "eagle-2": 310, "self-draft": 270}
TREES = {"ar": None, "eagle-2": TreeShape(4, 3, 12)}


def launched(own: Engine, request: Request, machine: Machine) -> int:
    """Operators between the second and the third target pass of an image, beside the replays."""
    counts, forward = list[int](), own.target.forward
    with Launches(machine) as seen:

        def watched(*given: object) -> object:
            counts.append(seen.count)
            return forward(*given)

        own.target.forward = watched
        list(own.decode([request]))
    return counts[2] - counts[1]


@pytest.mark.parametrize("shift", ALIGNMENTS)
@pytest.mark.parametrize("name", LAUNCHES)
def test_models(name: str, shift: str, tiny_checkpoint: Path, machine: Machine) -> None:
    """A model asked for graphs gives what it gives without, whatever its drafter reads, in fewer launches."""
    found, launches = [], []
    model = replace(load("emoji", tiny_checkpoint), alignment=shift)
    prompts = [model.encode(text) for text in ("sun", "red heart", "pizza")]
    requests = [Request(str(n), prompt, n) for n, prompt in enumerate(prompts)]
    method = Method(name, Sampling(), TREES.get(name, TreeShape(9, 3, 20)))
    for graphs in (True, False):
        own = build(replace(model, graphs=graphs), method, 2, max(p.length for p in prompts))
        assert (graphs_of(own.target) is not None) == graphs
        found.append([(i.name, i.codes, i.drafter_calls) for i in own.decode(requests)])
        launches.append(launched(own, requests[0], machine))
    assert found[0] == found[1]
    assert launches[0] <= LAUNCHES[name] and launches[0] + 30 < launches[1]


def test_shape_buckets() -> None:
    counts = (1, 2, 8, 9, 35, 59, 64, 65, 128, 129)
    assert [row_bucket(n) for n in counts] == [1, 8, 8, 16, 64, 64, 64, 128, 128, 192]
    assert [context_bucket(n, 1024) for n in (0, 1, 256, 257, 1000, 1024)] == [0, 256, 256, 512, 1024, 1024]


def doubling(by: Tensor) -> Callable[[Tensor, int], Tensor]:
    """A pass: more times the input, by what lies in place."""
    return lambda x, more: more * x * by


def check_results(run: GraphRunner, device: torch.device) -> None:
    """Replays of one graph, of another shape and number, and after a change of what is read in place: results
    are the caller's."""
    by, three = torch.tensor(2.0, device=device), torch.ones(3, device=device)
    double = doubling(by)
    results = [run(double, 1, three), run(double, 1, 5 * three), run(double, 3, three)]
    results.append(run(double, 1, torch.ones(4, device=device)))
    by.fill_(7.0)
    results.append(run(double, 1, three))
    assert [x.tolist() for x in results] == [[2.0] * 3, [10.0] * 3, [6.0] * 3, [2.0] * 4, [7.0] * 3]
    assert run.captured == 3


def test_results_are_the_callers() -> None:
    check_results(GraphRunner(Machine()), torch.device("cpu"))


def test_the_tape_shows_what_a_graph_breaks() -> None:
    """What Python keeps of a captured function is that of the capture, in memory that others use."""
    run, kept = GraphRunner(Machine()), []

    def count(x: Tensor, more: int) -> Tensor:
        kept.append(x + len(kept))
        return kept[-1] + 0

    assert [run(count, 0, torch.ones(1)).item() for _ in range(4)] == [2] * 4
    assert len(kept) == WARM_UPS + 1 and kept[-1].item() == 2
    run(doubling(torch.tensor(2.0)), 1, torch.ones(1))
    assert kept[-1].item() == SPOILT
    with pytest.raises(RuntimeError, match="read in a capture"):
        run(lambda x, more: x * x.item(), 1, torch.ones(1))


def test_graphs_have_a_bound() -> None:
    run, double = GraphRunner(Machine()), doubling(torch.tensor(2.0))
    for more in range(MOST + 5):
        assert run(double, more, torch.ones(1)).tolist() == [2.0 * more]
    assert run.captured == MOST
