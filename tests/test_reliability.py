"""What drafts were said to be worth against what became of them: the record, its errors, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import main
from adt_tree import hybrid as hybrid_module
from adt_tree import jacobi as jacobi_module
from adt_tree import propose as eagle_module
from adt_tree.calibrate import DRAFTER, SEED, STALE
from adt_tree.decode import speculative
from adt_tree.noise import Noise
from adt_tree.policy import AdjacencyAdaptive, Fixed, Policy, TreeShape
from adt_tree.propose import EagleProposer, StaticGrowth, grow_dynamic
from adt_tree.records import Decoded
from adt_tree.roles import Proposer
from adt_tree.stale import KEPT, Candidates, chain_scores, grow_chains
from adt_tree.tree import STATIC_TREES, DraftTree, Pool, StaticTree, ancestor_mask, select
from adt_tree.verify import Coupled, Verdict
from eval.heard import Record, Said, hear
from eval.reliability import Curves, cells_of, curves, errors
from models.drafter import EagleDrafter
from models.target import ARTarget
from tests.test_engine import ADAPT, CODES, GRID, IMAGES, LAWS, make_target, net
from tests.test_jacobi import hybrid, self_drafter

CPU = torch.device("cpu")
SHAPE, WIDE = TreeShape(5, 4, 18), 5


def forks(parents: list[int], images: int = 1) -> DraftTree:
    """Trees of that topology; the last node is padding."""
    above = torch.tensor(parents).expand(images, -1).contiguous()
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    valid = torch.ones_like(above, dtype=torch.bool)
    valid[:, -1] = False
    levels = torch.tensor(depths).expand(images, -1)
    return DraftTree(above, above, levels, ancestor_mask(above, max(depths)), valid, max(depths), 2)


def test_a_record_counts_what_was_reached() -> None:
    """Children 1, 2 of the root; 3, 4 under 1; 5 under 2; 6 is padding. 1 and 4 are accepted."""
    record = Record(ranks=2, depths=2, device=CPU)
    source = torch.tensor([[9, DRAFTER, STALE, SEED, DRAFTER, DRAFTER, 9]])
    rank = torch.tensor([[9, 0, 0, 1, 1, 0, 9]])
    rate = torch.tensor([[float("nan"), 0.9, 0.3, 0.4, 0.06, 0.9, float("nan")]])
    verdict = Verdict(torch.tensor([[0, 1, 4]]), torch.tensor([3]), torch.zeros(1, 3))
    for _ in range(2):
        record.add(forks([0, 0, 0, 1, 1, 2, 0]), verdict, Said(source, rank, rate.log()))
    found = {
        (cell["source"], cell["rank"], cell["depth"], *cell["bin"]): (cell["reached"], cell["accepted"])
        for cell in cells_of(record)
    }
    assert found == {
        ("drafter", 0, 1, 0.8, 0.92): (2, 2),
        ("stale", 0, 1, 0.2, 0.35): (2, 0),
        ("seed", 1, 2, 0.35, 0.5): (2, 0),
        ("drafter", 1, 2, 0.05, 0.1): (2, 2),
    }  # node 5 hangs below a rejected one
    assert [cell["predicted"] for cell in cells_of(record)] == pytest.approx([0.9, 0.06, 0.3, 0.4])


def synthetic(power: float) -> Curves:
    """Lone drafts accepted at a known rate by a source that predicts the rate to some power."""
    images, generator = 40_000, torch.Generator().manual_seed(1)
    record = Record(ranks=1, depths=1, device=CPU)
    rate = torch.rand(images, 3, generator=generator)
    taken = torch.rand(images, generator=generator) < rate[:, 1]
    path = torch.stack((torch.zeros_like(taken), taken), dim=1).long()
    nothing = torch.zeros(images, 3, dtype=torch.int64)
    verdict = Verdict(path, 1 + taken.long(), nothing[:, :2])
    record.add(forks([0, 0, 0], images), verdict, Said(nothing, nothing, power * rate.log()))
    return curves(cells_of(record))


def test_calibrated_predictions_lie_on_the_diagonal_and_others_do_not() -> None:
    for power, least, most in ((1.0, 0.0, 0.01), (0.5, 0.1, 1.0), (2.0, 0.1, 1.0)):
        drawn = synthetic(power)
        points = drawn["drafter"][0]
        assert len(points) == 10 and sum(n for n, _, _ in points) == 40_000
        far = max(abs(said - seen) for n, said, seen in points if n > 300)
        assert (far < 0.05) == (power == 1.0)
        one, whole = errors(drawn)
        assert least <= one["ece"] <= most and {**one, "rank": None} == whole
        assert one["observed"] == pytest.approx(0.5, abs=0.01)


def make(kind: str, target: ARTarget, law: str) -> Proposer:
    """A fresh proposer over the engine tests' networks."""
    if kind == "jacobi":
        return self_drafter(GRID, target.slots, WIDE, "both")
    if kind == "hybrid":
        return hybrid(target, LAWS[law], target.slots, WIDE)
    static = StaticGrowth(StaticTree(STATIC_TREES["naive_extend_57"]), False, CPU)
    growth = static if kind == "static" else grow_dynamic
    return EagleProposer(EagleDrafter(net(), target, 5, WIDE), LAWS[law], growth, target.slots)


