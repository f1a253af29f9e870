"""Runs every method on a fake GPU (tests.fake_gpu) and counts what a step launches, how often the host waits
for it, and how much memory it takes. Models have the published dimensions, except for fewer layers.

    python -m tests.fake_device --families anole,emu3 --methods ar,self-draft
    python -m tests.fake_device --cross
    python -m tests.fake_device --record

The first prints a line per method, under CUDA graphs. The second runs every method eagerly and under graphs,
greedy and sampled, with one image in flight and with four, and prints a table. The third runs the cases of
tests/test_launches.py and stores their launches.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch

from adt_tree.engine import Engine, build
from adt_tree.grid import Grid
from adt_tree.method import METHODS, Lantern, Method
from adt_tree.records import Decoded
from adt_tree.roles import Request
from adt_tree.sampling import Sampling
from eval import random_model
from eval.tables import markdown
from models import footprint
from models.decoder_config import DecoderConfig
from models.footprint import Dimensions
from models.layouts import glm_image
from models.layouts.llamagen import HEADS
from models.model import Model
from models.registry import PUBLISHED, spec_of
from tests.fake_gpu import GPU, Device, Script, fake_gpu, unfilled

LAYERS = 2  # of a decoder; under graphs a pass is one launch with any number of layers
STEPS = 8  # consecutive steps that are counted; they cross the end of a row
TOLERANCE = 2  # launches by which a step may differ from the recorded number
RECORDED = Path(__file__).parent / "goldens" / "launches.json"  # launches of a step by Case.name
CLASSES = "llamagen_c2i"  # LlamaGen's class-conditional 3B, whose heads have 100 numbers
FAMILIES = (*PUBLISHED, CLASSES)
SOUND = "llamagen ar eager sampled 1"  # the case that the controls of tests/test_launches.py spoil
# Cases in which every family, method, mode, temperature, batch size and rule occurs. Rows of lumina_mgpt and
# emu3 end in separators. stored_cases() adds the families and methods that are newer than this list.
CHOSEN = (
    "anole eagle-1 rejection graphs sampled 4",
    "lumina_mgpt eagle-2 graphs greedy 1",
    "llamagen self-draft-lantern graphs greedy 4",
    "llamagen2 adt-tree graphs sampled 1",
    "janus_pro ar graphs sampled 4",
    "emu3 adt-self-draft eager sampled 1",
    "llamagen_c2i self-draft eager greedy 4",
    "glm_image adt-self-draft-lantern eager sampled 1",
    SOUND,
)


@dataclass(frozen=True, slots=True)
class Case:
    """One run: a family and method, with or without graphs, and the number of images in flight."""

    family: str
    method: Method
    graphs: bool
    batch: int

    @property
    def name(self) -> str:
        """Returns a name without the batch size, on which the number of launches does not depend."""
        mode, kind = "graphs" if self.graphs else "eager", "greedy" if self.method.greedy else "sampled"
        return f"{self.family} {label(self.method)} {mode} {kind}"

    @property
    def usual(self) -> bool:
        """True if it runs without --cross: sampled under graphs, with one image in flight."""
        return self.graphs and not self.method.greedy and self.batch == 1

    def __str__(self) -> str:
        return f"{self.name} {self.batch}"


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

    @property
    def ratio(self) -> float:
        """Returns the peak of memory divided by the expected bytes."""
        return self.peak / self.expected

    def problems(self, recorded: int | None) -> list[str]:
        """Returns a line for everything that would fail, be slow or take another amount of memory on a GPU.
        recorded: the expected number of launches of a step, or None if it is not known."""
        problems = sorted({fault for step in self.steps for fault in step.faults})
        if set(self.reads) != {1}:
            problems.append(f"reads {self.reads}")
        if recorded is not None and abs(self.launches - recorded) > TOLERANCE:
            problems.append(f"launches {self.launches} for {recorded}")
        if self.peak > self.expected + footprint.LIBRARIES:
            problems.append(f"bytes {self.peak} for {self.expected}")
        return problems


def methods(family: str, greedy: bool) -> Iterator[Method]:
    """Yields every method but the rivals, with each rule that it takes, with and without LANTERN. Greedy
    decoding with rejection is left out, because it equals that with the coupled rule."""
    spec = spec_of("llamagen" if family == CLASSES else family)
    top_k = 2000 if spec.top_k is None else spec.top_k
    sampling = Sampling(0.0 if greedy else 1.0, top_k, 1.0, spec.guidance)
    for name, row in METHODS.items():
        if not row.rival:
            exact = Method(name, sampling, spec.default_tree(name))
            rules = ("coupled",) if greedy else row.verify or ("coupled",)
            for verify, lantern in itertools.product(rules, (None, Lantern())):
                if lantern is None or row.lantern:
                    yield replace(exact, verify=verify, lantern=lantern)


def label(method: Method) -> str:
    """Returns the method's name, with LANTERN and rejection if it uses them."""
    return method.label + (" rejection" if method.verify == "rejection" else "")


