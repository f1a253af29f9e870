"""Captured work: the images of direct work, from static buffers alone. On the CPU tests.tape takes the
recorder's place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adt_tree.calibrate import Calibration
from adt_tree.candidates import CandidateCache
from adt_tree.decode import autoregressive, speculative
from adt_tree.eagle import EagleProposer
from adt_tree.grid import Grid
from adt_tree.hybrid import HybridProposer
from adt_tree.method import Decoder, build
from adt_tree.noise import Noise
from adt_tree.passes import DIRECT
from adt_tree.policy import Fixed, TreeShape
from adt_tree.roles import Request
from adt_tree.sampling import Sampling
from adt_tree.self_draft import SelfDraftProposer
from adt_tree.verify import GreedyRelaxed
from eval.gpu_parts import warm_up
from eval.profiling import profile
from models.drafter import EagleDrafter
from models.graphs import MOST, WARM_UPS, Replays
from models.lines import LineTarget
from models.spec import TOKEN_SHIFTS
from models.target import ARTarget
from tests import test_engine_lines as lines
from tests.loading import load
from tests.methods import method_of
from tests.tape import SPOILT, Launches, Machine
from tests.test_engine import (
    CODES,
    FIRST,
    GRID,
    IMAGES,
    LAWS,
    MAX_NODES,
    MAX_PROMPT,
    Method,
    coupled,
    decoder,
    net,
    reference,
    sampled_methods,
)  # fmt: skip
from tests.test_jacobi import CPU, SHAPES, convinced


def make_target(slots: int, branches: int) -> tuple[ARTarget, Replays]:
    """The engine tests' target over captured passes."""
    passes = Replays(Machine(), GRID.size)
    return ARTarget(decoder(), GRID, FIRST, CODES, slots, branches, MAX_PROMPT, MAX_NODES, passes), passes


def drawn(images: Any) -> dict[str, list[int]]:
    """Codes by name."""
    return {image.name: image.codes for image in images}


@pytest.mark.parametrize("law", ["sampled", "greedy unguided"])
def test_plain_decoding(law: str) -> None:
    target, passes = make_target(3, LAWS[law].branches)
    noise = Noise(CODES, silent=LAWS[law].greedy)
    assert drawn(autoregressive(target, IMAGES, LAWS[law], noise)) == reference(law)
    assert passes.captured == 3  # passes before and after the first code is committed, and what follows them
    assert target.cache.store.isfinite().all()  # idle slots and rows nobody reads have left nothing behind


@pytest.mark.parametrize("law, slots", [("sampled", 1), ("greedy unguided", 3)])
@pytest.mark.parametrize("tree", ["fixed", "horizontal", "mc_sim_7b_63"])
def test_drafter_network(tree: str, law: str, slots: int) -> None:
    target, passes = make_target(slots, LAWS[law].branches)
    method = Method(tree, coupled(LAWS[law]))
    drafter = EagleDrafter(net(), target, 6, 10)
    proposer = EagleProposer(drafter, LAWS[law], method.growth(), slots, passes)
    images = speculative(target, proposer, method.policy(slots), method.rule, IMAGES, LAWS[law])
    assert drawn(images) == reference(law)
    assert passes.captured > 3 and target.cache.store.isfinite().all()


@pytest.mark.parametrize("method", sampled_methods(), ids=lambda m: f"{m.tree} {type(m.rule).__name__}")
def test_rules(method: Method) -> None:
    """Those whose images depend on the drafts: the cycles of direct work."""
    law, found = Sampling(temperature=0.0 if isinstance(method.rule, GreedyRelaxed) else 1.0), []
    for captured in (True, False):
        target, passes = make_target(2, law.branches)
        passes = passes if captured else DIRECT
        proposer = EagleProposer(EagleDrafter(net(), target, 6, 10), law, method.growth(), 2, passes)
        images = speculative(target, proposer, method.policy(2), method.rule, IMAGES, law)
        found.append([(i.name, i.codes, [(s.nodes, s.accepted) for s in i.steps]) for i in images])
    assert found[0] == found[1]


