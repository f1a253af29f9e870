"""On a fake GPU a step launches few kernels, waits for the device once, and takes no more memory than
computed. Models have the published dimensions, except for fewer layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from adt_tree.engine import Engine, build
from adt_tree.grid import Grid
from adt_tree.method import LANTERN_SUFFIX, METHODS, Method
from adt_tree.noise_table import BLOCK
from adt_tree.roles import Request
from adt_tree.settings import Lantern, Sampling
from eval import random_model
from lab.methods import RIVALS
from models import footprint
from models.decoder.attention import memory_efficient
from models.decoder.transformer import join
from models.footprint import Dimensions
from models.layouts import emu3, glm_image
from models.model import Model
from models.registry import spec_of
from models.target import ARTarget
from tests.support.fake_gpu import GPU, Device, Script, fake_gpu, unfilled

LAYERS = 2  # of a decoder; under graphs a pass is one launch with any number of layers
STEPS = 5  # consecutive steps that are counted; they cross the end of a row
# The most launches of a step: under graphs, where a replay or a copy counts as one, and without.
MOST = {"graphs": 10, "eager": 1200}
TRIED = ("sjd-pac", "gsd")  # rivals, whose windows are those of the others
SOUND = "llamagen ar eager sampled 1"  # the case that the control spoils
# Cases: family, method, rule if it is not the coupled one, mode, temperature, images.
CASES = [
    "anole eagle-1 rejection graphs sampled 4", "lumina_mgpt eagle-2 graphs greedy 1",
    "llamagen self-draft-lantern graphs greedy 4", "llamagen2 adt-tree graphs sampled 1",
    "janus_pro ar graphs sampled 4", "emu3 adt-self-draft eager sampled 1",
    "glm_image adt-self-draft-lantern eager sampled 1", "simplear self-draft graphs sampled 4",
    "liquid ar eager greedy 1", "lumina_mgpt eagle-2-lantern rejection eager sampled 2", SOUND,
    "llamagen zipar graphs sampled 2",
    *(f"llamagen {name} eager sampled 2" for name in METHODS if METHODS[name] not in RIVALS or name in TRIED),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One run: a family and method, with or without graphs, and the number of images in flight."""

    family: str
    method: Method
    graphs: bool
    batch: int


def case_of(name: str) -> Case:
    """Returns one of CASES."""
    family, label, *rule, mode, kind, batch = name.split()
    spec = spec_of(family)
    sampling = Sampling(0.0 if kind == "greedy" else 1.0, spec.top_k, 1.0, spec.guidance)
    plain = label.removesuffix(LANTERN_SUFFIX)
    lantern, verify = (Lantern() if plain != label else None), (rule or ["coupled"])[0]
    method = Method(plain, sampling, spec.default_tree(plain), lantern=lantern, verify=verify)
    return Case(family, method, mode == "graphs", int(batch))


def use_of(case: Case) -> Dimensions:
    """Returns the published dimensions with fewer layers."""
    # The codec takes long to build, and its memory is not counted.
    with patch.object(emu3, "vqvae", None):
        dims = footprint.published_dimensions(case.family, "bf16", case.batch)
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
    grid = grid_of(case.family, dims)
    with patch.object(random_model, "_filled", unfilled):
        model = random_model.random_model(case.family, dims, grid, torch.bfloat16, GPU)
    return replace(model, graphs=case.graphs)


def problems(case: Case) -> list[str]:
    """Returns a line for everything in STEPS steps of a case that would fail, be slow or take more memory
    than computed on a GPU.

    Under graphs the steps run twice: the first run makes the recordings, and the steps of the second are
    counted. The peak of memory is that of both runs.
    """
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
            counts = list(run(engine, requests, device, script))
        codec = model.codec.parameters() if isinstance(model.codec, nn.Module) else [model.codebook]
        peak = device.memory.peak - sum(tensor.nbytes for tensor in codec)
    weights, decoding = footprint.parts(dims), footprint.decoding_parts(checked[0])
    expected = weights["target"] + weights["drafter"] + sum(decoding.values()) - decoding["pixels"]
    launches, reads, faults = zip(*counts, strict=True)
    found = sorted(set().union(*faults))
    if set(reads) != {1}:
        found.append(f"reads {reads}")
    most = MOST["graphs" if case.graphs else "eager"]
    if max(launches) > most:
        found.append(f"launches {max(launches)}, more than {most}")
    if peak > expected + footprint.LIBRARIES:
        found.append(f"bytes {peak} for {expected}")
    return found


