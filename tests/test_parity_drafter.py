"""Parity with the released drafter: features, guided logits and draft trees of recorded cycles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from adt_tree.eagle import DraftState, StaticGrowth, grow_dynamic
from adt_tree.grid import Grid
from adt_tree.policy import TreeShape
from adt_tree.roles import Drafter, Prefix
from adt_tree.sampling import Sampling, guide, log_probs
from adt_tree.tree import STATIC_TREES, BatchShapes, DraftTree, StaticTree
from models.drafter import EagleDrafter
from models.target import ARTarget, Prompt
from tests.golden import FIRST_CODE, UNCONDITIONAL, Anole, anole, tensors

CODES, SHAPE = 8192, TreeShape(5, 10, 58)
SAMPLING = Sampling(temperature=0.0, guidance=3.0)
ONE = torch.ones(1, dtype=torch.int64)


@pytest.fixture(scope="module")
def models() -> Anole:
    """The recorded models."""
    return anole()


def close(got: Tensor, expected: Tensor) -> None:
    """Within the recorded tolerance."""
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


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


def started(models: Anole, cycle: dict[str, Tensor]) -> EagleDrafter:
    """A drafter that has taken in a recorded prompt."""
    target = ARTarget(models.decoder, Grid(16, 1), FIRST_CODE, CODES, 1, 2, 40, 59)
    drafter = EagleDrafter(models.net, target, SHAPE.depth, SHAPE.width)
    ids = cycle["input_ids"][0].tolist()
    features = [cycle["target_hidden"][0], cycle["target_hidden"][1, -len(UNCONDITIONAL) :]]
    drafter.prefill(0, Prompt(ids[:-1], UNCONDITIONAL), Prefix(torch.empty(0), features))
    return drafter


def extend(
    drafter: EagleDrafter, cycle: dict[str, Tensor], pairs: int, committed: int, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Feed the cycle's new pairs; compare features and guided logits; returns the growth's start."""
    codes = cycle["input_ids"][:1, -pairs:].long() - FIRST_CODE
    hidden = cycle["target_hidden"][:, None, -pairs:]
    logits, feature = drafter.extend(hidden, codes, ONE * pairs, [committed])
    close(feature[:, 0], cycle["prefix_hidden_out"][:, -1])
    close(guide(logits, 3.0)[0, columns], cycle["root_cfg_logits_at_columns"])
    return log_probs(logits, SAMPLING), feature


def cycles(prompt: int, tree: str) -> list[dict[str, Tensor]]:
    """The recorded cycles of a prompt, keys shortened."""
    found: list[dict[str, Tensor]] = []
    recorded = tensors("anole_drafter_expected")
    while True:
        start = f"prompt{prompt}.{tree}.cycle{len(found)}."
        cycle = {name[len(start) :]: value for name, value in recorded.items() if name.startswith(start)}
        if not cycle:
            return found
        found.append(cycle)


def check_levels(recorder: Recorder, cycle: dict[str, Tensor]) -> None:
    """Frontier codes and their features, level by level."""
    for number, (codes, hidden) in enumerate(recorder.levels, start=1):
        assert codes.tolist() == (cycle[f"level{number}.input_ids"] - FIRST_CODE).tolist()
        close(hidden, cycle[f"level{number}.hidden_out"])
    assert len(recorder.levels) == 4


def grow(growth: Any, recorder: Drafter, start: tuple[Tensor, Tensor], cycle: dict[str, Tensor]) -> DraftTree:
    """The tree below the cycle's last code."""
    root = cycle["input_ids"][0, -1:].long() - FIRST_CODE
    silent = torch.zeros(1, SHAPE.depth + 1, CODES)
    shapes = BatchShapes.of([SHAPE], root.device)
    return growth(recorder, SAMPLING, DraftState(*start, root, shapes, silent))


def check_tree(tree: DraftTree, cycle: dict[str, Tensor]) -> None:
    """The released tree node for node; no scores tie in the recorded cycles."""
    codes = (cycle["tree_tokens"] - FIRST_CODE).tolist()
    parents = cycle["tree_parents"].clamp_min(0).tolist()
    assert tree.codes[0].tolist() == codes
    assert tree.parents[0].tolist() == parents
    assert torch.equal(tree.ancestors[0], cycle["tree_mask"].bool())
    assert tree.depths[0].tolist() == cycle["tree_position_ids"].tolist()
    assert bool(tree.valid.all())


@pytest.mark.parametrize("prompt", [0, 1])
def test_prefix_features(models: Anole, prompt: int) -> None:
    """Every row of the prompt, both branches, in one causal pass."""
    cycle = cycles(prompt, "dynamic")[0]
    for row, length in enumerate((cycle["input_ids"].shape[1] - 1, len(UNCONDITIONAL))):
        tokens = cycle["input_ids"][row, -length:].long()
        got = models.net.causal(tokens[None], cycle["target_hidden"][row, None, -length:])
        close(got[0], cycle["prefix_hidden_out"][row, -length:])


@pytest.mark.parametrize("prompt", [0, 1])
@pytest.mark.parametrize("name", ["dynamic", "naive_extend_57"])
def test_cycles(models: Anole, name: str, prompt: int) -> None:
    columns = tensors("anole_drafter_expected")["columns"].long()
    recorded = cycles(prompt, name)
    drafter = started(models, recorded[0])
    static = None if name == "dynamic" else StaticTree(STATIC_TREES[name])
    committed = 0
    for number, cycle in enumerate(recorded):
        pairs = 1 if number == 0 else cycle["target_hidden"].shape[1]
        recorder = Recorder(drafter)
        start = extend(drafter, cycle, pairs, committed, columns)
        committed += pairs
        growth = grow_dynamic if static is None else StaticGrowth(static, False, torch.device("cpu"))
        tree = grow(growth, recorder, start, cycle)
        check_levels(recorder, cycle)
        if static is None:
            check_tree(tree, cycle)
        else:
            table = cycle["topk_table"].long() - FIRST_CODE
            expanded = [node for level in static.levels for node in level]
            below = range(1, len(static.parents))
            expected = [int(table[expanded.index(static.parents[n]), static.ranks[n]]) for n in below]
            assert tree.codes[0, 1:].tolist() == expected
    assert len(recorded) >= 2
