"""Parity with the drafters of Anole and LlamaGen: features, guided logits and trees of recorded steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from adt_tree.grid import Grid
from adt_tree.noise import PositionNoise
from adt_tree.policy import TreeShape
from adt_tree.proposers.eagle import DraftState, grow_dynamic
from adt_tree.roles import Drafter, Prefix
from adt_tree.sampling import PassSampling, guide
from adt_tree.settings import Sampling
from adt_tree.static_trees import STATIC_TREES
from adt_tree.tree import BatchShapes, DraftTree, Topology
from models.cell_tokens import CellIds
from models.decoder.packed import pack
from models.drafter import DrafterNet, EagleDrafter
from models.target import ARTarget, EncodedPrompt, Prompt
from tests.support.decoding import static_growth
from tests.support.golden import FIRST_CODE, UNCONDITIONAL, anole, close, llamagen, tensors

SHAPE = TreeShape(5, 10, 58)
SAMPLING = Sampling(temperature=0.0, guidance=3.0)
ONE = torch.ones(1, dtype=torch.int64)


def cycles(file: str, run: str) -> list[dict[str, Tensor]]:
    """Returns the recorded cycles of a run, with shorter keys."""
    by_number: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors(file).items():
        if name.startswith(f"{run}.cycle"):
            number, key = name.removeprefix(f"{run}.cycle").split(".", maxsplit=1)
            by_number.setdefault(int(number), {})[key] = value
    return [by_number[number] for number in range(len(by_number))]


def grow(tree: str, drafter: Drafter, logits: Tensor, feature: Tensor, root: Tensor) -> DraftTree:
    """Returns the tree below root [1], without noise."""
    growth = grow_dynamic if tree == "dynamic" else static_growth(tree)[0]
    silent = PositionNoise(torch.zeros(1, SHAPE.depth + 1, logits.shape[-1]), None)
    shapes = BatchShapes.of([SHAPE], root.device)
    settings = PassSampling.uniform(SAMPLING, logits.device)
    return growth(drafter, settings, DraftState(logits, feature, root, shapes, silent))


def check_tree(tree: str, drafted: DraftTree, cycle: dict[str, Tensor], first: int) -> None:
    """Compares a tree with the released one node by node, which is possible because no recorded scores tie.
    first: the token id of code 0."""
    if tree == "dynamic":
        assert drafted.codes[0].tolist() == (cycle["tree_tokens"] - first).tolist()
        assert drafted.parents[0].tolist() == cycle["tree_parents"].clamp_min(0).tolist()
        assert bool(drafted.valid.all())
        if "tree_mask" in cycle:
            assert torch.equal(drafted.ancestors[0], cycle["tree_mask"].bool())
            assert drafted.depths[0].tolist() == cycle["tree_position_ids"].tolist()
        return
    static, table = Topology(STATIC_TREES[tree]), cycle["topk_table"].long() - first
    expanded = [node for level in static.levels for node in level]
    places = list(zip(static.parents, static.ranks, strict=True))[1:]
    expected = [int(table[expanded.index(parent), rank]) for parent, rank in places]
    assert drafted.codes[0, 1:].tolist() == expected


@dataclass
class Recorder:
    """A drafter that records the arguments and results of expand()."""

    drafter: EagleDrafter
    levels: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def places(self, depths: Tensor, widths: Sequence[int]) -> Sequence[Any]:
        return self.drafter.places(depths, widths)

    def expand(self, codes: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        logits, hidden = self.drafter.expand(codes, *rest)
        self.levels.append((codes[0], hidden[:, 0]))
        return logits, hidden


@dataclass(frozen=True)
class Recorded:
    """A recorded run, and the state with which its drafter begins."""

    cycles: list[dict[str, Tensor]]
    target: ARTarget
    net: DrafterNet
    prompt: EncodedPrompt
    features: list[Tensor]  # of the prompt, by branch
    first: int  # the token id of code 0
    columns: Tensor  # codes whose logits were recorded


def of_anole(run: str) -> Recorded:
    """Returns a run with the recorded features of its target."""
    models, recorded = anole(), cycles("anole_drafter_expected", run)
    hidden, ids = recorded[0]["target_hidden"], recorded[0]["input_ids"]
    models.decoder.cut_head(FIRST_CODE, 8192)
    pack(models.decoder)
    cells = CellIds(range(FIRST_CODE, FIRST_CODE + 8192))
    target = ARTarget(models.decoder, Grid(16, 1), cells, 1, 2, 40, 59)
    prompt = Prompt(ids[0, :-1].tolist(), UNCONDITIONAL)
    target.prefill({0: prompt})  # the drafter reads as much of its cache as the target's prompt needs
    features = [hidden[0], hidden[1, -len(UNCONDITIONAL) :]]
    columns = tensors("anole_drafter_expected")["columns"].long()
    return Recorded(recorded, target, models.net, prompt, features, FIRST_CODE, columns)


def of_llamagen(run: str) -> Recorded:
    """Returns a run with our target's features of all rows of a prompt, padding included."""
    model, recorded = llamagen("t2i", 16), cycles("llamagen/drafter_expected", run)
    number = int(run.removeprefix("prompt")[0])
    target, prompt = model.target(1, 59), model.prompts()[number]
    features = target.prefill({0: prompt})[0].features
    return Recorded(recorded, target, model.drafter_net(), prompt, features, 0, torch.arange(model.num_codes))


