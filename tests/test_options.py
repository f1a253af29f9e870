"""Options become one checked method; what cannot be is refused in one line. No model, no torch."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from adt_tree.policy import TreeShape
from eval import (
    bench_options,
    budget_options,
    codebook,
    drafter_options,
    extract_code_options,
    options,
    reliability_options,
    replay_options,
    sweep_options,
    train_data_options,
)
from eval.errors import UserError
from eval.families import FASTEST
from eval.method import Lantern, Method, method_from
from eval.parser import Parser

ROOT = Path(__file__).resolve().parent.parent


def parse(*words: str) -> Method:
    """generate_images' method for a command line."""
    parser = Parser("test", "test")
    options.add_arguments(parser)
    return method_from(parser.with_config(words))


def test_defaults_are_lossless_dynamic_trees() -> None:
    method = parse()
    assert method.shape is not None and method.adapt is None and method.static is None
    assert method.exact and method.drafting and not method.greedy
    assert (method.temperature, method.top_k, method.top_p, method.cfg) == (1.0, 2000, 1.0, 3.0)


def test_total_token_counts_the_root() -> None:
    assert parse("--total_token", "59", "--depth", "4", "--draft_top_k", "10").shape == TreeShape(4, 10, 58)
    assert parse("--drafter_top_k", "3").shape.width == 3
    assert parse("--peanut", "--total_token", "9").adapt.budget == 8
    assert parse("--drafter_type", "jacobi", "--total_token", "17").shape == TreeShape(12, 8, 16)


def test_adaptive_constants_and_their_starts() -> None:
    constants = parse("--peanut", "--adt_depth_max", "3", "--adt_beta", "0.25", "--adt_init", "random").adapt
    assert (constants.depth_max, constants.depth_start, constants.beta, constants.init) == (
        3,
        3,
        0.25,
        "random",
    )


def test_a_bound_below_the_other_takes_it_along() -> None:
    words = ["--peanut", "--drafter_type", "jacobi", "--adt_depth_max", "5"]
    constants = parse(*words).adapt
    assert (constants.depth_min, constants.depth_start, constants.depth_max) == (5, 5, 5)
    with pytest.raises(UserError, match="min 6"):
        parse(*words, "--adt_depth_min", "6")


def test_who_drafts_without_being_told() -> None:
    assert parse().drafter == FASTEST["emoji"] and parse("--peanut").exact
    for words in ("--static_tree", "--verify rejection", "--drafter_path x"):
        assert parse(*words.split()).drafter == "eagle"
    assert parse("--drafter_type", "none") == parse("--model_type", "base")


def test_published_models_have_their_own_trees() -> None:
    anole, lumina = ("--model", "anole"), ("--model", "lumina_mgpt")
    assert parse(*anole).drafter == "eagle" and parse(*anole).shape == TreeShape(5, 10, 58)
    assert parse(*anole, "--static_tree").static == "naive_extend_57"
    assert parse(*anole, "--total_token", "26", "--depth", "3").shape == TreeShape(3, 10, 25)
    assert parse(*anole, "--peanut").adapt.budget == 58
    assert parse(*anole, "--drafter_type", "jacobi") == parse("--drafter_type", "jacobi")
    assert parse(*lumina, "--drafter_path", "x").shape == TreeShape(6, 10, 58)
    assert parse(*lumina).drafter == "jacobi"


def test_switches_of_lumina_mgpt() -> None:
    lumina = ("--model", "lumina_mgpt")
    assert parse(*lumina, "--eagle_version", "1") == parse(*lumina, "--static_tree")
    assert parse(*lumina, "--eagle_version", "2") == parse(*lumina, "--drafter_type", "eagle")
    assert parse(*lumina, "--cfg_mode", "sequential") == parse(*lumina, "--cfg_mode", "parallel")
    for words in ("--eagle_version 2 --static_tree",):
        with pytest.raises(UserError, match=words.split()[0]):
            parse(*lumina, *words.split())


def test_transformers_is_no_reference_for_row_ends() -> None:
    parser = Parser("bench", "")
    bench_options.add_arguments(parser)
    args = parser.with_config(["--model", "lumina_mgpt", "--arms", "jacobi", "--reference", "transformers"])
    with pytest.raises(UserError, match="--reference transformers"):
        bench_options.check_reference(args)


def test_relaxation_is_not_exact_and_greedy_rejection_is() -> None:
    assert parse("--lantern", "--lantern_k", "7").lantern == Lantern(7, 0.1)
    assert not parse("--lantern").exact
    assert not parse("--verify", "rejection").exact
    assert parse("--verify", "rejection", "--temperature", "0").exact


