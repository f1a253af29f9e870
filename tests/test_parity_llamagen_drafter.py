"""Parity with the released LlamaGen drafter and decoder: features, trees, greedy tokens, accept lengths."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from adt_tree.decode import speculative
from adt_tree.eagle import DraftState, EagleProposer, StaticGrowth, grow_dynamic
from adt_tree.method import row_order
from adt_tree.noise import Noise
from adt_tree.policy import Fixed, TreeShape
from adt_tree.records import Decoded
from adt_tree.relax import Relaxation
from adt_tree.roles import Prefix, Request
from adt_tree.sampling import Sampling, guide, log_probs
from adt_tree.tree import STATIC_TREES, BatchShapes, StaticTree
from adt_tree.verify import Coupled, GreedyRelaxed
from models.drafter import EagleDrafter
from tests.golden import LlamaGen, close, llamagen, tensors

CODES, SHAPE = 256, TreeShape(5, 10, 58)
SAMPLING = Sampling(temperature=0.0, guidance=3.0)
ONE = torch.ones(1, dtype=torch.int64)
SPARE = 6  # codes behind the recorded ones, so that no tree that is compared is cut
DELTA = {"exact": None, "lantern_k10_d0p3": 0.3, "lantern_k10_d2p0": 2.0}
RUNS = {"prompt0.pad_any": (0, False), "prompt1.pad_bf16": (1, False), "prompt1.pad_fp32": (1, True)}


@pytest.fixture(scope="module")
def model() -> LlamaGen:
    """The recorded target, stage 1."""
    return llamagen("t2i", 16)


def cycles(name: str) -> list[dict[str, Tensor]]:
    """The recorded cycles of a run, keys shortened."""
    recorded, found = tensors("llamagen/drafter_expected"), []
    while True:
        start = f"{name}.cycle{len(found)}."
        cycle = {key[len(start) :]: value for key, value in recorded.items() if key.startswith(start)}
        if not cycle:
            return found
        found.append(cycle)


@pytest.mark.parametrize(
    ("prompt", "name"), [(0, "prompt0.pad_any.dynamic"), (1, "prompt1.pad_bf16.dynamic")]
)
def test_prefix_features(model: LlamaGen, prompt: int, name: str) -> None:
    """All 119 rows of the prompt and the first code: text is not masked, padding neither."""
    features = model.target(2, 1).prefill(0, model.openings()[prompt]).features
    tokens = cycles(name)[0]["input_ids"].long()[None, 1:]
    net = model.drafter_net()
    for branch, expected in enumerate(cycles(name)[0]["prefix_hidden_out"]):
        close(net.causal(tokens, features[branch][None])[0], expected)


@pytest.mark.parametrize(
    ("prompt", "run", "tree"),
    [
        (0, "prompt0.pad_any", "dynamic"),
        (0, "prompt0.pad_any", "naive_extend_57"),
        (1, "prompt1.pad_bf16", "dynamic"),
    ],
)
def test_cycles(model: LlamaGen, prompt: int, run: str, tree: str) -> None:
    """Guided logits at the root and the tree below it, cycle after cycle on one cache."""
    target = model.target(1, 59)
    opening = model.openings()[prompt]
    drafter = EagleDrafter(model.drafter_net(), target, SHAPE.depth, SHAPE.width)
    features = target.prefill(0, opening).features
    drafter.prefill(0, opening, Prefix(torch.empty(0), features))
    static = None if tree == "dynamic" else StaticTree(STATIC_TREES[tree])
    growth = grow_dynamic if static is None else StaticGrowth(static, False, torch.device("cpu"))
    shapes, committed = BatchShapes.of([SHAPE], torch.device("cpu")), 0
    recorded = cycles(f"{run}.{tree}")
    for number, cycle in enumerate(recorded):
        hidden = cycle["target_hidden"] if number else torch.stack([f[-1:] for f in features])
        pairs = hidden.shape[1]
        codes = cycle["input_ids"][None, -pairs:].long()
        logits, feature = drafter.extend(hidden[:, None], codes, ONE * pairs, [committed])
        committed += pairs
        close(guide(logits, 3.0)[0], cycle["root_cfg_logits"])
        silent = torch.zeros(1, SHAPE.depth + 1, CODES)
        state = DraftState(log_probs(logits, SAMPLING), feature, codes[:, -1], shapes, silent)
        drafted = growth(drafter, SAMPLING, state)
        if static is None:
            assert drafted.codes[0].tolist() == cycle["tree_tokens"].tolist()
            assert drafted.parents[0].tolist() == cycle["tree_parents"].clamp_min(0).tolist()
        else:
            expanded = [node for level in static.levels for node in level]
            below = range(1, len(static.parents))
            table = cycle["topk_table"]
            expected = [int(table[expanded.index(static.parents[n]), static.ranks[n]]) for n in below]
            assert drafted.codes[0, 1:].tolist() == expected
    assert len(recorded) == (1 if prompt else 3)


def decode(model: LlamaGen, tree: str, mode: str, images: list[Request], slots: int) -> Iterator[Decoded]:
    """The released settings: 58 drafted nodes, 5 levels, 10 wide; or a static tree."""
    side, recorded = model.decoder.config.raster_side, tensors("llamagen/e2e")
    longest = max(len(value) for key, value in recorded.items() if key.endswith(f".{tree}.{mode}.tokens"))
    target, delta = model.target(slots, 59, min(longest + SPARE, side * side)), DELTA[mode]
    drafter = EagleDrafter(model.drafter_net(), target, 5, 10)
    growth, policy, order = grow_dynamic, Fixed(SHAPE), None
    if tree != "dynamic":
        static = StaticTree(STATIC_TREES[tree])
        growth, order = StaticGrowth(static, False, target.device), row_order(static)
        policy = Fixed(TreeShape(static.depth, static.width, len(static.parents) - 1))
    rule = Coupled(Noise(CODES, silent=True))
    if delta is not None:
        rule = GreedyRelaxed(CODES, Relaxation(recorded["nearest"].long(), 10, delta), order)
    proposer = EagleProposer(drafter, SAMPLING, growth, slots)
    return speculative(target, proposer, policy, rule, images, SAMPLING)


def check(image: Decoded, key: str) -> None:
    """All recorded tokens, and the accepted codes of each cycle that ends before a tree is cut."""
    tokens, lengths = (
        tensors("llamagen/e2e")[f"{key}.{what}"].tolist() for what in ("tokens", "accept_lengths")
    )
    assert image.codes[: len(tokens)] == tokens
    end = min(len(tokens), len(image.codes) - SPARE)
    whole = [step.accepted for step in image.steps if step.position <= end][: len(lengths)]
    assert whole == lengths[: len(whole)]
    assert sum(whole) + len(whole) >= end - SPARE


@pytest.mark.parametrize("mode", DELTA)
@pytest.mark.parametrize("tree", ["dynamic", "naive_extend_57", "mc_sim_7b_63"])
def test_tokens_and_accept_lengths(model: LlamaGen, tree: str, mode: str) -> None:
    """A long prompt, and a padded one by either rule of its padding, three in flight."""
    images = [Request(run, model.openings(ahead)[n], 0) for run, (n, ahead) in RUNS.items()]
    found = list(decode(model, tree, mode, images, 3))
    assert len(found) == 3
    for image in found:
        check(image, f"{image.name}.{tree}.{mode}")


@pytest.mark.parametrize("tree", ["dynamic", "naive_extend_57"])
def test_stage_two(tree: str) -> None:
    """The same weights over 32 x 32 codes."""
    model = llamagen("t2i", 32)
    images = [Request("0", model.openings()[0], 0)]
    for image in decode(model, tree, "exact", images, 1):
        check(image, f"stage2.prompt0.pad_any.{tree}.exact")
