"""Options become one checked method, and impossible ones are refused in one line. No model is loaded."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from adt_tree.errors import UserError
from adt_tree.fastest_size import AutoTree
from adt_tree.method import METHODS, Method
from adt_tree.policy import SELF_DRAFTED, AdaptiveTree, TreeShape
from adt_tree.settings import Lantern, Sampling
from adt_tree.static_trees import StaticTree
from cli.bench import Options as Bench
from cli.bench import configurations
from cli.flags import read_by, with_flags
from cli.generate_images import Options
from cli.method_options import METHOD_OPTIONS, method_from
from main import COMMANDS, module_of
from models.registry import SPECS
from tests.support.refusal import refusal


def parse(words: str) -> Method:
    """Returns the method that a command line of generate_images means."""
    return method_from(Options.parse(words.split()))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", "self-draft"), ("--peanut", "adt-self-draft"),
        ("--drafter_path x --peanut", "adt-tree"), ("--drafter_path x --static_tree", "eagle-1"),
        ("--model_type eagle --drafter_path x --peanut --lantern", "adt-tree"), ("--static_tree", "eagle-1"),
        ("--verify rejection", "eagle-2"), ("--drafter_path x", "eagle-2"), ("--model_type base", "ar"),
        ("--model anole --static_tree", "eagle-1"), ("--model anole", "eagle-2"),
        ("--model anole --peanut", "adt-tree"),
        ("--model lumina_mgpt", "self-draft"), ("--model lumina_mgpt --eagle_version 1", "eagle-1"),
        ("--model lumina_mgpt --eagle_version 2", "eagle-2"),
        ("--model lumina_mgpt --eagle_version 0", "eagle-2"),
        ("--model lumina_mgpt --eagle_version 2 --peanut", "adt-tree"),
        ("--model lumina_mgpt --eagle_version 1 --static_tree", "eagle-1"),
        ("--model lumina_mgpt --cfg_mode sequential", "self-draft"),
    ],
)  # fmt: skip
def test_the_published_flags_name_methods(words: str, name: str) -> None:
    assert parse(words).name == name


# --adt_depth_max 5 also lowers depth_min and depth_start, whose defaults are larger.
FIVE_DEEP = {"depth_min": 5, "depth_start": 5, "depth_max": 5}


@pytest.mark.parametrize(
    ("words", "tree"),
    [
        ("", AutoTree()),
        ("--total_token 32", TreeShape(24, 8, 31)),
        ("--method eagle-2 --total_token 59 --depth 4 --draft_top_k 10", TreeShape(4, 10, 58)),
        ("--method self-draft --total_token 16", TreeShape(15, 8, 15)),
        ("--method self-draft --total_token 25", TreeShape(18, 8, 24)),
        ("--model anole", TreeShape(5, 10, 58)),
        ("--model anole --total_token 26 --depth 3", TreeShape(3, 10, 25)),
        ("--model lumina_mgpt --drafter_path x", TreeShape(6, 10, 58)),
        ("--model anole --static_tree", StaticTree("naive_extend_57")),
        ("--static_tree --tree_choices chain", StaticTree("chain")),
        ("--method sjd", TreeShape(15, 1, 15)),
        ("--method sjd-coupled --total_token 32", TreeShape(31, 1, 31)),
        ("--method sjd-pac", TreeShape(45, 4, 63)),
        ("--method sjd-pac --total_token 32 --draft_top_k 3 --depth 20", TreeShape(20, 3, 31)),
        ("--model anole --peanut", replace(AdaptiveTree(), budget=58, width_max=10, width_start=10)),
        ("--peanut --adt_init random --total_token 9", replace(SELF_DRAFTED, init="random", budget=8)),
        ("--peanut --adt_beta 0.25 --adt_depth_max 5", replace(SELF_DRAFTED, beta=0.25, **FIVE_DEEP)),
    ],
)
def test_trees(words: str, tree: TreeShape | AdaptiveTree | str) -> None:
    assert parse(words).tree == tree


@pytest.mark.parametrize(
    ("words", "values"),
    [("", (1, 2000, 1, 3)), ("--model anole", (1, 2000, 1, 3)), ("--model janus_pro", (1, 0, 1, 5)),
     ("--model emu3", (1, 2048, 1, 3)), ("--model simplear", (1, 0, 1, 6)),
     ("--model janus_pro --temperature 0.5 --cfg 2 --top_k 9 --top_p 0.3", (0.5, 9, 0.3, 2))],
)  # fmt: skip
def test_the_distribution_is_the_models_own_unless_given(words: str, values: tuple[float, ...]) -> None:
    assert parse(words).sampling == Sampling(*values)


def test_relaxation_is_not_exact_and_greedy_rejection_is() -> None:
    assert parse("--lantern --lantern_k 7 --model anole").lantern == Lantern(0.1, 7)
    for words in ("--lantern", "--verify rejection", "--method sjd"):
        assert not parse(words).exact
    for words in ("", "--verify rejection --temperature 0", "--method sjd --temperature 0"):
        assert parse(words).exact


@pytest.mark.parametrize("model", ["emoji", "anole", "llamagen"])
def test_lantern_means_the_same_in_every_command(model: str) -> None:
    usual = Lantern(0.5, max_k=100) if model == "emoji" else Lantern()
    words = ["--model", model, "--temperatures", "1", "--methods", "self-draft-lantern"]
    (_, measured) = configurations(Bench.parse(words)).values()
    assert parse(f"--model {model} --lantern").lantern == measured.lantern == SPECS[model].lantern == usual


REFUSALS = [
    "--model nonsense", "--vq_path x", "--trust_torchscript", "--model liquid --vq_path x",
    "--model anole --class_labels 1", "--model_type vllm",
    "--grid_search", "--eagle_version 1", "--cfg_mode sequential", "--lantern_k 10", "--lantern_delta 0.2",
    "--lantern_table x", "--peanut --static_tree", "--rules reference --verify rejection --temperature 0",
    "--model_type base --peanut", "--adt_depth_min 4 --adt_depth_max 2 --peanut",
    "--top_k many", "--cfg nan",
    "--random_seed x", "--batch_size 0", "--precision int8", "--method jacobi",
    "--num_images 0", "--num_images -2", "--slice 5",
    "--slice 5-5", "--total_token 0", "--tree_choices oak",
    "--adt_bet 0.5", "--lanter",
    "--verify rejection --method self-draft", "--static_tree --method self-draft",
    "--method hybrid", "--static_tree --method sjd", "--peanut --method sjd-pac",
    "--seed_cells both --method sjd", "--seed_cells random --method self-draft",
    "--drafter_path x --method self-draft", "--method ar --model_type eagle",
    "--model_type base --verify rejection",
    "--method ar --peanut", "--method eagle-2 --no-static_tree --model_type base", "--tokenizer_base_path x",
    "--method medusa", "--model lumina_mgpt --eagle_version 1 --peanut",
    "--eagle_version 2 --static_tree --model lumina_mgpt",
    "--model lumina_mgpt --eagle_version 1 --method eagle-1", "--class_labels x", "--output_dir",
    "--method adt-self-draft --total_token auto", "--method eagle-2 --total_token auto",
    "--lantern --total_token auto", "--total_token auto --depth 4", "--total_token 1 --depth 4",
    "--total_token several",
]  # fmt: skip


@pytest.mark.parametrize("words", REFUSALS)
def test_refused(words: str) -> None:
    message = with_flags(refusal(lambda: parse(words)), Options)
    named = [word.removeprefix("--") for word in words.split() if word.startswith("--")]
    assert any(name in message for name in named)


VALUES = {
    "lantern": "", "lantern_delta": "0.4", "verify": "rejection", "rules": "reference", "seed_cells": "left",
    "tree_choices": "chain", "adt_init": "both", "adt_beta": "0.7",
    "adt_depth_start": "7", "adt_width_start": "7", "gsd_gap": "0.2", "sv_mass": "0.5",
}  # fmt: skip
# Further words by the beginning of an option's name. Without them the option would be refused for another
# reason than its method.
NEEDED = {"lantern_": "--lantern", "rules": "--verify rejection"} | {
    f"adt_{side}": f"--adt_{side}_min 5 --adt_{side}_start 6 --adt_{side}_max 7"
    for side in ("depth", "width")
}


@pytest.mark.parametrize("name", METHODS)
def test_the_options_of_a_methods_row_change_it_and_others_are_refused(name: str) -> None:
    spec = METHODS[name]
    for option in METHOD_OPTIONS:
        others = "".join(words for start, words in NEEDED.items() if option.startswith(start))
        words, value = f"--method {name} {others}", VALUES.get(option, "6")
        read = spec.lantern if option.startswith("lantern_") else option in read_by(spec)
        if read and value in (spec.verify if option == "verify" else (value,)):
            changed = parse(f"{words} --{option} {value}") != parse(words)
            assert changed is (option != "drafter_path"), option
        else:
            with pytest.raises(UserError, match="^--(lantern|verify|adt_|" + option + ")"):
                parse(f"{words} --{option} {value}")


@pytest.mark.parametrize("value", ["", "  ", "caf\udce9"])
@pytest.mark.parametrize("name", ["output_dir", "prompt"])
def test_values_that_are_empty_or_not_utf_8_are_refused(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"--{name}: "):
        Options.parse([f"--{name}={value}"])


def test_config_file_gives_options_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("temperature: 0.5\nset_seed: false\nnum_images: -1\nlantern: true\ndrafter_top_k: 3\n")
    method = parse(f"--config {file} --temperature 0.7")
    assert (method.sampling.temperature, method.tree.width) == (0.7, 3) and method.lantern
    assert parse(f"--config {file} --no-lantern").lantern is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("temprature: 0\n", "'temprature'.*--temperature"),
        ("peanut: 1\n", "peanut"),
        ("temperature: 0.5\n".encode("utf-16"), "not UTF-8"),
        ("- a\n- b\n", ""),
        ("a: [\n", ""),
        ("temperature: warm\n", "warm"),
        ("config: other.yaml\n", "'config'"),
        ("temperature: 1\ntop_k: 2\ntemperature: 0\n", "temperature"),
        (None, ""),
    ],
)
def test_bad_config_files(tmp_path: Path, text: str | bytes | None, named: str) -> None:
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    assert re.search(rf"run\.yaml.*{named}", refusal(lambda: parse(f"--config {file}")))


def test_a_file_gives_a_repeated_option_and_the_command_line_replaces_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("vary: [depth=2, adt_beta=0.5]\n")
    words = ["--config", str(file)]
    assert Bench.parse(words).vary == (("depth", (2,)), ("adt_beta", (0.5,)))
    assert Bench.parse([*words, "--vary", "depth=3"]).vary == (("depth", (3,)),)


UNREAD = [
    "train_drafter --model emoji --vq_path x", "train_drafter --mean 1.0", "train_drafter --muon_lr 1.0",
    "train_drafter --data_noise none --std 1.0", "train_drafter --minutes 5 --num_epochs 3",
    "train_drafter --no-is_warmup --warmup_steps_ratio 0.5", "train_drafter --cfg_loss",
    "train_drafter --grad_clip 0 --grad_clip_by norm", "generate_images --revision v1",
    "evaluate --metrics effnet_fd --splits 9", "evaluate --metrics clip --ref_dir x",
    "eval_prec_recall --k 2",
    "evaluate --metrics clip --clip_path x --clip_model4eval ViT-G/14", "bench --layers 4",
    "evaluate --metrics fid --fake_dir x --num_samples 5 --how_many 5", "report x --write y --into z",
    "report x --check --paper coco", "bench --random_weights --model anole --prompt x.txt",
    "check_ckpts emoji --vq_path x",
]  # fmt: skip


@pytest.mark.parametrize("words", UNREAD)
def test_an_option_that_would_change_nothing_is_refused(words: str) -> None:
    """The last one that is given is named."""
    name, *rest = words.split()
    cls = module_of(name).ALIASES[name] if name.startswith("eval_") else module_of(name).Options
    assert refusal(lambda: cls.parse(rest)).startswith(f"--{words.split(' --')[-1]}: it ")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained_and_states_its_default(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = module_of(name).Options
    with pytest.raises(SystemExit):
        command.parse(["--help"], f"main.py {name}", COMMANDS[name])
    text = capsys.readouterr().out
    assert "default: None" not in text and "MISSING" not in text
    for item in fields(command):
        positional = item.metadata.get("positional", False)
        assert (item.metadata["unit"] if positional else f"--{item.name}") in text


def test_a_command_inherits_groups_and_changes_their_defaults(tmp_path: Path) -> None:
    file = tmp_path / "bench.yaml"
    file.write_text("methods: [eagle-1, adt-tree]\nwarmup: 3\n")
    options = Bench(
        methods=("eagle-1", "adt-tree"), warmup=3, num_images=16, batch_size=(1,), config=str(file)
    )
    assert Bench.parse(["--config", str(file)]) == options and Options.parse([]).num_images == 10


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("target_size 700: give 512", "--target_size 700: give 512"),
        ("precision bf8: choose one of bf16", "--precision bf8: choose one of bf16"),
        ("guidance 7 is much: give less", "--cfg 7 is much: give less"),
        ("lantern: method ar does not take it", "--lantern: method ar does not take it"),
        ("batch_size 9: batch_size 2 fits", "--batch_size 9: --batch_size 2 fits"),
        ("runs/output_dir/x has no model_type", "runs/output_dir/x has no model_type"),
        ("prompt files end in .txt", "prompt files end in .txt"),
        ("--vary seed_cells=left: no method reads it", "--vary seed_cells=left: no method reads it"),
    ],
)
def test_a_message_of_the_library_names_flags(line: str, shown: str) -> None:
    assert with_flags(line, Options) == shown


def test_an_option_with_several_values() -> None:
    """The last one counts, but pairs of a name and values add up."""
    words = "--methods ar --methods eagle-1 --vary depth=2 --vary adt_beta=0.5".split()
    options = Bench.parse(words)
    assert options.methods == ("eagle-1",) and [name for name, _ in options.vary] == ["depth", "adt_beta"]
    assert module_of("serve").Options.parse(["--server_name", "a", "b.example"]).server_name == (
        "a",
        "b.example",
    )
