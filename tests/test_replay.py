# ruff: noqa: F811  (fixtures of the other file)
"""Replay: a dump played again gives the live run's cycles, other arms theirs, and errors are one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from adt_tree.policy import SELF_DRAFTED, AdaptConstants
from eval import replay_options
from eval.dumped import RecordedTarget, read_dumps
from eval.oracle import cheapest_way
from eval.outputs import RunFolder
from eval.parser import Parser
from tests.test_cli import generate, one_line, record, run  # noqa: F401

Run = Callable[..., tuple[int, str, str]]
SMALL = "--drafter_type eagle --depth 3 --draft_top_k 2 --total_token 7"
AS_SMALL = "--policies fixed --depth 3 --draft_top_k 2 --budgets 6"
JACOBI = f"{SMALL} --drafter_type jacobi"
ADT = "--drafter_type eagle --peanut --adt_depth_max 4 --total_token 9"


@pytest.fixture
def replay(run: Run, tmp_path: Path) -> Run:
    """replay of a folder: (status, the JSON document, stderr)."""

    def call(folder: str, *words: str) -> tuple[int, Any, str]:
        status, out, err = run("replay", str(tmp_path / folder), *words, "--output_dir", str(tmp_path / "r"))
        return status, json.loads(out.splitlines()[-1]) if status == 0 else None, err

    return call


def live(folder: Path) -> tuple[list[tuple[int, ...]], dict[str, float]]:
    """Cycles of a run without their clocks, by image; and what its rows would say."""
    (path,) = folder.glob("global_statistics_*.json")
    images = json.loads(path.read_text()).values()
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    cycles = [tuple(s[k] for k in ("position", "depth", "width", "nodes", "accepted")) for s in lines]
    calls = sum(image["target_calls"] for image in images)
    return cycles, {
        "tau": round(sum(s["accepted"] + 1 for s in lines) / calls, 4),
        "mean_depth": round(sum(s["depth"] for s in lines) / calls, 3),
        "mean_nodes": round(sum(s["nodes"] for s in lines) / calls, 3),
        "drafter_calls": round(sum(image["drafter_calls"] for image in images) / len(images), 2),
    }


def matches(row: dict[str, Any], expected: dict[str, float]) -> bool:
    """Whether a row of a replay says what the run said."""
    return all(row[name] == value for name, value in expected.items())


ARMS = {  # drafter and tree of a run -> how replay is asked for the same arm
    "eagle fixed": (SMALL, AS_SMALL),
    "eagle adt": (ADT, "--policies adjacent --adt_depth_max 4 --budgets 8"),
    "jacobi fixed": (
        f"{SMALL} --drafter_type jacobi",
        "--policies fixed --depth 3 --draft_top_k 2 --budgets 6",
    ),
    "jacobi adt": (f"{ADT} --drafter_type jacobi", "--policies adjacent --adt_depth_max 4 --budgets 8"),
    "hybrid fixed": (
        f"{SMALL} --drafter_type hybrid",
        "--policies fixed --depth 3 --draft_top_k 2 --budgets 6",
    ),
    "hybrid adt": (f"{ADT} --drafter_type hybrid", "--policies adjacent --adt_depth_max 4 --budgets 8"),
}


LAWS = ("--temperature 0", "--cfg 1", "--top_k 20 --top_p 0.8", "--batch_size 3")
CASES = [(arm, "") for arm in ARMS] + [(arm, law) for arm in ("eagle fixed", "hybrid adt") for law in LAWS]


@pytest.mark.parametrize(("arm", "law"), CASES)
def test_the_recorded_arm_is_replayed_exactly(
    generate: Run,
    replay: Run,
    tmp_path: Path,
    arm: str,
    law: str,
) -> None:
    words, same = ARMS[arm]
    assert generate("d", *words.split(), *law.split(), "--dump", "9")[0] == 0
    proposer = arm.split()[0]
    status, result, err = replay("d", "--proposers", proposer, *same.split(), "--no-oracle")
    assert status == 0, err
    (row,) = result["results"]
    assert row["exact"] and matches(row, live(tmp_path / "d")[1]), (row, live(tmp_path / "d")[1])


def test_only_what_the_run_vouches_for_is_exact(
    generate: Run, replay: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Another network unmarks every row that runs it, and another cycle of a replayed image its own arm's."""
    shutil.copytree(tiny_checkpoint / "drafter", tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    noise = torch.Generator().manual_seed(3)
    weights = {name: torch.randn(x.shape, generator=noise).to(x.dtype) for name, x in weights.items()}
    save_file(weights, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    made, asked = ARMS["hybrid fixed"]
    assert generate("d", *made.split(), "--dump", "9")[0] == 0

    def marks(*words: str) -> dict[str, bool]:
        grid = "--oracle_depths 3 --oracle_widths 2"
        status, result, err = replay("d", *asked.split(), *grid.split(), *words)
        assert status == 0, err
        return {f"{row['proposer']} {row['policy']}": row["exact"] for row in result["results"]}

    right = {"eagle fixed": True, "jacobi fixed": False, "hybrid fixed": True}
    right |= {"eagle oracle": True, "jacobi oracle": False}
    assert marks() == marks("--num_images", "2") == right
    assert not any(marks("--drafter_path", str(tmp_path / "other")).values())
    path = tmp_path / "d" / "steps.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["nodes"] += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert marks("--num_images", "2") == right
    assert marks() == {**right, "hybrid fixed": False}


@pytest.mark.parametrize("policy", ["adjacent", "prior"])
def test_adaptive_rows_bear_their_policy(generate: Run, replay: Run, tmp_path: Path, policy: str) -> None:
    words = [*ADT.split(), "--adt_policy", policy]
    assert generate("d", *words, "--dump", "9")[0] == 0
    asked = "--adt_depth_max 4 --budgets 8 --no-oracle --policies fixed prior adjacent"
    status, result, err = replay("d", *asked.split())
    assert status == 0, err
    rows = {row["policy"]: row for row in result["results"]}
    assert list(rows) == ["fixed", "prior", "adjacent"] and result["recorded"]["policy"] == policy
    expected = live(tmp_path / "d")[1]
    assert matches(rows[policy], expected)
    assert not matches(rows["fixed"], expected)


def test_costs_are_those_of_the_prior_policy() -> None:
    """A level is a drafter pass, or, self-drafted, a node of the target's pass."""
    for words, level, node in (
        ([], AdaptConstants().level_cost, SELF_DRAFTED.level_cost),
        (["--level_cost", "0.2", "--node_cost", "0"], 0.2, 0),
    ):
        parser = Parser("replay", "")
        replay_options.add_arguments(parser)
        args = replay_options.with_defaults(parser.with_config(["d", *words]))
        assert (args.level_cost, args.node_cost) == (level, node)


def test_control_other_laws_ahead_are_noticed(
    generate: Run,
    replay: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above fails where self-drafting is shown other laws than it saw."""
    words, same = ARMS["jacobi fixed"]
    assert generate("d", *words.split(), "--dump", "9")[0] == 0

    def one_code(
        self: RecordedTarget, _: object, known: object, at: torch.Tensor, __: object
    ) -> torch.Tensor:
        return (1e3 * torch.eye(self.num_codes)[0]).repeat(len(at), 1)

    monkeypatch.setattr(RecordedTarget, "_ahead", one_code)
    _, result, _ = replay("d", "--proposers", "jacobi", *same.split())
    assert not matches(result["results"][0], live(tmp_path / "d")[1])


@pytest.mark.parametrize("recorded", ["--drafter_type jacobi", "--static_tree"])
def test_eagle_is_replayed_exactly_whoever_drafted(
    generate: Run,
    replay: Run,
    tmp_path: Path,
    recorded: str,
) -> None:
    assert generate("d", *recorded.split(), "--dump", "9")[0] == 0
    assert generate("fixed", *SMALL.split())[0] == 0
    assert generate("adt", *ADT.split())[0] == 0
    words = "--policies fixed adjacent --depth 3 --draft_top_k 2 --budgets 6 8 --adt_depth_max 4"
    words += " --proposers eagle --no-oracle"
    status, result, err = replay("d", *words.split())
    assert status == 0, err
    rows = {(row["policy"], row["budget"]): row for row in result["results"]}
    assert len(rows) == 4 and all(row["exact"] for row in rows.values())
    assert matches(rows["fixed", 6], live(tmp_path / "fixed")[1])
    assert matches(rows["adjacent", 8], live(tmp_path / "adt")[1])


def test_a_dump_changes_no_image_and_survives_resumption(
    generate: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [*SMALL.split(), "--drafter_type", "hybrid"]
    assert generate("plain", *words)[0] == 0
    assert generate("d", *words, "--dump", "2")[0] == 0
    assert record(tmp_path / "d") == record(tmp_path / "plain")
    dumps = sorted((tmp_path / "d" / "dump").iterdir())
    assert [path.name for path in dumps] == ["0.safetensors", "1.safetensors"]
    whole = load_file(dumps[1])
    dumps[1].unlink()
    status, out, _ = generate("d", *words, "--dump", "3")
    assert status == 0 and json.loads(out.splitlines()[-1])["skipped"] == 3
    assert len(list((tmp_path / "d" / "dump").iterdir())) == 3
    assert {name: tensor.shape for name, tensor in load_file(dumps[1]).items()}.keys() == whole.keys()
    assert len(live(tmp_path / "d")[0]) == sum(
        entry["target_calls"] for entry in record(tmp_path / "d")[0].values()
    )


def test_dumps_of_two_windows_keep_the_order_of_the_prompts(generate: Run, tmp_path: Path) -> None:
    """As they are numbered, and with no other fact but the name and the seed."""
    for first in (2, 0):
        window = ["--start_idx", str(first), "--end_idx", str(first + 2)]
        assert generate("d", *SMALL.split(), *window, "--dump", "9")[0] == 0
    dumps = read_dumps(tmp_path / "d", torch.device("cpu"))
    assert [(dump.name, dump.number) for dump in dumps] == [(str(row), row) for row in range(4)]
    with safe_open(tmp_path / "d" / "dump" / "0.safetensors", framework="pt") as file:
        assert file.metadata().keys() == {"name", "seed", "number"}


def test_a_full_disk_leaves_no_finished_image_without_its_dump(
    generate: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "dump", lambda folder, name: tmp_path / "nowhere" / name)
        assert generate("d", "--dump", "2")[0] == 2
    assert not list((tmp_path / "d").glob("global_statistics_*")) and not list(
        (tmp_path / "d" / "img").iterdir()
    )


@pytest.mark.parametrize(("made", "asked"), [(SMALL, "eagle --level_cost 0.2"), (JACOBI, "jacobi")])
def test_the_oracle_bounds_every_shape_of_its_grid(generate: Run, replay: Run, made: str, asked: str) -> None:
    assert generate("d", *made.split(), "--dump", "9")[0] == 0
    words = "--policies fixed --depth 1 3 --draft_top_k 2 4 --budgets 2 12"
    grid = "--oracle_depths 1 3 --oracle_widths 2 4"
    costs = f"--node_cost 0.05 --proposers {asked}"
    status, result, err = replay("d", *words.split(), *grid.split(), *costs.split())
    assert status == 0, err
    *fixed, best = result["results"]
    assert best["policy"] == "oracle" and len(fixed) == 8
    assert best["SR"] > max(row["SR"] for row in fixed)


@pytest.mark.parametrize(
    ("made", "asked"),
    [
        (SMALL, "--proposers eagle --budgets 6 --oracle_depths 3 --oracle_widths 2 --level_cost 0"),
        (JACOBI, "--proposers jacobi --budgets 6 --oracle_depths 3 --oracle_widths 2"),
    ],
)
def test_the_oracle_sees_the_tree_that_would_have_grown(
    generate: Run, tmp_path: Path, replay: Run, monkeypatch: pytest.MonkeyPatch, made: str, asked: str
) -> None:
    """At every root the live run visited, what was accepted there and how many nodes were drafted."""
    tables: list[tuple[torch.Tensor, torch.Tensor]] = []

    def listen(accepted: torch.Tensor, costs: torch.Tensor) -> list[tuple[int, int]]:
        tables.append((accepted, costs))
        return cheapest_way(accepted, costs)

    monkeypatch.setattr("eval.oracle.cheapest_way", listen)
    assert generate("d", *made.split(), "--dump", "9", "--batch_size", "2")[0] == 0
    assert replay("d", *asked.split(), "--policies", "fixed", "--node_cost", "1")[0] == 0
    steps = [json.loads(line) for line in (tmp_path / "d" / "steps.jsonl").read_text().splitlines()]
    assert len(tables) == 5 and steps
    for step in steps:
        accepted, costs = tables[int(step["name"])]
        root = step["position"] - 1
        assert (int(accepted[root, 1]), float(costs[root, 1])) == (step["accepted"], 1 + step["nodes"])


def test_the_cheapest_way() -> None:
    """Root 1 is worth reaching: from there one cycle ends the image; greedy acceptance would pass it by."""
    accepted = torch.tensor([[0, 1], [0, 2], [0, 0], [0, 0]])
    costs = torch.tensor([[1.0, 1.0], [1.0, 1.5], [1.0, 1.0], [1.0, 1.0]])
    assert cheapest_way(accepted, costs) == [(0, 0), (1, 1)]
    assert cheapest_way(accepted, costs + torch.tensor([0.0, 9.0])) == [(0, 0), (1, 0), (2, 0), (3, 0)]


@pytest.mark.parametrize(
    ("made", "asked", "says"),
    [
        (SMALL, "", "--dump N"),
        (f"{SMALL} --dump 1", "--proposers jacobi", "--proposers jacobi"),
        (f"{SMALL} --dump 1 --drafter_type jacobi", "--proposers jacobi --draft_top_k 17", "at most 16"),
        ("--static_tree --verify rejection --dump 1", "", "exact rule"),
        (f"{SMALL} --dump 1", "--drafter_path nowhere", "nowhere"),
        (f"{SMALL} --dump 1", "--adt_depth_min 9", "adt depth"),
    ],
)
def test_what_the_user_can_put_right_is_one_line(
    generate: Run,
    replay: Run,
    made: str,
    asked: str,
    says: str,
) -> None:
    assert generate("d", *made.split())[0] == 0
    status, _, err = replay("d", *asked.split())
    assert status == 2 and says in one_line(err)


def test_damage_and_strangers_are_named(generate: Run, replay: Run, tmp_path: Path) -> None:
    assert "nowhere" in one_line(replay("nowhere")[2])
    assert generate("d", *SMALL.split(), "--dump", "1", "--num_images", "1")[0] == 0
    (dump,) = (tmp_path / "d" / "dump").iterdir()
    tensors, raw = load_file(dump), dump.read_bytes()
    dump.write_bytes(raw[:-10])
    assert "0.safetensors is damaged" in one_line(replay("d")[2])
    save_file(tensors, dump)
    assert "0.safetensors is damaged" in one_line(replay("d")[2])
    dump.write_bytes(raw)
    path = tmp_path / "d" / "generation_configs.json"
    stored = json.loads(path.read_text())
    path.write_text(
        json.dumps({**stored, "determines_images": {**stored["determines_images"], "weights": "x"}})
    )
    assert "dumped with the weights x" in one_line(replay("d")[2])
    path.write_text("[]")
    assert "not of generate_images" in one_line(replay("d")[2])


@pytest.mark.parametrize("choices", ["mc_sim_7b_63", "chain"])
def test_rules(generate: Run, replay: Run, choices: str) -> None:
    """The rule's exact expectation against what the run counted, and every row."""
    words = f"--static_tree --tree_choices {choices} --verify rejection --batch_size 2 --dump 9"
    assert generate("d", *words.split())[0] == 0
    status, result, err = replay("d", "--rules")
    assert status == 0, err
    rows = {(row["tree"], row["rule"]): row for row in result["results"]}
    trees = dict.fromkeys((choices, "chain"))
    assert {tree for tree, _ in rows} == set(trees)
    for tree in trees:
        assert (
            rows[tree, "block" if tree == "chain" else "traversal"]["tau"]
            > 1
            < rows[tree, "rejection"]["tau"]
        )
        assert rows[tree, "coupled"]["tau"] >= 1 and rows[tree, "coupled"]["over_coupled"] == 0
    counted, meant = rows[choices, "as run"], rows[choices, "rejection"]
    assert abs(counted["tau"] - meant["tau"]) < 4 * counted["tau_se"]
    assert {row["cycles"] for row in rows.values() if row["rule"] != "coupled"} == {counted["cycles"]}
    if choices != "chain":
        assert rows[choices, "rejection"]["tau"] > rows["chain", "rejection"]["tau"]


@pytest.mark.parametrize(
    ("made", "asked", "says"),
    [
        (SMALL, "--rules", "dynamic"),
        ("--static_tree --verify rejection", "--rules --budgets 4", "--budgets"),
        ("--static_tree --verify rejection", "", "or add --rules"),
        ("--static_tree --verify rejection", "--rules --budgets 8 16 32 64 128", "--budgets 8 16 32"),
        (SMALL, "--policies fixed --adt_beta 0.4", "--adt_beta 0.4: no chosen arm uses it"),
        (SMALL, "--policies fixed adjacent --adt_level_cost 0.1", "add one that does: eagle prior"),
        (SMALL, "--policies prior --adt_beta 0.9", "add one that does: eagle adjacent"),
        (SMALL, "--policies prior --depth 3", "add one that does: eagle fixed"),
        (SMALL, "--adt_policy prior", "choose --policies prior"),
        (SMALL, "--seed_cells left", "--seed_cells"),
        (SMALL, "--no-oracle --oracle_depths 1 2 3 4 5 6 8 12 16", "add one that does: eagle oracle"),
        (JACOBI, "--proposers jacobi --drafter_path D", "--drafter_path D: no chosen arm uses it"),
        (JACOBI, "--proposers jacobi --level_cost 0.06", "--level_cost 0.06: no chosen arm uses it"),
        (JACOBI, "--proposers hybrid --oracle", "add one that does: eagle oracle, jacobi oracle"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    generate: Run, replay: Run, made: str, asked: str, says: str
) -> None:
    assert generate("d", *made.split(), "--dump", "1", "--num_images", "1")[0] == 0
    status, _, err = replay("d", *asked.split())
    assert status == 2 and says in one_line(err)


@pytest.mark.parametrize("words", ["--lantern", "--verify rejection", "--model_type base"])
def test_runs_that_cannot_be_replayed_leave_no_dump(generate: Run, words: str) -> None:
    status, _, err = generate("d", *words.split(), "--dump", "1")
    assert status == 2 and "--dump 1" in one_line(err)