@pytest.mark.parametrize(
    "words",
    [
        "--model nonsense", "--vq_path x", "--model anole --class_labels 1", "--model_type vllm",
        "--grid_search", "--eagle_version 1", "--cfg_mode sequential", "--lantern_k 10",
        "--lantern_delta 0.2",
        "--peanut --static_tree", "--peanut --depth 3", "--adt_beta 0.4", "--adt_init random",
        "--tree_choices chain",
        "--static_tree --total_token 9", "--rules reference",
        "--rules reference --verify rejection --temperature 0",
        "--model_type base --peanut", "--model_type base --lantern", "--model_type base --verify coupled",
        "--model_type base --drafter_path x", "--start_idx 5 --end_idx 5",
        "--adt_depth_min 4 --adt_depth_max 2 --peanut", "--adt_depth_start 90 --peanut",
        "--temperature nan", "--temperature -1", "--top_p 0", "--top_p 1.5", "--top_k -1", "--cfg -2",
        "--num_images 0",
        "--num_images -2", "--slice 5", "--slice 5-5", "--batch_size 0", "--total_token 1", "--depth 0",
        "--tree_choices oak", "--precision int8", "--adt_bet 0.5", "--lanter", "--temp 0",
        "--adt_beta 2 --peanut", "--verify rejection --drafter_type jacobi",
        "--static_tree --drafter_type jacobi", "--static_tree --drafter_type hybrid",
        "--verify rejection --drafter_type hybrid", "--drafter_path x --drafter_type jacobi",
        "--seed_cells left --drafter_type eagle", "--drafter_type none --model_type base",
        "--drafter_type none --peanut", "--drafter_type eagle --model_type base",
        "--drafter_type medusa", "--tokenizer_base_path x", "--drafter_type jacobi --model_type base",
    ],
)  # fmt: skip
def test_refused(words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(*words.split())
    message = str(caught.value)
    assert "\n" not in message and words.split()[0].lstrip("-").split("_")[0][:3] in message


def test_misspelt_option_is_answered_by_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean --adt_beta"):
        parse("--adt_bet", "0.5")


def test_config_file_gives_options_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("temperature: 0.5\npeanut: true\nset_seed: false\nnum_images: -1\nadt_init: vertical\n")
    method = parse("--config", str(file), "--temperature", "0.7")
    assert (method.temperature, method.adapt.init) == (0.7, "vertical")
    file.write_text("lantern: true\n")
    assert parse("--config", str(file), "--no-lantern").lantern is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("temprature: 0\n", "did you mean temperature"),
        ("peanut: 1\n", "true or false"),
        ("top_k: true\n", "a value"),
        ("top_k:\n", "no plain value"),
        ("tree:\n  depth: 3\n", "no plain value"),
        ("- a\n- b\n", "flat"),
        ("a: [\n", "not YAML"),
        ("temperature: warm\n", "not a number"),
        ("config: other.yaml\n", "unknown key"),
    ],
)
def test_bad_config_files(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=says):
        parse("--config", str(file))


def test_missing_config_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        parse("--config", str(tmp_path / "none.yaml"))


def test_shipped_configs_parse() -> None:
    files = [
        path for path in sorted((ROOT / "configs").glob("emoji-*.yaml")) if path.stem != "emoji-drafter"
    ]  # of other models: tests/test_presets.py
    assert files
    methods = {(file.stem.partition("-")[0], repr(parse("--config", str(file)))) for file in files}
    assert len(methods) == len(files)


def test_every_option_states_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    for module in (
        options,
        bench_options,
        sweep_options,
        reliability_options,
        budget_options,
        replay_options,
        train_data_options,
        extract_code_options,
        drafter_options,
        codebook,
    ):
        parser = Parser("test", "test")
        module.add_arguments(parser)
        text = parser.format_help()
        assert "default: None" not in text
        for action in parser._actions:
            assert action.help, action.dest


