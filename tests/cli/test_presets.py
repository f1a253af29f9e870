"""Presets and the READMEs' command lines parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cli.generate_images import Options
from cli.method_options import method_from
from cli.train_drafter import Options as Training
from main import COMMANDS, module_of
from models.published import CKPTS
from tests.support.runs import ROOT

TRAINING = ROOT / "configs" / "emoji-drafter.yaml"
PRESETS = sorted(set((ROOT / "configs").glob("*.yaml")) - {TRAINING})
KINDS = {"adt", "adt-lantern", "ar", "eagle2", "lantern"}  # what the paper compares


@pytest.mark.parametrize("model", ["anole", "lumina_mgpt", "llamagen", "llamagen2"])
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_what_its_name_says(path: Path, model: str) -> None:
    options = Options.parse(["--config", str(path), "--model", model])
    assert options.model == model and f"configs/{path.name}" in path.read_text(encoding="utf-8")
    method, kind = method_from(options), path.stem
    assert method.drafting == (kind != "ar") and method.name.startswith("adt") == kind.startswith("adt")
    assert (method.lantern is not None) == kind.endswith("lantern")
    if method.drafting:  # the paper's budget
        assert method.tree.budget == 58
    if method.name == "eagle-2":
        assert (method.tree.depth, method.tree.width) == (6 if model == "lumina_mgpt" else 5, 10)


def test_every_method_of_the_paper_has_its_preset() -> None:
    assert {path.stem for path in PRESETS} == KINDS
    assert Training.parse(["--config", str(TRAINING)]).optimizer == "muon"


README = (ROOT / "README.md").read_text(encoding="utf-8")


def command_lines(text: str) -> list[tuple[str, str]]:
    """Returns the command and the further words of every `main.py COMMAND ...` in a document, in code blocks
    and inside lines. A line that a backslash continues is one; pipes, comments and later commands are cut."""
    return re.findall(r"main\.py (\w+)([^\n`|#&]*)", text.replace("\\\n", " "))


def parse(command: str, words: str) -> None:
    """Parses a command line as main.py does, and for generate_images also makes its method."""
    given = [word for word in shlex.split(words) if word not in ("...", "--help")]
    assert command in COMMANDS
    options = module_of(command).Options.parse(given)
    if isinstance(options, Options):
        method_from(options)


LINES = command_lines(README) + command_lines((CKPTS / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("command", "words"), LINES)
def test_a_command_line_of_a_readme_is_accepted(
    command: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # its --config is a path below the repository
    parse(command, words)
