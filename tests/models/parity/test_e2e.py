"""Parity with the released decoders of Anole and LlamaGen: greedy tokens and accept lengths, with several
images in flight."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from adt_tree.batch import BatchSlots
from adt_tree.decode import autoregressive, finished, speculative
from adt_tree.grid import Grid
from adt_tree.lantern import Relaxation
from adt_tree.noise import Noise
from adt_tree.noise_table import NoiseTable
from adt_tree.policy import Fixed, TreeShape
from adt_tree.proposers.eagle import EagleProposer, Growth, grow_dynamic
from adt_tree.records import Decoded
from adt_tree.roles import Request
from adt_tree.settings import Sampling
from adt_tree.static_trees import STATIC_TREES
from adt_tree.tree import Topology
from adt_tree.verify import Coupled, GreedyRelaxed, Rule
from models.cell_tokens import CellIds
from models.decoder.packed import pack
from models.drafter import DrafterNet, EagleDrafter
from models.target import ARTarget, Prompt
from tests.support.decoding import static_growth
from tests.support.golden import FIRST_CODE, UNCONDITIONAL, Anole, anole, llamagen, tensors

SAMPLING = Sampling(temperature=0.0, guidance=3.0)
LENGTH = 48  # number of compared codes; all recorded ones agree, but fewer keep the test short
SPARE = 6  # further codes, so that the end of the image cuts no compared tree
TREES = ("dynamic", "naive_extend_57", "mc_sim_7b_63")
DELTA = {"exact": None, "lantern_k10_d0p3": 0.3, "lantern_k10_d2p0": 2.0}
LLAMAGEN = [(tree, mode, 16, LENGTH) for tree in TREES for mode in DELTA]
LLAMAGEN += [(tree, "exact", 32, LENGTH) for tree in TREES[:2]]
LLAMAGEN += [("dynamic", "exact", 16, 256)]  # whole images
# The number of a run's prompt, and whether its padding attends to the text.
RUNS = {"prompt0.pad_any": (0, False), "prompt1.pad_bf16": (1, False), "prompt1.pad_fp32": (1, True)}


def decode(
    target: ARTarget, net: DrafterNet, tree: str, mode: str, nearest: Tensor, images: list[Request]
) -> Iterator[Decoded]:
    """Decodes with the released settings: 58 drafted nodes, 5 levels, width 10, or a static tree; exact or
    relaxed."""
    growth: Growth = grow_dynamic
    shape, order, delta = TreeShape(5, 10, 58), None, DELTA[mode]
    if tree != "dynamic":
        growth, shape = static_growth(tree)
        order = torch.tensor(Topology(STATIC_TREES[tree]).row_order)
    rule: Rule = Coupled(Noise(target.num_codes, silent=True))
    if delta is not None:
        rule = GreedyRelaxed(target.num_codes, Relaxation(nearest, 10, delta), order)
    pack(net)
    proposer = EagleProposer(EagleDrafter(net, target, 5, 10), growth, target.slots, target.run)
    noise = NoiseTable(rule.noise, target, shape.depth + 1)
    slots = BatchSlots(target, noise, [target.release, proposer.release], SAMPLING)
    return finished(speculative(target, proposer, Fixed(shape), rule, slots, images))


def check(image: Decoded, tokens: list[int], lengths: list[int]) -> None:
    """Compares the tokens, and the number of accepted codes of each step that ends before a tree is cut."""
    assert image.codes[: len(tokens)] == tokens
    end = min(len(tokens), len(image.codes) - SPARE)
    whole = [step.accepted for step in image.steps if step.position <= end][: len(lengths)]
    assert whole == lengths[: len(whole)]
    assert sum(whole) + len(whole) >= end - SPARE


@pytest.fixture(scope="module")
def models() -> Anole:
    """Returns the recorded Anole."""
    models = anole()
    models.decoder.cut_head(FIRST_CODE, 8192)
    return models


def anole_target(models: Anole, codes: int) -> ARTarget:
    """Returns a target with room for both prompts and the largest tree."""
    pack(models.decoder)
    ids = CellIds(range(FIRST_CODE, FIRST_CODE + 8192))
    return ARTarget(models.decoder, Grid(codes, 1), ids, 2, 2, 40, 59)


def anole_requests(models: Anole, run: str) -> list[Request]:
    """Returns the recorded prompts of a run, named by their number."""
    recorded = tensors("anole_e2e")
    numbers = [n for n in range(len(models.prompts)) if f"prompt{n}.{run}" in recorded]
    return [Request(str(n), Prompt(models.prompts[n], UNCONDITIONAL), 0) for n in numbers]


@pytest.mark.parametrize("mode", DELTA)
@pytest.mark.parametrize("tree", TREES)
def test_anole(models: Anole, tree: str, mode: str) -> None:
    expected, target = tensors("anole_e2e"), anole_target(models, LENGTH + SPARE)
    requests = anole_requests(models, f"{tree}.{mode}.tokens")
    images = list(decode(target, models.net, tree, mode, models.nearest, requests))
    assert len(images) == len(requests) > 0
    for image in images:
        key = f"prompt{image.name}.{tree}.{mode}"
        tokens, lengths = (expected[f"{key}.{part}"].tolist() for part in ("tokens", "accept_lengths"))
        check(image, tokens[:LENGTH], lengths)


def test_greedy_tokens_of_the_ar_baseline(models: Anole) -> None:
    requests = anole_requests(models, "base_greedy_tokens")
    target = anole_target(models, LENGTH)
    noise = NoiseTable(Noise(8192, silent=True), target, 1)
    slots = BatchSlots(target, noise, [target.release], SAMPLING)
    for image in finished(autoregressive(target, slots, requests)):
        expected = tensors("anole_e2e")[f"prompt{image.name}.base_greedy_tokens"]
        assert image.codes == expected[:LENGTH].tolist()


@pytest.mark.parametrize(("tree", "mode", "side", "length"), LLAMAGEN)
def test_llamagen(tree: str, mode: str, side: int, length: int) -> None:
    """Three images are in flight: one of a long prompt, and two of a padded prompt, under each rule of
    padding. The long prompt is also decoded with the larger raster of the second stage."""
    model, recorded = llamagen("t2i", side), tensors("llamagen/e2e")
    runs = RUNS if side == 16 else {"stage2.prompt0.pad_any": (0, False)}
    images = [Request(run, model.prompts(attends)[n], 0) for run, (n, attends) in runs.items()]
    target = model.target(len(images), 59, min(length + SPARE, side * side))
    decoded = list(decode(target, model.drafter_net(), tree, mode, recorded["nearest"].long(), images))
    assert len(decoded) == len(images)
    for image in decoded:
        key = f"{image.name}.{tree}.{mode}"
        tokens, lengths = (recorded[f"{key}.{part}"].tolist() for part in ("tokens", "accept_lengths"))
        check(image, tokens[:length], lengths)
