"""Files of options and paths in options: what is in them is what a command reads, whatever the text."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from adt_tree.errors import UserError
from cli.generate_images import Options
from main import COMMANDS, module_of
from storage.command_line import PATHS, Parser
from tests.conftest import Command, Result
from tests.support.runs import images

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda t: t == t.strip())


@given(text=TEXTS | st.sampled_from(["~", "null", "12:30", "no"]), ascii_only=st.booleans())
def test_yaml(tmp_path_factory: pytest.TempPathFactory, text: str, ascii_only: bool) -> None:
    content = yaml.safe_dump({"prompt": text}, allow_unicode=not ascii_only)
    assume(yaml.safe_load(content)["prompt"] == text)  # PyYAML writes U+0085 as it is, and reads a line end
    file = tmp_path_factory.getbasetemp() / "run.yaml"
    file.write_text(content, encoding="utf-8")
    assert Options.parse(["--config", str(file)]).prompt == text


@pytest.mark.parametrize("text", "12:30 16:9 no on 1_000 017 0x10 1e3 2024-01-01 .inf =".split())
def test_plain_words_of_yaml_are_texts(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes("\ufeff".encode() + f"prompt: {text}\r\nlantern: Yes\r\nset_seed: off\r\n".encode())
    options = Options.parse(["--config", str(file)])
    assert (options.prompt, options.lantern, options.set_seed) == (text, True, False)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_path_may_begin_with_the_home_folder(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").touch()  # --config reads it
    command = module_of(name).Options
    parser = Parser(command, "")
    for item in fields(command):
        if item.metadata["unit"] in PATHS:
            flag = () if item.metadata.get("positional") else (f"--{item.name}",)
            value = parser.parse([*flag, "~/x"])[item.name]
            assert value in (f"{tmp_path}/x", (f"{tmp_path}/x",)), item.name
        else:
            assert not item.name.endswith(("_dir", "_path", "_file", "folder")), item.name


def test_a_path_may_have_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    monkeypatch.delenv("SCRATCHES", raising=False)
    for path in ("$SCRATCH/x", "${SCRATCH}/x"):
        (tmp_path / "run.yaml").write_text(f"output_dir: {path}\n")
        assert Options.parse(["--config", str(tmp_path / "run.yaml")]).output_dir == f"{tmp_path}/x"
    with pytest.raises(UserError, match="SCRATCHES/x' names a variable that is not set"):
        Options.parse(["--output_dir", "$SCRATCHES/x"])
    assert Options.parse(["--prompt", "a bill of $SCRATCHES"]).prompt == "a bill of $SCRATCHES"
    (tmp_path / "$SCRATCHES").mkdir()
    assert Options.parse(["--output_dir", f"{tmp_path}/$SCRATCHES"]).output_dir.endswith("/$SCRATCHES")


def test_a_run_can_be_repeated_by_its_stored_options(
    result: Result, command: Command, tmp_path: Path
) -> None:
    """With options that were not given, switches, numbers and the model's own defaults."""
    words = "--method adt-tree --lantern --total_token 20 --num_images 2 --cfg 2 --seeds 2".split()
    first = result(*command("o", *words))
    settings = tmp_path / "o" / "generation_configs.json"
    assert result("generate_images", "--config", settings)["skipped"] == first["images"] == 4
    again = result("generate_images", "--config", settings, "--output_dir", tmp_path / "again")
    assert again["skipped"] == 0 and images(tmp_path / "again") == images(tmp_path / "o")


def test_lists_of_a_stored_run_are_read(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"class_labels": [207, 360], "model": "llamagen"}')
    assert Options.parse(["--config", str(file)]).class_labels == (207, 360)