@pytest.mark.parametrize("shape, slots", [("tree", 1), ("longer than a row", 3)])
@pytest.mark.parametrize("kind", ["jacobi", "hybrid"])
def test_self_drafting(kind: str, shape: str, slots: int) -> None:
    """Images, and the very trees of direct passes."""
    law, found = LAWS["sampled"], []
    for captured in (True, False):
        target, passes = make_target(slots, law.branches)
        passes = passes if captured else DIRECT
        stale = CandidateCache(GRID, slots, 5, "above", CODES, CPU)
        proposer: Any = SelfDraftProposer(stale, passes)
        if kind == "hybrid":
            drafter, calibration = EagleDrafter(net(), target, 11, 5), Calibration(5, torch.device("cpu"))
            proposer = convinced(HybridProposer(drafter, law, stale, calibration, slots, passes))
        images = list(speculative(target, proposer, Fixed(SHAPES[shape]), coupled(law), IMAGES, law))
        assert drawn(images) == reference("sampled")
        found.append([[(s.position, s.nodes, s.accepted) for s in i.steps] for i in images])
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["plain", "jacobi", "dynamic"])
def test_row_ends(kind: str) -> None:
    grid, law = Grid(4, 4), Sampling()
    size = Grid(grid.height, grid.width + 1)
    passes = Replays(Machine(), size.size)
    tokens = ARTarget(decoder(), size, FIRST, CODES, 2, 2, lines.MAX_PROMPT, 2 * lines.MAX_NODES, passes)
    target = LineTarget(tokens, grid, lines.ROW_END)
    if kind == "plain":
        images = autoregressive(target, lines.IMAGES, law, Noise(CODES, silent=False))
    else:
        proposer, shape = lines.proposer_of(kind, target, law)
        if kind == "jacobi":  # a drafter's growth beside row ends is the host's work
            proposer.passes = passes
        images = speculative(target, proposer, Fixed(shape), coupled(law), lines.IMAGES, law)
    expected = lines.reference("sampled", 4, 4)
    assert [codes for _, codes in sorted(drawn(images).items())] == expected
    assert passes.captured > 1


METHODS = {
    "ar": method_of(1.0, 0, 1.0, 3.0),
    "eagle": method_of(1.0, 0, 1.0, 3.0, shape=TreeShape(4, 3, 12)),
    "jacobi": method_of(0.0, 0, 1.0, 3.0, drafter="self-draft", shape=TreeShape(9, 3, 20)),
    "hybrid": method_of(1.0, 20, 1.0, 3.0, drafter="hybrid", shape=TreeShape(9, 3, 20)),
}