def test_bench_arms() -> None:
    parser = Parser("test", "test")
    bench_options.add_arguments(parser)
    methods = bench_options.arm_methods(
        parser.with_config(["--temperatures", "0", "1", "--arms", "adt", "eagle1"])
    )
    assert [(name, m.temperature) for name, m in methods] == [
        ("ar", 0), ("eagle1", 0), ("adt", 0), ("ar", 1), ("eagle1", 1), ("adt", 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arms", "words", "users"),
    [
        ("eagle2", "--adt_beta 0.3", "adt, adt_lantern, adt_jacobi, adt_jacobi_lantern, adt_hybrid"),
        ("eagle2", "--lantern_k 50", "lantern, adt_lantern, jacobi_lantern, adt_jacobi_lantern, hybrid"),
        ("adt", "--lantern_delta 0.2", "lantern, adt_lantern"),
        ("eagle2", "--tree_choices chain", "eagle1"),
        ("eagle1", "--total_token 20", "eagle2, adt,"),
        ("adt eagle1", "--depth 3", "eagle2, lantern, jacobi, jacobi_lantern, hybrid, hybrid_lantern, floor"),
        ("adt", "--draft_top_k 3", "eagle2, lantern, jacobi, jacobi_lantern, hybrid, hybrid_lantern, floor"),
        ("eagle2 adt", "--seed_cells left", "jacobi, adt_jacobi, jacobi_lantern, adt_jacobi_lantern, hy"),
        ("jacobi", "--drafter_path x", "eagle1, eagle2"),
        ("ar", "--verify rejection", "eagle1, eagle2"),
        ("jacobi", "--verify rejection", "eagle1, eagle2"),
        ("jacobi_lantern hybrid_lantern", "--verify rejection", "eagle1, eagle2"),
        ("hybrid", "--lantern_k 50", "jacobi_lantern, hybrid_lantern"),
        ("floor ceiling", "--verify rejection", "eagle1, eagle2"),
        ("eagle2", "--rules reference", "add --verify rejection"),
        ("eagle2", "--rules reference --verify rejection --temperatures 0", "changes nothing"),
        ("jacobi", "--drafter_type jacobi", "--arms jacobi, adt_jacobi, jacobi_lantern"),
    ],
)
def test_bench_refuses_what_no_arm_uses(arms: str, words: str, users: str) -> None:
    parser = Parser("test", "test")
    bench_options.add_arguments(parser)
    with pytest.raises(UserError) as caught:
        bench_options.arm_methods(parser.with_config(["--arms", *arms.split(), *words.split()]))
    message = str(caught.value)
    assert message.startswith(" ".join(words.split()[:2])) and users in message and "\n" not in message


@pytest.mark.parametrize(
    ("arms", "words"),
    [
        ("eagle2 adt", "--adt_beta 0.3 --depth 3"),
        ("eagle1 adt", "--total_token 20 --tree_choices chain"),
        ("eagle1 jacobi", "--total_token 20 --seed_cells left --verify rejection"),
        ("lantern", "--lantern_k 50 --drafter_path x"),
        ("adt", "--rules reference --verify rejection --temperatures 0 1"),
        ("ceiling", "--depth 3 --total_token 9"),
        ("jacobi_lantern hybrid_lantern", "--lantern_k 50 --lantern_delta 0.2 --depth 3 --seed_cells left"),
    ],
)
def test_bench_takes_what_one_arm_uses(arms: str, words: str) -> None:
    parser = Parser("test", "test")
    bench_options.add_arguments(parser)
    args = parser.with_config(["--arms", *arms.split(), *words.split()])
    assert len(bench_options.arm_methods(args)) == (1 + len(arms.split())) * len(set(args.temperatures))


def test_bench_relaxes_self_drafted_trees() -> None:
    """The relaxed arms are jacobi and hybrid with lantern's constants, and nothing else."""
    parser = Parser("test", "test")
    bench_options.add_arguments(parser)
    words = "--temperatures 1 --lantern_k 7 --lantern_delta 0.2 --depth 3 --arms lantern jacobi hybrid"
    args = parser.with_config([*words.split(), "jacobi_lantern", "hybrid_lantern"])
    methods = dict(bench_options.arm_methods(args))
    for kind in ("jacobi", "hybrid"):
        exact, relaxed = methods[kind], methods[f"{kind}_lantern"]
        assert relaxed == replace(exact, lantern=methods["lantern"].lantern) and relaxed.drafter == kind
        assert exact.exact and not relaxed.exact and relaxed.lantern.k == 7 and relaxed.shape.depth == 3


@pytest.mark.parametrize("words", ["--lantern_k 50", "--adt_beta 0.3", "--total_token 9", "--arms adt"])
def test_sweep_has_no_option_that_its_grid_ignores(words: str) -> None:
    parser = Parser("test", "test")
    sweep_options.add_arguments(parser)
    with pytest.raises(UserError, match=f"unknown option {words.split()[0]}"):
        parser.with_config(words.split())


def test_sweep_of_self_drafted_trees_reads_no_drafter() -> None:
    parser = Parser("test", "test")
    sweep_options.add_arguments(parser)
    words = ["--drafter_path", "x", "--drafter_type"]
    assert sweep_options.points(parser.with_config([*words, "hybrid"]))
    with pytest.raises(UserError, match="--drafter_path x: no drafter network"):
        sweep_options.points(parser.with_config([*words, "jacobi"]))


@pytest.mark.parametrize("given", [["--drafter_type", "hybrid"], ["--drafter_type=hybrid"]])
def test_sweep_script_keeps_drafters_in_folders_of_their_own(given: list[str]) -> None:
    """Echoed instead of run; what is printed is sweep's own command line."""
    parser = Parser("test", "test")
    sweep_options.add_arguments(parser)
    folders = {}
    for drafter, words in (("jacobi", ["--drafter_type", "jacobi"]), ("hybrid", given), ("eagle", [])):
        line = subprocess.run(
            ["sh", ROOT / "scripts" / "sweep_adt.sh", "stale", "1", *words],
            env={**os.environ, "PYTHON": "echo"}, capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
        args = parser.with_config(line[2:])
        assert args.drafter_type == drafter
        folders[drafter] = args.output_dir
    assert len(set(folders.values())) == 3 and all(name in folder for name, folder in folders.items())


def test_sweep_points() -> None:
    parser = Parser("test", "test")
    sweep_options.add_arguments(parser)
    found = sweep_options.points(parser.with_config(["--betas", "0.1", "0.9", "--depths", "1:2:3", "2:2:2"]))
    assert len(found) == 2 + 2 * 2 * 3 * 2
    assert {m.adapt.depth_start for _, m in found if m.adapt} == {2}