def cases(family: str) -> Iterator[Case]:
    """Yields all combinations for a family."""
    for graphs, greedy, batch in itertools.product((False, True), (True, False), (1, 4)):
        for method in methods(family, greedy):
            yield Case(family, method, graphs, batch)


def case_of(name: str) -> Case:
    """Returns the case with this name."""
    return next(case for case in cases(name.split()[0]) if str(case) == name)


def stored_cases() -> list[Case]:
    """Returns the cases whose launches are stored: CHOSEN, and the first usual case of every other family and
    method."""
    stored = [case_of(name) for name in CHOSEN]
    for case in itertools.chain.from_iterable(map(cases, FAMILIES)):
        families, names = {other.family for other in stored}, {other.method.name for other in stored}
        if case.usual and (case.family not in families or case.method.name not in names):
            stored.append(case)
    return stored


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


def grid_of(dims: Dimensions) -> Grid:
    """Returns the rasters of a square image. GLM-Image is the only family without a VQ model."""
    if dims.vq is None:
        return glm_image.grid_of(dims.side, dims.side)
    return Grid(dims.side // dims.vq.patch_size, dims.side // dims.vq.patch_size)


def model_of(case: Case, dims: Dimensions) -> Model:
    """Returns a model whose weights have no values."""
    name = "llamagen" if case.family == CLASSES else case.family
    with patch.object(random_model, "_filled", unfilled):
        model = random_model.random_model(name, dims, grid_of(dims), torch.bfloat16, GPU)
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


def recorded() -> dict[str, int]:
    """Returns the recorded launches by Case.name."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def table(results: dict[Case, CaseCounts]) -> str:
    """Returns a Markdown table with a row per method and a column per family. A cell holds the greatest
    number of launches of a step, under graphs and, in brackets, without. The last row holds the peak of
    memory divided by the estimate."""
    families = list(dict.fromkeys(case.family for case in results))
    rows = [["method", *families]]
    for name in dict.fromkeys(label(case.method) for case in results):
        cells = []
        for family in families:
            by_mode = {True: 0, False: 0}
            for case, counts in results.items():
                if (case.family, label(case.method)) == (family, name):
                    by_mode[case.graphs] = max(by_mode[case.graphs], counts.launches)
            cells.append(f"{by_mode[True] or '-'} ({by_mode[False] or '-'})")
        rows.append([name, *cells])
    ratios = [[x.ratio for case, x in results.items() if case.family == family] for family in families]
    rows.append(["peak / estimate", *(f"{min(part):.2f} to {max(part):.2f}" for part in ratios)])
    return markdown(rows)


def chosen(options: argparse.Namespace) -> Iterable[Case]:
    """Yields the cases to run, those of a method together."""
    if options.record:
        yield from stored_cases()
        return
    for family in options.families.split(","):
        for case in sorted(cases(family), key=lambda case: label(case.method)):
            if options.methods and label(case.method) not in options.methods.split(","):
                continue
            if options.cross or case.usual:
                yield case


def main() -> None:
    """Prints a line per case with its problems, then a table. The exit status is 1 if there is any
    problem."""
    parser = argparse.ArgumentParser(description="Counts launches, waits and memory of steps on a fake GPU.")
    parser.add_argument("--families", default=",".join(FAMILIES), help="default: %(default)s")
    parser.add_argument("--methods", help="names as printed, with commas; default: all but the rivals")
    parser.add_argument("--cross", action="store_true", help="all modes, temperatures and batch sizes")
    parser.add_argument("--operators", action="store_true", help="also print the launches by operator")
    parser.add_argument("--record", action="store_true", help="run the stored cases alone; store launches")
    options = parser.parse_args()
    results, known = dict[Case, CaseCounts](), {} if options.record else recorded()
    wrong = 0
    for case in chosen(options):
        counts = results[case] = count(case)
        problems = counts.problems(known.get(case.name))
        wrong += bool(problems)
        launches = f"{counts.launches:5} launches {counts.recordings:3} recordings"
        memory = f"{counts.ratio:6.3f} of the bytes"
        print(f"{case!s:54} {launches} {memory} {'; '.join(problems)}", flush=True)
        if options.operators:
            print("   ", ", ".join(f"{n} {name}" for name, n in counts.operators.items()))
    print(table(results))
    if options.record:
        stored = {case.name: counts.launches for case, counts in results.items()}
        RECORDED.write_text(json.dumps(stored, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
