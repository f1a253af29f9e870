"""Parity with the drafters of Anole and LlamaGen: features, guided logits and trees of recorded steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from adt_tree.grid import Grid
from adt_tree.policy import TreeShape
from adt_tree.proposers.eagle import DraftState, grow_dynamic
from adt_tree.roles import Drafter, Prefix
from adt_tree.sampling import Sampling, guide, log_probs
from adt_tree.static_trees import STATIC_TREES
from adt_tree.tree import BatchShapes, DraftTree, StaticTree
from models.drafter import EagleDrafter
from models.target import ARTarget, Prompt
from tests.decoding import static_growth
from tests.golden import FIRST_CODE, UNCONDITIONAL, Anole, anole, close, llamagen, tensors

SHAPE = TreeShape(5, 10, 58)
SAMPLING = Sampling(temperature=0.0, guidance=3.0)
ONE = torch.ones(1, dtype=torch.int64)


def cycles(file: str, run: str) -> list[dict[str, Tensor]]:
    """The recorded cycles of a run, keys shortened."""
    found: list[dict[str, Tensor]] = []
    recorded = tensors(file)
    while True:
        start = f"{run}.cycle{len(found)}."
        cycle = {name[len(start) :]: value for name, value in recorded.items() if name.startswith(start)}
        if not cycle:
            return found
        found.append(cycle)


def grow(tree: str, drafter: Drafter, logits: Tensor, feature: Tensor, root: Tensor) -> DraftTree:
    """The tree below root [1], without noise."""
    growth = grow_dynamic if tree == "dynamic" else static_growth(tree)[0]
    silent = torch.zeros(1, SHAPE.depth + 1, logits.shape[-1])
    shapes = BatchShapes.of([SHAPE], root.device)
    return growth(drafter, SAMPLING, DraftState(log_probs(logits, SAMPLING), feature, root, shapes, silent))


def check_tree(tree: str, drafted: DraftTree, cycle: dict[str, Tensor], first: int) -> None:
    """The released tree node for node; no scores tie in what is recorded. first: the token id of code 0."""
    if tree == "dynamic":
        assert drafted.codes[0].tolist() == (cycle["tree_tokens"] - first).tolist()
        assert drafted.parents[0].tolist() == cycle["tree_parents"].clamp_min(0).tolist()
        assert bool(drafted.valid.all())
        return
    static, table = StaticTree(STATIC_TREES[tree]), cycle["topk_table"].long() - first
    expanded = [node for level in static.levels for node in level]
    places = list(zip(static.parents, static.ranks, strict=True))[1:]
    expected = [int(table[expanded.index(parent), rank]) for parent, rank in places]
    assert drafted.codes[0, 1:].tolist() == expected


@dataclass
class Recorder:
    """A drafter that keeps what went through expand."""

    drafter: EagleDrafter
    levels: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def expand(self, codes: Tensor, features: Tensor, ancestors: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """As Drafter.expand."""
        logits, hidden = self.drafter.expand(codes, features, ancestors, depth)
        self.levels.append((codes[0], hidden[:, 0]))
        return logits, hidden


@pytest.fixture(scope="module")
def models() -> Anole:
    """The recorded Anole."""
    return anole()


@pytest.mark.parametrize("prompt", [0, 1])
def test_prefix_features_of_anole(models: Anole, prompt: int) -> None:
    """Every row of the prompt, both branches, in one causal pass."""
    cycle = cycles("anole_drafter_expected", f"prompt{prompt}.dynamic")[0]
    for row, length in enumerate((cycle["input_ids"].shape[1] - 1, len(UNCONDITIONAL))):
        tokens = cycle["input_ids"][row, -length:].long()
        got = models.net.causal(tokens[None], cycle["target_hidden"][row, None, -length:])
        close(got[0], cycle["prefix_hidden_out"][row, -length:])


@pytest.mark.parametrize("prompt", [0, 1])
@pytest.mark.parametrize("tree", ["dynamic", "naive_extend_57"])
def test_cycles_of_anole(models: Anole, tree: str, prompt: int) -> None:
    """Features and guided logits at the root, the levels grown below it, and the tree."""
    columns = tensors("anole_drafter_expected")["columns"].long()
    recorded = cycles("anole_drafter_expected", f"prompt{prompt}.{tree}")
    target = ARTarget(models.decoder, Grid(16, 1), FIRST_CODE, 8192, 1, 2, 40, 59)
    drafter, first = EagleDrafter(models.net, target, SHAPE.depth, SHAPE.width), recorded[0]
    features = [first["target_hidden"][0], first["target_hidden"][1, -len(UNCONDITIONAL) :]]
    opening = Prompt(first["input_ids"][0, :-1].tolist(), UNCONDITIONAL)
    drafter.prefill(0, opening, Prefix(torch.empty(0), features))
    committed = 0
    for number, cycle in enumerate(recorded):
        pairs = cycle["target_hidden"].shape[1] if number else 1
        codes = cycle["input_ids"][:1, -pairs:].long() - FIRST_CODE
        hidden = cycle["target_hidden"][:, None, -pairs:]
        logits, feature = drafter.extend(hidden, codes, ONE * pairs, [committed])
        committed += pairs
        close(feature[:, 0], cycle["prefix_hidden_out"][:, -1])
        close(guide(logits, 3.0)[0, columns], cycle["root_cfg_logits_at_columns"])
        recorder = Recorder(drafter)
        drafted = grow(tree, recorder, logits, feature, codes[:, -1])
        for level, (frontier, grown) in enumerate(recorder.levels, start=1):
            assert frontier.tolist() == (cycle[f"level{level}.input_ids"] - FIRST_CODE).tolist()
            close(grown, cycle[f"level{level}.hidden_out"])
        assert len(recorder.levels) == 4
        check_tree(tree, drafted, cycle, FIRST_CODE)
        if tree == "dynamic":
            assert torch.equal(drafted.ancestors[0], cycle["tree_mask"].bool())
            assert drafted.depths[0].tolist() == cycle["tree_position_ids"].tolist()
    assert len(recorded) >= 2


@pytest.mark.parametrize(("prompt", "run"), [(0, "prompt0.pad_any"), (1, "prompt1.pad_bf16")])
def test_prefix_features_of_llamagen(prompt: int, run: str) -> None:
    """All 119 rows of the prompt and the first code: text is not masked, padding neither."""
    model, cycle = llamagen("t2i", 16), cycles("llamagen/drafter_expected", f"{run}.dynamic")[0]
    features = model.target(2, 1).prefill(0, model.prompts()[prompt]).features
    tokens, net = cycle["input_ids"].long()[None, 1:], model.drafter_net()
    for branch, expected in enumerate(cycle["prefix_hidden_out"]):
        close(net.causal(tokens, features[branch][None])[0], expected)


@pytest.mark.parametrize(
    ("prompt", "run", "tree"),
    [
        (0, "prompt0.pad_any", "dynamic"),
        (0, "prompt0.pad_any", "naive_extend_57"),
        (1, "prompt1.pad_bf16", "dynamic"),
    ],
)
def test_cycles_of_llamagen(prompt: int, run: str, tree: str) -> None:
    """Guided logits at the root and the tree below it, cycle after cycle on one cache."""
    model = llamagen("t2i", 16)
    target, encoded, committed = model.target(1, 59), model.prompts()[prompt], 0
    drafter = EagleDrafter(model.drafter_net(), target, SHAPE.depth, SHAPE.width)
    features = target.prefill(0, encoded).features
    drafter.prefill(0, encoded, Prefix(torch.empty(0), features))
    recorded = cycles("llamagen/drafter_expected", f"{run}.{tree}")
    for number, cycle in enumerate(recorded):
        hidden = cycle["target_hidden"] if number else torch.stack([f[-1:] for f in features])
        pairs = hidden.shape[1]
        codes = cycle["input_ids"][None, -pairs:].long()
        logits, feature = drafter.extend(hidden[:, None], codes, ONE * pairs, [committed])
        committed += pairs
        close(guide(logits, 3.0)[0], cycle["root_cfg_logits"])
        check_tree(tree, grow(tree, drafter, logits, feature, codes[:, -1]), cycle, 0)
    assert len(recorded) == (1 if prompt else 3)