@pytest.mark.parametrize(
    "name, shift", [("ar", "published"), ("jacobi", "published"), *product(("eagle", "hybrid"), TOKEN_SHIFTS)]
)
def test_models(name: str, shift: str, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model asked for graphs draws what it draws without, whatever its drafter reads."""
    monkeypatch.setattr("models.model.CudaRecorder", Machine)
    model = replace(load("emoji", str(tiny_checkpoint), None, "fp32", "cpu", True), token_shift=shift)
    openings = [model.encode(text) for text in ("sun", "red heart", "pizza")]
    requests = [Request(str(n), opening, n) for n, opening in enumerate(openings)]
    found = []
    for graphs in (True, False):
        arm = build(replace(model, graphs=graphs), METHODS[name], 2, max(o.length for o in openings))
        assert isinstance(arm.target.passes, Replays) == graphs
        found.append([(i.name, i.codes, i.drafter_calls) for i in arm.decode(requests)])
    assert found[0] == found[1]


def launches(arm: Decoder, request: Request, machine: Machine) -> int:
    """Operators between the second and the third target pass of an image, when all that recurs was seen."""
    warm_up(arm, request)
    counts, forward = list[int](), arm.target.forward
    with Launches(machine) as seen:

        def watched(*given: object) -> object:
            counts.append(seen.count)
            return forward(*given)

        arm.target.forward = watched
        list(arm.decode([request]))
    return counts[2] - counts[1]


LEFT = {"ar": 20, "eagle": 55, "jacobi": 35, "hybrid": 55}


@pytest.mark.parametrize("name", LEFT)
def test_a_cycle_is_few_launches(name: str, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the recordings, and far more without any."""
    machine, found = Machine(), []
    monkeypatch.setattr("models.model.CudaRecorder", lambda: machine)
    model = load("emoji", str(tiny_checkpoint), None, "fp32", "cpu", True)
    request = Request("0", model.encode("sun"), 3)
    for graphs in (True, False):
        arm = build(replace(model, graphs=graphs), METHODS[name], 1, request.prompt.length)
        found.append(launches(arm, request, machine))
    assert found[0] <= LEFT[name] <= found[1] / 4


@pytest.mark.parametrize("name", ["ar", "eagle", "jacobi"])  # a hybrid learns: its shapes are never all seen
def test_stopwatches_stay_outside(name: str, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile of captured work runs the recordings there are."""
    monkeypatch.setattr("models.model.CudaRecorder", Machine)
    model = replace(load("emoji", str(tiny_checkpoint), None, "fp32", "cpu", True), graphs=True)
    requests = [Request("0", model.encode("sun"), 3)]
    arm = build(model, METHODS[name], 1, requests[0].prompt.length)
    warm_up(arm, requests[0])
    codes = next(arm.decode(requests)).codes
    before = arm.target.passes.captured
    shares = profile(arm, requests)
    assert arm.target.passes.captured == before and min(shares["target"], shares["verify"]) > 0
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3) and next(arm.decode(requests)).codes == codes


def test_sizes() -> None:
    passes = Replays(Machine(), 1024)
    counts = (1, 2, 8, 9, 35, 59, 64, 65, 128, 129)
    assert [passes.nodes(n) for n in counts] == [1, 8, 8, 16, 64, 64, 64, 128, 128, 192]
    assert [passes.reach(n) for n in (0, 1, 256, 257, 1000, 1024)] == [0, 256, 256, 512, 1024, 1024]


@dataclass(frozen=True)
class Doubling:
    """A pass."""

    by: Tensor

    def __call__(self, more: int, x: Tensor) -> Tensor:
        """more times the input, by what lies in place."""
        return more * x * self.by

    def __hash__(self) -> int:
        return id(self)


def test_results_are_the_callers() -> None:
    """Replays of one recording, of another shape and number, and after a change of what is read in place."""
    passes, by = Replays(Machine(), 1), torch.tensor(2.0)
    double = Doubling(by)
    one, two = passes(double, (1,), torch.ones(3)), passes(double, (1,), torch.full((3,), 5.0))
    assert (one.tolist(), two.tolist()) == ([2.0] * 3, [10.0] * 3)
    assert passes(double, (3,), torch.ones(3)).tolist() == [6.0] * 3
    assert passes(double, (1,), torch.ones(4)).tolist() == [2.0] * 4
    by.fill_(7.0)
    assert passes(double, (1,), torch.ones(3)).tolist() == [7.0] * 3
    assert passes.captured == 3


def test_a_change_runs_once_a_call() -> None:
    """As it is, when it is captured, and in replays; a pass is rehearsed, so it must not change anything."""
    passes, total = Replays(Machine(), 1), torch.zeros(2)

    def add(by: int, more: tuple[Tensor, None]) -> Tensor:
        return total.add_(by * more[0]) + 0

    changed = [passes.change(add, (2,), (torch.full((2,), float(n)), None)) for n in range(6)]
    assert [x.tolist() for x in changed] == [[float(n * (n + 1))] * 2 for n in range(6)]
    assert passes.captured == 1
    passes(add, (3,), (torch.ones(2), None))
    assert total.tolist() == [30.0 + 3 * (WARM_UPS + 1)] * 2


def test_the_tape_shows_what_a_graph_breaks() -> None:
    """What Python keeps of a captured function is that of the capture, in memory that others use."""
    passes, kept = Replays(Machine(), 1), []

    def count(x: Tensor) -> Tensor:
        kept.append(x + len(kept))
        return kept[-1] + 0

    assert [passes.change(count, (), torch.ones(1)).item() for _ in range(5)] == [1, 2, 2, 2, 2]
    assert len(kept) == WARM_UPS + 1 and kept[-1].item() == 2
    passes(Doubling(torch.tensor(2.0)), (1,), torch.ones(1))
    assert kept[-1].item() == SPOILT
    with pytest.raises(RuntimeError, match="read in a capture"):
        passes(lambda x: x * x.item(), (), torch.ones(1))


def test_recordings_have_a_bound() -> None:
    passes, double = Replays(Machine(), 1), Doubling(torch.tensor(2.0))
    for more in range(MOST + 5):
        assert passes(double, (more,), torch.ones(1)).tolist() == [2.0 * more]
    for _ in range(WARM_UPS + 2):
        assert passes.change(double, (0,), torch.ones(2)).tolist() == [0.0, 0.0]
    assert passes.captured == MOST