def decode(kind: str, law: str, policy: Policy, record: Record | None) -> list[Decoded]:
    """Images, under a record or without; two at a time."""
    target = make_target(2, LAWS[law].branches)
    proposer = make(kind, target, law)
    rule = Coupled(Noise(CODES, silent=LAWS[law].greedy))
    heard = proposer if record is None else hear(proposer, record)
    return list(speculative(target, heard, policy, rule, IMAGES, LAWS[law]))


@pytest.mark.parametrize("law", ["sampled", "greedy", "filtered unguided"])
@pytest.mark.parametrize("shape", ["fixed", "adaptive"])
@pytest.mark.parametrize("kind", ["eagle", "jacobi", "hybrid"])
def test_what_is_recorded_is_what_trees_grew_by(
    kind: str, shape: str, law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Summed along a node's path it is the score of its pool entry, but on the chain that is always kept."""
    pools: list[tuple[Tensor, Tensor]] = []
    compared = 0

    def seen(pool: Pool, budget: Tensor, roots: Tensor, bounds: tuple[int, int, int]) -> DraftTree:
        number = torch.arange(pool.codes.shape[1]).expand_as(pool.codes)
        index = select(replace(pool, codes=number), budget, torch.zeros_like(roots), bounds).codes
        pools.append((pool.scores, index))
        return select(pool, budget, roots, bounds)

    def grown(found: Candidates, gain: Tensor, bins: Tensor | None, limits: Tensor, *rest: Any) -> DraftTree:
        number = torch.arange(gain[0].numel()).view_as(gain[0]).expand_as(gain)
        index = grow_chains(found, gain, number, limits, *rest).bins
        assert index is not None
        pools.append((chain_scores(gain, *limits.unbind(1)[:2]), index))
        return grow_chains(found, gain, bins, limits, *rest)

    monkeypatch.setattr(eagle_module, "select", seen)
    for module in (jacobi_module, hybrid_module):
        monkeypatch.setattr(module, "grow_chains", grown)
    add = Record.add

    def checked(record: Record, tree: DraftTree, verdict: Verdict, said: Said) -> None:
        nonlocal compared
        scores, index = pools[-1]
        total = said.log_rate[:, None].masked_fill(~tree.ancestors, 0.0)[..., 1:].sum(dim=2)
        score = scores.gather(1, index)
        here = tree.valid & (score < KEPT / 2)
        here[:, 0] = False
        torch.testing.assert_close(total[here], score[here], atol=1e-4, rtol=1e-4)
        compared += int(here.sum())
        add(record, tree, verdict, said)

    monkeypatch.setattr(Record, "add", checked)
    policy = Fixed(SHAPE) if shape == "fixed" else AdjacencyAdaptive(ADAPT, 2)
    decode(kind, law, policy, Record(WIDE, 5, CPU))
    assert compared > 100


@pytest.mark.parametrize("kind", ["eagle", "static", "jacobi", "hybrid"])
def test_a_record_changes_nothing_and_counts_every_accepted_draft(kind: str) -> None:
    record = Record(WIDE, 5, CPU)
    images = decode(kind, "sampled", Fixed(SHAPE), record)
    alone = decode(kind, "sampled", Fixed(SHAPE), None)
    for one, other in zip(images, alone, strict=True):
        assert (one.codes, one.drafter_calls) == (other.codes, other.drafter_calls)
        assert [replace(step, ms=0.0) for step in one.steps] == [
            replace(step, ms=0.0) for step in other.steps
        ]
    reached, accepted, said = record.counts.flatten(0, -2).sum(dim=0).tolist()
    assert accepted == sum(step.accepted for image in images for step in image.steps) > 0
    assert accepted < reached and 0 < said < reached
    sources = {cell["source"] for cell in cells_of(record)}
    expected = {"jacobi": {"stale", "seed"}, "hybrid": {"drafter", "stale", "both", "seed"}}
    assert sources <= expected.get(kind, {"drafter"}) and (
        sources - {"drafter"} or kind in ("eagle", "static")
    )


def test_ranks_of_static_trees_are_those_of_their_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, seen = StaticTree(STATIC_TREES["naive_extend_57"]), []
    monkeypatch.setattr(Record, "add", lambda _, tree, verdict, said: seen.append(said.rank))
    decode("static", "sampled", Fixed(TreeShape(tree.depth, tree.width, 57)), Record(WIDE, 5, CPU))
    assert len(seen) > 5
    for rank in seen:
        assert torch.equal(rank[:, 1:], torch.tensor(tree.ranks[1 : rank.shape[1]]).expand(2, -1))


@pytest.fixture
def words(tiny_checkpoint: Path, tmp_path: Path) -> list[str]:
    """The command on the tiny checkpoint."""
    where = ["--model_path", str(tiny_checkpoint), "--output_dir", str(tmp_path / "o")]
    return ["reliability", *where, "--precision", "fp32", "--num_images", "2"]


def test_command(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*words, "--batch_size", "2", "--arms", "eagle1", "jacobi", "hybrid_lantern"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "ECE" in out.splitlines()[0]
    last = json.loads(out.splitlines()[-1])
    stored = json.loads((tmp_path / "o" / "reliability.json").read_text())
    assert list(stored["cells"]) == ["eagle1", "jacobi", "hybrid_lantern"]
    assert stored["errors"] == last["errors"] and last["stored"].endswith("reliability.json")
    for name, cells in stored["cells"].items():
        whole = [row for row in stored["errors"][name] if row["rank"] is None]
        assert sum(row["reached"] for row in whole) == sum(cell["reached"] for cell in cells) > 0
        assert all(0 <= row["ece"] <= 1 for row in stored["errors"][name])
        assert all(cell["bin"][0] - 1e-4 <= cell["predicted"] <= cell["bin"][1] + 1e-4 for cell in cells)
    assert (tmp_path / "o" / "reliability.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--arms ar", "'ar'"),
        ("--arms floor", "'floor'"),
        ("--arms jacobi --verify rejection", "--verify rejection"),
        ("--arms eagle1 --verify rejection", "coupled rule alone"),
        ("--arms eagle2 --adt_beta 0.3", "--adt_beta 0.3"),
        ("--arms eagle2 --lantern_k 4", "--lantern_k 4"),
        ("--arms jacobi --draft_top_k 65", "65 nodes wide"),
        ("--temperatures 1", "--temperature"),
    ],
)
def test_refused_in_one_line(
    words: list[str], more: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([*words, *more.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and len(err.splitlines()) == 1
