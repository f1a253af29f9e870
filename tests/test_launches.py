"""Counts, on a fake GPU (tests.fake_gpu), what a step launches, how often the host waits for it, and how much
memory it takes. Models have the published dimensions, except for fewer layers.

LAUNCHES holds the launches of a step: 12 to 29 under CUDA graphs, where a replay or a copy counts as one, and
86 to 338 without. A failing test prints the new number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from adt_tree.engine import Engine, build
from adt_tree.grid import Grid
from adt_tree.method import LANTERN_SUFFIX, METHODS, Lantern, Method
from adt_tree.records import Decoded
from adt_tree.roles import Request
from adt_tree.sampling import Sampling
from eval import random_model
from models import footprint
from models.decoder.config import DecoderConfig
from models.footprint import Dimensions
from models.layouts import glm_image
from models.layouts.llamagen import HEADS
from models.model import Model
from models.registry import PUBLISHED, spec_of
from models.target import ARTarget
from tests.fake_gpu import GPU, Device, Script, fake_gpu, unfilled

LAYERS = 2  # of a decoder; under graphs a pass is one launch with any number of layers
STEPS = 8  # consecutive steps that are counted; they cross the end of a row
TOLERANCE = 2  # launches by which a step may differ from the stored number
CLASSES = "llamagen_c2i"  # LlamaGen's class-conditional 3B, whose heads have 100 numbers
SOUND = "llamagen ar eager sampled 1"  # the case that the controls spoil
# Launches of a step by case: family, method, rule if it is not the coupled one, mode, temperature, images.
LAUNCHES = {
    "anole eagle-1 rejection graphs sampled 4": 25,
    "lumina_mgpt eagle-2 graphs greedy 1": 29,
    "llamagen self-draft-lantern graphs greedy 4": 16,
    "llamagen2 adt-tree graphs sampled 1": 25,
    "janus_pro ar graphs sampled 4": 12,
    "emu3 adt-self-draft eager sampled 1": 323,
    "llamagen_c2i self-draft eager greedy 4": 293,
    "glm_image adt-self-draft-lantern eager sampled 1": 338,
    "simplear self-draft graphs sampled 4": 18,
    "liquid ar eager greedy 1": 85,
    SOUND: 86,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One run: a family and method, with or without graphs, and the number of images in flight."""

    family: str
    method: Method
    graphs: bool
    batch: int


