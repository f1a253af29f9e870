"""Bounds the number of CUDA graphs that one image records, for every family and method. Grids, prompts and
trees have their published sizes; the models are narrow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from adt_tree.batch import BatchSlots, StepOutput
from adt_tree.decode import speculative
from adt_tree.engine import build
from adt_tree.fastest_size import AutoTree
from adt_tree.grid import Grid
from adt_tree.method import METHODS, Method
from adt_tree.policy import TreeShape
from adt_tree.roles import Request
from adt_tree.settings import Sampling
from eval.random_model import random_model
from lab.methods import RIVALS
from models.footprint import MAX_RECORDINGS, Dimensions, published_dimensions
from models.graphs import GraphRunner
from models.registry import PUBLISHED, SPECS

CODES, WIDTH = 32, 8
AUTO = "auto"  # self-draft with --total_token auto
METHOD_NAMES = [*(name for name, row in METHODS.items() if row not in RIVALS), AUTO]
PERIOD = 12  # steps: 12 accept nothing, the next 12 all drafts, the next 12 accept 0, 1, 2, 3, 0, ... drafts


class Recorder:
    """Takes the place of CudaRecorder. It records nothing, and a replay leaves all results as they are."""

    def warm_up(self) -> nullcontext[None]:
        return nullcontext()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


class Acceptance:
    """Decides how many drafts a step accepts, so that trees take many shapes, and counts the steps."""

    def __init__(self) -> None:
        self.steps, self.depth = 0, 0

    def count(self, longest: int) -> int:
        """Returns the number of codes that the next step commits, at most `longest`."""
        accepted = (0, self.depth, self.steps % 4)[self.steps // PERIOD % 3]
        self.steps += 1
        return 1 + min(accepted, self.depth, longest - 1)


def tiny(family: str) -> Dimensions:
    """Returns the dimensions of a family, with a width of 8."""
    dims = published_dimensions(family)
    decoder = replace(
        dims.decoder, vocab_size=2 * CODES, hidden_size=WIDTH, intermediate_size=WIDTH, num_layers=1,
        num_heads=1, num_kv_heads=1, head_width=WIDTH if dims.decoder.head_width else 0, num_codes=CODES,
        rope_sections=(WIDTH // 4, WIDTH // 8, WIDTH // 8) if dims.decoder.rope_sections else (),
    )  # fmt: skip
    drafter = replace(decoder, head_width=0)
    vq = dims.vq and replace(dims.vq, num_embeddings=CODES, base_channels=32)
    return replace(dims, decoder=decoder, drafter=drafter, vq=vq, codes=CODES, codec_parameters=CODES)


def recordings(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns the number of recordings that one image takes."""
    dims, spec, acceptance = tiny(family), SPECS[family], Acceptance()
    model = random_model(family, dims, Grid(dims.columns, dims.columns), torch.float32, torch.device("cpu"))
    monkeypatch.setattr("models.model.CudaRecorder", lambda device: Recorder())
    sampling, row = Sampling(1.0, 0, 1.0, spec.guidance), "self-draft" if name == AUTO else name
    method = Method(row, sampling, spec.default_tree(row, auto=name == AUTO))
    engine = build(replace(model, graphs=True), method, 1, dims.prompt)
    if name == AUTO:  # the sizes and the rule of a GPU
        policy = AutoTree().policy(model.grid, 1, on_gpu=True)
        target, proposer, _, *rest = engine.loop.args
        engine = replace(engine, loop=partial(speculative, target, proposer, policy, *rest))
    run, advance = engine.target.run, BatchSlots.advance
    assert isinstance(run, GraphRunner)

    def watched(
        slots: BatchSlots, tree: Any, verdict: Any, table: Any, shapes: list[TreeShape]
    ) -> StepOutput:
        acceptance.depth, longest = shapes[0].depth, verdict.path.shape[1]
        table = torch.tensor([[acceptance.count(longest), 1, *[0] * (2 * longest)]])
        return advance(slots, tree, verdict, table, shapes)

    monkeypatch.setattr(BatchSlots, "advance", watched)
    (image,) = engine.decode([Request("0", model.encode(str(dims.prompt)), 1)])
    assert len(image.codes) == model.grid.size and len(image.steps) == acceptance.steps
    return run.captured


# All methods for one family, and EAGLE-2 with row ends; the others differ in the size of their grids.
CASES = [(family, "self-draft") for family in PUBLISHED if family != "anole"]
CASES += [("lumina_mgpt", "eagle-2"), *(("anole", name) for name in METHOD_NAMES)]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_an_image_takes_few_recordings(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 3 < recordings(family, name, monkeypatch) <= MAX_RECORDINGS