def run(
    engine: Engine, requests: list[Request], device: Device, script: Script
) -> Iterator[tuple[int, int, set[str]]]:
    """Runs the step that prefills, which is not counted. Yields the launches, waits and faults of each of the
    STEPS steps after it. These are near the ends of the images, where contexts are longest, and cross the end
    of a row."""
    grid, slots, steps = engine.target.grid, engine.loop.args[-1], engine.steps(requests)
    start, script.steps = grid.size - 2 * grid.width - 4, 0
    next(steps)
    slots._cells = [start + n for n in range(len(requests))]
    slots.noise._done = [max(done, start // BLOCK * BLOCK) for done in slots.noise._done]
    next(steps)  # this step computes the noise of the next BLOCK codes
    for _ in range(STEPS):
        device.forget()
        next(steps)
        yield device.launches, device.reads, set(device.faults)
    steps.close()


# What lies between one attention and the next without --compile, and the attention.
JOIN = (
    "linear add rms_norm linear silu mul linear add rms_norm linear {norm} mul addcmul _to_copy cat "
    "index_put_"
)
ATTEND = "_scaled_dot_product_efficient_attention"
LAYER = {
    ("anole", 1): (JOIN.format(norm="layer_norm addcmul"), ATTEND),
    ("anole", 32): (JOIN.format(norm="layer_norm addcmul"), ATTEND),
    ("simplear", 1): (JOIN.format(norm=""), ATTEND, "clone"),  # its heads are grouped
    ("simplear", 32): (JOIN.format(norm=""), "clone", ATTEND, "clone"),
}


@pytest.mark.parametrize(("family", "nodes"), LAYER)
def test_the_kernels_of_a_layer(family: str, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.LAYERS", 3)
    case, starts = case_of(f"{family} ar eager sampled 1"), list[int]()
    with fake_gpu() as (device, _), torch.inference_mode():
        target = model_of(case, use_of(case)).target(1, case.method.sampling, nodes, 1)

        def watched(*given: Any) -> tuple[Tensor, ...]:
            starts.append(device.launches)
            return join(*given)

        target.join, target.cache.kernel = watched, memory_efficient
        codes = torch.zeros(1, nodes, dtype=torch.int64, device=GPU)
        target.score(codes, codes, codes[..., None] == codes, (0,))
    assert device.kernels[slice(*starts)] == " ".join(LAYER[family, nodes]).split()


@pytest.mark.parametrize("name", CASES)
def test_a_step_launches_waits_for_and_holds_little(name: str) -> None:
    assert problems(case_of(name)) == []


def test_faults_in_every_commit_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = ARTarget.commit

    def faulty(target: Any, tree: Any, verdict: Any) -> None:
        commit(target, tree, verdict)
        verdict.count.max().item(), torch.zeros(3), torch.tensor([1], device=verdict.count.device)
        verdict.count[0] = 1
        verdict.codes[[0]], torch.randperm(3, device=verdict.count.device)
        for _ in range(MOST["eager"]):
            verdict.count + 1

    monkeypatch.setattr(ARTarget, "commit", faulty)
    found = "; ".join(problems(case_of(SOUND)))
    seen = (
        "reads (2, 2,",
        "zeros on cpu",
        "copy from",
        "__setitem__ from",
        "__getitem__ from",
        "randperm waits",
    )
    assert all(words in found for words in (*seen, "launches ")), found
