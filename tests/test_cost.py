"""Cost tables: their law, measuring by a clock of our own, what they choose, what they must not change."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import main
from adt_tree.cost import ROUNDS, SIZES, WIDTHS, CostTable, Curve, Offer, Passes, best, measure, offers
from adt_tree.grid import Grid
from adt_tree.passes import DIRECT
from adt_tree.policy import self_drafted
from adt_tree.roles import Prefix, Scored
from adt_tree.sampling import Sampling
from adt_tree.tree import DraftTree
from eval import costs
from eval.families import SHAPE_OF
from models.registry import load
from tests.tiny import tiny_words

LAW = Sampling(1.0, 2000, 1.0, 3.0)
Run = Callable[..., tuple[int, str, str]]


def table(target: float, node: float, images: int = 1) -> CostTable:
    """Passes of `target` ms and `node` ms a node more, whatever the context; a loop that costs nothing."""
    curve = Curve((1, 65), (target, target + 64 * node))
    return CostTable(images, Passes((1, 15), (curve, curve)), Curve((1,), (0.0,)), None)


def test_the_law_between_and_beyond_measured_points() -> None:
    low, high = Curve((1, 4, 8), (10.0, 16.0, 18.0)), Curve((1, 4, 8), (12.0, 20.0, 26.0))
    for size, ms in ((0, 10), (1, 10), (2, 12), (4, 16), (6, 17), (8, 18), (10, 19)):
        assert low.at(size) == pytest.approx(ms)
    passes = Passes((0, 100), (low, high))
    assert passes.at(4, 0) == 16 and passes.at(4, 100) == 20 and passes.at(4, 50) == 18
    assert passes.at(4, 200) == 24 and passes.at(1, -600) == 0
    assert Curve((3,), (5.0,)).at(40) == 5 and Curve((1, 2), (9.0, 1.0)).at(3) == 0
    costs = CostTable(2, passes, Curve((1, 9), (1.0, 3.0)), passes)
    assert costs.cycle(0, 0) == 11 and costs.cycle(3, 100) == 20 + 1.75
    assert costs.drafting(3, 2, 4, 0) == 16 + 3 * 12 and costs.drafting(3, 2, 0, 0) == 0
    with pytest.raises(ValueError, match="no drafter passes"):
        table(1, 1).drafting(3, 2, 1, 0)


@pytest.mark.parametrize(
    ("sizes", "ms"),
    [
        ((), ()), ((2, 1), (1.0, 1.0)), ((1, 1), (1.0, 1.0)), ((1,), (-1.0,)), ((1,), (float("nan"),)),
        ((1, 2), (1.0,)),
    ],
)  # fmt: skip
def test_what_no_measurement_can_be(sizes: tuple[int, ...], ms: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="cost curve"):
        Curve(sizes, ms)


def test_tables_are_read_back_and_damaged_ones_refused() -> None:
    for whole in (table(3, 0.5), replace(table(3, 0.5), drafter=table(1, 2).target)):
        stored = json.loads(json.dumps(whole.as_dict()))
        assert CostTable.from_dict(stored) == whole
    for name in stored:
        with pytest.raises(ValueError, match="not a cost table"):
            CostTable.from_dict({**stored, name: "x"})
        with pytest.raises(ValueError, match="not a cost table"):
            CostTable.from_dict({key: value for key, value in stored.items() if key != name})


def test_the_best_size_is_the_one_of_most_codes_a_millisecond() -> None:
    taus = {4: 2.0, 16: 3.0, 34: 4.0}
    found = {node: best(offers(table(10, node), taus, 8)).nodes for node in (0, 0.1, 0.4, 1, 3)}
    assert found == {0: 34, 0.1: 34, 0.4: 16, 1: 4, 3: 0}
    assert [offer.nodes for offer in offers(table(10, 1), taus, 8)] == [0, 4, 16, 34]
    assert best([Offer(0, 1, 1), Offer(9, 2, 2)]).nodes == 0


def test_chosen_shapes_have_their_budget() -> None:
    assert self_drafted(SHAPE_OF["jacobi"].budget) == SHAPE_OF["jacobi"]
    for nodes in range(1, 100):
        shape = self_drafted(nodes)
        assert 1 <= shape.depth <= nodes == shape.budget
    assert [self_drafted(nodes).depth for nodes in (1, 8, 16, 31, 40, 64)] == [1, 6, 12, 20, 20, 32]


class Clockwork:
    """A target and a drafter whose passes move a clock by a law of their own, and nothing else does."""

    grid, num_codes, slots, device, passes = Grid(4, 4), 16, 2, torch.device("cpu"), DIRECT

    def __init__(self) -> None:
        self.now, self.live, self.features = 0.0, set[int](), torch.zeros(2, 2, 65, 3)

    def prefill(self, slot: int, prompt: Any) -> Prefix:
        """Takes a slot."""
        self.live.add(slot)
        return Prefix(torch.zeros(2, 16), [])

    def forward(self, tree: DraftTree, committed: Sequence[int]) -> Scored:
        """10 ms, 2 a node, 0.5 a code committed."""
        assert len(self.live) == self.slots, "timed with empty slots"
        self.now += 1e-3 * (10 + 2 * tree.nodes + 0.5 * max(committed))
        return Scored(torch.zeros(2, 2, tree.nodes, 16), self.features[:, :, : tree.nodes])

    def release(self, slot: int) -> None:
        """Leaves a slot."""
        self.live.remove(slot)

    def expand(self, codes: Tensor, features: Tensor, ancestors: Tensor, depth: int, reach: int) -> Any:
        """1 ms, 3 a node."""
        assert codes.shape == (2, features.shape[2]) and ancestors.shape[1:] == 2 * codes.shape[1:]
        self.now += 1e-3 * (1 + 3 * codes.shape[1])


def test_measuring_finds_what_passes_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, ticks = Clockwork(), []
    monkeypatch.setattr(time, "perf_counter", lambda: ours.now)
    found = measure(ours, ours, None, LAW, lambda: ticks.append(1))
    assert found.images == 2 and len(ticks) == ROUNDS + 2 and not ours.live
    for nodes in (1, 3, 16, 65, 80):
        for context in (1, 7, 15):
            assert found.target.at(nodes, context) == pytest.approx(10 + 2 * nodes + 0.5 * context)
    assert [found.drafter.at(width, 8) for width in WIDTHS] == pytest.approx([1 + 3 * w for w in WIDTHS])
    assert found.loop.sizes == SIZES and set(found.loop.ms) == {0.0}
    assert measure(ours, None, None, LAW, lambda: None).drafter is None


def test_measuring_a_model_leaves_no_trace(tiny_checkpoint: Path) -> None:
    model = load("emoji", tiny_checkpoint, None, "fp32", "cpu", need_drafter=True)
    prompt, before = model.encode("red heart"), torch.get_rng_state()
    target = model.target(2, LAW, max(SIZES), model.prompt_length(prompt))
    drafter = model.drafter(target, 1, max(WIDTHS))
    found = measure(target, drafter, prompt, LAW, lambda: None)
    assert min(found.loop.ms) > 0 and min(found.drafter.curves[0].ms) > 0
    assert torch.equal(torch.get_rng_state(), before) and not target.cache.length.any()


@pytest.fixture
def generate(
    capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """generate_images on the tiny checkpoint and a cache of its own; the first word is the output folder."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("red heart\npizza\ncat face\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(costs.TAUS, "emoji", {3: 1.5, 12: 2.0})

    def call(folder: str, *words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        fixed = tiny_words(tiny_checkpoint, prompts, heatmaps=0)
        status = main.main(["generate_images", *fixed, "--output_dir", str(tmp_path / folder), *words])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def measured(monkeypatch: pytest.MonkeyPatch, found: CostTable) -> list[int]:
    """Let costs be these; returns the measurements' images in flight as they are made."""
    calls: list[int] = []

    def give(model: Any, sampling: Any, prompt: Any, images: int) -> CostTable:
        calls.append(images)
        return replace(found, images=images)

    monkeypatch.setattr(costs, "_measured", give)
    return calls


AUTO = ("--total_token", "auto")


def test_costs_choose_the_trees_and_never_the_image(
    generate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generate("base", "--model_type", "base")[0] == 0
    wanted = {file.name: file.read_bytes() for file in (tmp_path / "base" / "img").iterdir()}
    calls = []
    for node, nodes, batch in ((0.0, 12, 1), (0.2, 12, 3), (10.0, 0, 1), (1.0, 3, 2)):
        with monkeypatch.context() as patch:
            made = measured(patch, table(10 if node != 1 else 9, node))
            folder = f"o{node}"
            status, out, _ = generate(folder, *AUTO, "--batch_size", str(batch))
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / folder))
        assert status == 0 and f"--total_token auto: {nodes} drafted nodes" in out
        calls.append(made)
        files = {file.name: file.read_bytes() for file in (tmp_path / folder / "img").iterdir()}
        assert files == wanted
        stored = json.loads((tmp_path / folder / costs.CHOICE).read_text())
        assert stored["nodes"] == nodes and stored["batch_size"] == batch
        assert [offer["nodes"] for offer in stored["offers"]] == [0, 3, 12]
        tree = json.loads((tmp_path / folder / "generation_configs.json").read_text())["determines_images"][
            "tree"
        ]
        assert (tree or {"budget": 0})["budget"] == nodes
        for cached in (tmp_path / "cache").rglob("*.json"):
            cached.unlink()
    assert calls == [[1], [3], [1], [2]]