def case_of(name: str) -> Case:
    """Returns the case of a key of LAUNCHES."""
    family, label, *rule, mode, kind, batch = name.split()
    spec = spec_of("llamagen" if family == CLASSES else family)
    sampling = Sampling(0.0 if kind == "greedy" else 1.0, spec.top_k, 1.0, spec.guidance)
    plain = label.removesuffix(LANTERN_SUFFIX)
    lantern, verify = (Lantern() if plain != label else None), (rule or ["coupled"])[0]
    method = Method(plain, sampling, spec.default_tree(plain), lantern=lantern, verify=verify)
    return Case(family, method, mode == "graphs", int(batch))


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The counts of one step."""

    operators: Counter[str]  # launches by operator
    reads: int  # times that the host waited
    faults: Counter[str]


@dataclass(frozen=True, slots=True)
class CaseCounts:
    """The counts of STEPS steps of a case, with the peak of memory."""

    steps: list[StepCounts]
    recordings: int
    peak: int  # bytes
    expected: int  # bytes by models.footprint

    @property
    def operators(self) -> Counter[str]:
        """Returns the launches by operator of the step with the most launches."""
        return max((step.operators for step in self.steps), key=Counter.total)

    @property
    def launches(self) -> int:
        """Returns the number of launches of the step with the most."""
        return self.operators.total()

    @property
    def reads(self) -> list[int]:
        """Returns, for every step, how often the host waited."""
        return [step.reads for step in self.steps]

    def problems(self, recorded: int) -> list[str]:
        """Returns a line for everything that would fail, be slow or take another amount of memory on a GPU.
        recorded: the expected number of launches of a step."""
        problems = sorted({fault for step in self.steps for fault in step.faults})
        if set(self.reads) != {1}:
            problems.append(f"reads {self.reads}")
        if abs(self.launches - recorded) > TOLERANCE:
            problems.append(f"launches {self.launches} for {recorded}")
        if self.peak > self.expected + footprint.LIBRARIES:
            problems.append(f"bytes {self.peak} for {self.expected}")
        return problems


def use_of(case: Case) -> Dimensions:
    """Returns the published dimensions with fewer layers."""
    classes = case.family == CLASSES
    name = "llamagen" if classes else case.family
    # The codec takes long to build, and its memory is not counted.
    with patch.object(footprint, "spec_of", lambda name: replace(spec_of(name), codec=None)):
        dims = footprint.published_dimensions(name, "bf16", case.batch)
    if classes:  # 384 px
        width, side = 3200, 24
        shape = DecoderConfig(
            dims.codes, width, 8704, LAYERS, HEADS[width], raster_side=side,
            raster_start=1, max_positions=1 + side * side + 4096,
        )  # fmt: skip
        dims = replace(dims, decoder=shape, drafter=None, side=16 * side, tokens=side * side, prompt=1)
    decoder = replace(dims.decoder, num_layers=LAYERS)
    if not case.method.spec.network:
        drafter = None
    else:  # where none is published: one layer of the target, as training makes it
        drafter = dims.drafter or replace(decoder, num_layers=1, head_width=0)
    return replace(dims, decoder=decoder, drafter=drafter)


def grid_of(family: str, dims: Dimensions) -> Grid:
    """Returns the rasters of a square image."""
    if family == "glm_image":
        return glm_image.grid_of(dims.side, dims.side)
    return Grid(dims.columns, dims.columns)


def model_of(case: Case, dims: Dimensions) -> Model:
    """Returns a model whose weights have no values."""
    name = "llamagen" if case.family == CLASSES else case.family
    with patch.object(random_model, "_filled", unfilled):
        model = random_model.random_model(name, dims, grid_of(name, dims), torch.bfloat16, GPU)
    return replace(model, graphs=case.graphs)


def count(case: Case) -> CaseCounts:
    """Runs the steps of a case and returns their counts. Under graphs they run twice: the first run makes the
    recordings, and the steps of the second are counted. The peak of memory is that of both runs."""
    dims, checked = use_of(case), list[Dimensions]()
    with (
        fake_gpu() as (device, script),
        patch("models.model.check_room", lambda dims, *_: checked.append(dims)),
    ):
        model = model_of(case, dims)
        requests = [Request(str(n), model.encode(str(dims.prompt)), 1 + n) for n in range(case.batch)]
        engine = build(model, case.method, case.batch, dims.prompt)
        device.memory.peak = device.memory.now  # without the memory that making LANTERN's tables took
        for _ in range(1 + case.graphs):
            steps = list(run(engine, requests, device, script))
        codec = model.codec.parameters() if model.codec else [model.codebook]
        peak = device.memory.peak - sum(tensor.nbytes for tensor in codec)
    weights, decoding = footprint.parts(dims), footprint.decoding_parts(checked[0])
    expected = weights["target"] + weights["drafter"] + sum(decoding.values()) - decoding["pixels"]
    return CaseCounts(steps, device.recordings, peak, expected)


def run(engine: Engine, requests: list[Request], device: Device, script: Script) -> Iterator[StepCounts]:
    """Runs the step that prefills, which is not counted, and yields the counts of each of the STEPS steps
    after it. Images begin near their end, where contexts are longest, and the steps cross the end of a
    row."""
    grid = engine.target.grid
    start, script.steps = grid.size - 2 * grid.width - 4, 0

    def begun(name: str, seed: int, codes: list[int]) -> Decoded:
        return Decoded(name, seed, codes * (start + int(name)))

    with patch("adt_tree.batch.Decoded", begun):
        steps = engine.steps(requests)
        next(steps)
        for _ in range(STEPS):
            device.forget()
            next(steps)
            yield StepCounts(device.operators.copy(), device.reads, device.faults.copy())
        steps.close()


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_step_launches_reads_and_holds_what_it_should(name: str) -> None:
    assert count(case_of(name)).problems(LAUNCHES[name]) == []


def test_every_kind_of_case_occurs() -> None:
    words = {word.removesuffix(LANTERN_SUFFIX) for name in LAUNCHES for word in name.split()}
    assert {name for name, row in METHODS.items() if not row.rival} < words
    assert {"eager", "graphs", "greedy", "sampled", "1", "4", "rejection", *PUBLISHED} < words
    assert any(LANTERN_SUFFIX in name for name in LAUNCHES)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda verdict: verdict.count.max().item(), "reads [2, 2,"),
        (lambda verdict: torch.zeros(3), "zeros on cpu"),
        (lambda verdict: torch.tensor([1], device=verdict.count.device), "copy from pageable memory"),
        (lambda verdict: [verdict.count + 1 for _ in range(TOLERANCE + 1)], "launches "),
    ],
)
def test_a_fault_in_every_commit_is_seen(
    fault: Callable[[Any], object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = ARTarget.commit

    def faulty(target: Any, tree: Any, verdict: Any) -> None:
        commit(target, tree, verdict)
        fault(verdict)

    monkeypatch.setattr(ARTarget, "commit", faulty)
    assert words in "; ".join(count(case_of(SOUND)).problems(LAUNCHES[SOUND]))
