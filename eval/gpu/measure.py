"""The measurements of a GPU check. They run in the process of their part (eval.gpu.part).

A part is a list of items, and an item makes one measurement of one method on one model. Whole images come
first, so that the first image includes everything that a process does once. Profiles come last, because the
profiler leaves hooks behind that slow launches down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import median
from typing import Any

import torch

from adt_tree.batch import StepOutput
from adt_tree.engine import Engine
from adt_tree.engine_cache import free_memory
from adt_tree.errors import UserError
from adt_tree.grid import Grid
from adt_tree.method import METHODS, Method
from adt_tree.pipeline import Pipeline
from adt_tree.policy import TreeShape
from adt_tree.records import tau
from adt_tree.roles import Request
from adt_tree.sampling import Sampling
from eval.gpu import trace
from eval.profile import weights_read
from eval.random_model import middle_rows, random_model
from eval.runs.prompts import BENCH_FILE, make_requests, read_file
from models import footprint
from models.graphs import GraphRunner
from models.loading import pick_precision
from models.model import DTYPES, Model
from models.registry import RANDOM_WEIGHTS, SPECS
from models.spec import TOP_K

EMBEDDED = "emoji"
EXACT = tuple(name for name, spec in METHODS.items() if spec.exact)
MIDDLE = 256  # number of codes, from the middle of an image, on which steps are timed
SHORTER = 7  # by how many tokens the second prompt is shorter than the first
PROFILED = 8  # steps whose launches are counted
SEED = 1

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """One measurement."""

    model: str
    precision: str  # one of models.spec.PRECISIONS
    method: str
    mode: str  # eager, graphs, or compiled, which uses graphs too
    stage: str  # a key of STAGES

    def __str__(self) -> str:
        precision = "" if self.precision == "auto" else f" {self.precision}"
        return f"{self.model}{precision} {self.method}, {self.mode}: {self.stage}"


@dataclass(slots=True)
class Subject:
    """A loaded model, with the prompts that are measured on it."""

    model: Model
    requests: list[Request]  # of whole images; the first two differ in the length of their prompts
    middle: Model | None = None  # the same weights with a small grid: some rows from the middle of an image
    # One request. Its prompt is as long as the real prompt and the rows above these together.
    middle_requests: list[Request] = field(default_factory=list)
    weights: Figures = field(default_factory=dict)  # of eval.profile.weights_read
    baseline: dict[str, list[int]] = field(default_factory=dict)  # the AR baseline's codes by image

    def engine(self, item: Item, middle: bool) -> tuple[Engine, list[Request]]:
        """Returns an engine in the mode of the item, and the requests it has room for: whole images, or some
        rows from the middle of one."""
        model, requests = self.model, self.requests
        if middle:
            assert self.middle is not None, "the embedded model is measured on whole images"
            model, requests = self.middle, self.middle_requests
        free_memory(model.device)
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(model.device)
        modes = {"graphs": item.mode != "eager", "compiled": item.mode == "compiled"}
        return Pipeline(replace(model, **modes)).engine(self.method(item), requests), requests

    def method(self, item: Item) -> Method:
        """Returns the method of the item with the family's sampling and tree; self-draft's has 32 nodes."""
        spec = self.model.spec
        sampling = Sampling(1.0, TOP_K if spec.top_k is None else spec.top_k, 1.0, spec.guidance)
        return Method(item.method, sampling, spec.default_tree(item.method))


def items_of(part: str, device: torch.device) -> list[Item]:
    """Returns the items of a part, in the order of measuring. A part is the embedded model, a published
    family, or "compiled", which measures all published families."""
    usual = "graphs" if device.type == "cuda" else "eager"
    if part == EMBEDDED:
        return [
            Item(part, precision, name, usual, "images") for precision in ("fp32", "bf16") for name in EXACT
        ]
    if part == "compiled":
        return [
            Item(family, "auto", name, part, "steps")
            for family in RANDOM_WEIGHTS
            for name in ("ar", "self-draft")
        ]
    names = ["ar", "self-draft", *(["eagle-2"] if footprint.published_use(part).drafter else [])]
    modes = dict.fromkeys((usual, "eager"))
    every = [(part, "auto", name, mode) for mode in modes for name in names]
    return [
        Item(part, "auto", SPECS[part].method, usual, "first images"),
        *(Item(*one, "steps") for one in every),
        *(Item(*one, "launches") for one in every),
    ]


def subject_of(name: str, precision: str, device: torch.device) -> Subject:
    """Loads the embedded model, or makes one of a family's published dimensions with random weights.

    Raises UserError if it does not fit on the device.
    """
    if name == EMBEDDED:
        pipe = Pipeline.from_pretrained(name, device=str(device), precision=precision)
        return Subject(pipe.model, make_requests(pipe, read_file(BENCH_FILE), SEED))
    precision = pick_precision(precision, device.type, SPECS[name])
    use = footprint.published_use(name, precision)
    needed, free = tensor_bytes(replace(use, graphs=device.type == "cuda")), footprint.free_bytes(device)
    if free is not None and needed > free:
        raise UserError(f"it needs {needed / 1e9:.1f} GB, and {device} has {free / 1e9:.1f} GB free")
    side = use.side // use.vq.patch_size
    model = random_model(name, use, Grid(side, side), DTYPES[precision], device)
    grid, middle_length = middle_rows(use, MIDDLE)
    lengths = [use.prompt, max(1, use.prompt - SHORTER)]
    pipe = Pipeline(model)  # the text of a prompt to a random model is its number of tokens
    whole = pipe.requests([str(length) for length in lengths], SEED)
    rows = pipe.requests(str(middle_length), SEED)
    return Subject(model, whole, replace(model, grid=grid), rows, weights_read(model))


def measure(part: str, device: torch.device) -> Iterator[tuple[Item, Figures | Exception]]:
    """Yields every item of a part with its figures, or with its exception, which does not stop later
    items."""
    loaded: tuple[str, str] | None = None
    subject: Subject | Exception = UserError("nothing is loaded")
    for item in items_of(part, device):
        if loaded != (item.model, item.precision):
            loaded, subject = (item.model, item.precision), UserError("nothing is loaded")
            free_memory(device)
            try:
                subject = subject_of(*loaded, device)
            except Exception as error:
                subject = error
        if isinstance(subject, Exception):
            yield item, subject
            continue
        try:
            yield item, {"precision": subject.model.precision} | STAGES[item.stage](subject, item)
        except Exception as error:
            yield item, error


def images(subject: Subject, item: Item) -> Figures:
    """Decodes the prompts of bench and compares the codes with those of the AR baseline, which is the first
    item of its precision."""
    engine, requests = subject.engine(item, middle=False)
    done = list(engine.decode(requests))
    refuse_unrecorded(engine, item)
    codes = {image.name: image.codes for image in done}
    if item.method == "ar":
        subject.baseline = codes
    same = sum(codes[name] == expected for name, expected in subject.baseline.items())
    return {**speed(done[1:]), "images": len(done), "same_image": same / len(done)}


def first_images(subject: Subject, item: Item) -> Figures:
    """Makes two images of published size whose prompts differ in length. The first one's seconds begin before
    memory for decoding is allocated."""
    started, seconds = time.perf_counter(), []
    engine, requests = subject.engine(item, middle=False)
    for image in engine.decode(requests):
        now = time.perf_counter()
        seconds.append(round(now - started, 3))
        started, codes = now, len(image.codes)
    refuse_unrecorded(engine, item)
    first, other = seconds
    return {"first_s": first, "other_s": other, "codes": codes, **peak(subject.model, engine, requests)}


def steps(subject: Subject, item: Item) -> Figures:
    """Times the steps of some rows from the middle of an image, after decoding the same rows once untimed."""
    compiling = compile_seconds() if item.mode == "compiled" else 0
    engine, requests = subject.engine(item, middle=True)
    list(engine.decode(requests))
    figures: Figures = {**subject.weights}
    if item.mode == "compiled":
        figures["compile_s"] = round(compile_seconds() - compiling, 3)
    figures |= speed(list(engine.decode(requests)))
    refuse_unrecorded(engine, item)
    if item.mode == "eager":  # under graphs first_images() has the memory of a whole image
        figures |= peak(subject.model, engine, requests)
    return figures


def launches(subject: Subject, item: Item) -> Figures:
    """Profiles some steps of an image, after decoding it once, so that no graph is recorded in between."""
    engine, requests = subject.engine(item, middle=True)
    list(engine.decode(requests))
    device, coming = subject.model.device, engine.steps(requests)
    first = trace.profiled(lambda: next(coming), device)  # with the prompt
    done: list[StepOutput] = []
    events = trace.profiled(lambda: done.extend(islice(coming, PROFILED)), device)
    figures: Figures = {}
    if device.type == "cuda":
        figures["launches"] = round(trace.launches(events) / len(done), 2)
    if item.mode == "eager":
        figures["attention"] = trace.attention([*first, *events])
    return figures


STAGES: dict[str, Callable[[Subject, Item], Figures]] = {
    "images": images, "first images": first_images, "steps": steps, "launches": launches,
}  # fmt: skip


def speed(done: Sequence[Any]) -> Figures:
    """Returns the median of the milliseconds per step of decoded images, and the codes per target call."""
    every = [step for image in done for step in image.steps]
    return {
        "step_ms": round(median(step.ms for step in every), 4),
        "steps": len(every),
        "tau": round(tau(done), 3),
    }


def peak(model: Model, engine: Engine, requests: Sequence[Request]) -> Figures:
    """Returns the peak of memory since Subject.engine() was called, in bytes, and the estimate of
    models.footprint for the same tensors; on a CPU the estimate alone.

    Both include the weights of decoder and drafter, caches, tables, noise, one step, and under graphs the
    results and the scratch memory of recordings. Neither includes the codec with its codebook, or pixels. The
    measured peak alone includes cuBLAS's workspaces, tens of megabytes.
    """
    method, target = engine.method, engine.target
    nodes = method.tree.num_nodes if isinstance(method.tree, TreeShape) else 1
    longest = max(request.prompt.length for request in requests)
    measured = replace(model, grid=target.grid, graphs=target.few_shapes)
    demand = method.demand(target.num_codes)
    use = measured.use(target.slots, engine.sampling, nodes, longest, demand)
    figures = {"estimate_bytes": tensor_bytes(use, method.spec.network)}
    if model.device.type == "cuda":
        figures["peak_bytes"] = held_bytes(model.device) - model.codebook.nbytes
    return figures


def held_bytes(device: torch.device) -> int:
    """Returns the peak number of bytes of tensors on a CUDA device since the last reset, plus the free bytes
    in the memory pools of graphs, which only other graphs can use."""
    pools = [part for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) != (0, 0)]
    scratch = sum(part["total_size"] - part["allocated_size"] for part in pools)
    return torch.cuda.max_memory_allocated(device) + scratch


def tensor_bytes(use: footprint.Use, drafting: bool = True) -> int:
    """Returns the bytes of the weights and of decoding, without codec and pixels. drafting: whether decoding
    includes the drafter, whose weights count in either case."""
    use = replace(use, side=0)
    weights = footprint.parts(use)
    decoding = footprint.decoding_peak(use if drafting else replace(use, drafter=None))
    return weights["target"] + weights["drafter"] + decoding


def refuse_unrecorded(engine: Engine, item: Item) -> None:
    """Raises RuntimeError if the engine fell back to direct calls, whose time is not that of graphs."""
    run = engine.target.run
    if item.mode != "eager" and isinstance(run, GraphRunner) and not run.captured:
        raise RuntimeError("CUDA graphs could not be recorded; the line above says why")


def compile_seconds() -> float:
    """Returns the seconds that torch.compile has taken in this process."""
    from torch._dynamo.utils import calculate_time_spent  # Importing it takes seconds.

    return calculate_time_spent()["total_wall_time"]