def test_costs_are_measured_once_and_choices_stay_with_their_run(
    generate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = measured(monkeypatch, table(10, 0.0))
    assert generate("a", *AUTO, "--num_images", "1")[0] == 0
    assert generate("b", *AUTO, "--temperature", "1")[0] == 0 and calls == [1]
    (cached,) = (tmp_path / "cache" / "adt-tree" / "costs").iterdir()
    assert generate("c", *AUTO, "--batch_size", "2")[0] == 0 and calls == [1, 2]
    assert generate("d", *AUTO, "--temperature", "0")[0] == 0 and calls == [1, 2, 1]
    for file in cached.parent.iterdir():
        file.unlink()
    calls = measured(monkeypatch, table(10, 10.0))  # now nothing pays, but the run goes on as it began
    status, out, _ = generate("b", *AUTO, "--temperature", "1")
    assert status == 0 and "auto: 12 drafted" in out and not calls
    (tmp_path / "b" / costs.CHOICE).write_text("{")
    status, out, err = generate("b", *AUTO, "--temperature", "1")
    assert (status, out) == (2, "") and costs.CHOICE in err and "delete it" in err and err.count("\n") == 1


def test_bad_cost_files_are_one_line(generate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = measured(monkeypatch, table(10, 0.0))
    assert generate("a", *AUTO)[0] == 0
    (cached,) = (tmp_path / "cache" / "adt-tree" / "costs").iterdir()
    whole = cached.read_text()
    stored = json.loads(whole)
    stored["facts"]["threads"] = 99
    broken = [whole[:40], "[]", "{}", whole.replace('"sizes"', '"siezs"'), json.dumps(stored)]
    for number, text in enumerate(broken):
        cached.write_text(text)
        status, out, err = generate(f"b{number}", *AUTO)
        assert (status, out) == (2, "") and str(cached) in err and "delete it" in err and err.count("\n") == 1
    assert "threads = 99" in err and calls == [1]
    cached.unlink()
    assert generate("b0", *AUTO)[0] == 0 and calls == [1, 1]
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    status, out, err = generate("e", *AUTO)
    assert (status, out) == (2, "") and "XDG_CACHE_HOME" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--drafter_type eagle", "--drafter_type jacobi"), ("--drafter_type hybrid", "give a number"),
        ("--model anole", "give a number"), ("--peanut", "--peanut"), ("--depth 3", "--depth 3"),
        ("--draft_top_k 3", "--draft_top_k 3"), ("--lantern", "--lantern"), ("--dump 1", "--dump 1"),
        ("--static_tree", "--total_token auto"), ("--model_type base", "--total_token auto"),
    ],
)  # fmt: skip
def test_where_sizes_are_not_chosen(generate: Run, tmp_path: Path, words: str, says: str) -> None:
    status, out, err = generate("o", *AUTO, *words.split())
    assert (status, out) == (2, "") and says in err and err.count("\n") == 1
    assert not (tmp_path / "o").exists()