RUNS = [
    (of_anole, "prompt0.dynamic", 3),
    (of_anole, "prompt1.dynamic", 3),
    (of_anole, "prompt0.naive_extend_57", 2),
    (of_anole, "prompt1.naive_extend_57", 2),
    (of_llamagen, "prompt0.pad_any.dynamic", 3),
    (of_llamagen, "prompt0.pad_any.naive_extend_57", 3),
    (of_llamagen, "prompt1.pad_bf16.dynamic", 1),
]


@pytest.mark.parametrize(("read", "run", "count"), RUNS)
def test_cycles(read: Callable[[str], Recorded], run: str, count: int) -> None:
    """Compares the features of the prompt's rows, and then, for every cycle on one cache, the feature and
    guided logits at the root, the levels below it, and the tree."""
    known, tree = read(run), run.split(".")[-1]
    for branch, rows in enumerate(known.features):
        ids = known.cycles[0]["input_ids"].expand(2, -1)[branch, -len(rows) :].long()
        if "prefix_hidden_out" in known.cycles[0]:
            output = known.net.causal(ids[None], rows[None])[0]
            close(output, known.cycles[0]["prefix_hidden_out"][branch, -len(rows) :])
    pack(known.net)
    drafter = EagleDrafter(known.net, known.target, SHAPE.depth, SHAPE.width)
    drafter.prefill(0, known.prompt, Prefix(torch.empty(0), known.features))
    hidden, committed = torch.stack([rows[-1:] for rows in known.features]), 0
    for number, cycle in enumerate(known.cycles):
        hidden = cycle["target_hidden"] if number else hidden
        pairs = hidden.shape[1]
        codes = cycle["input_ids"].expand(2, -1)[:1, -pairs:].long() - known.first
        logits, feature = drafter.extend(hidden[:, None], codes, ONE * pairs, committed)
        committed += pairs
        expected = next(value for name, value in cycle.items() if name.startswith("root_cfg_logits"))
        close(guide(logits, 3.0)[0, known.columns], expected)
        if "prefix_hidden_out" in cycle:
            close(feature[:, 0], cycle["prefix_hidden_out"][:, -1])
        recorder = Recorder(drafter)
        drafted = grow(tree, recorder, logits, feature, codes[:, -1])
        for level, (frontier, grown) in enumerate(recorder.levels, start=1):
            assert frontier.tolist() == (cycle[f"level{level}.input_ids"] - known.first).tolist()
            close(grown, cycle[f"level{level}.hidden_out"])
        assert len(recorder.levels) == 4
        check_tree(tree, drafted, cycle, known.first)
    assert len(known.cycles) == count
