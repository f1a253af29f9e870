"""Presets and the READMEs' command lines parse, and manifest and registry agree on where checkpoints lie."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from adt_tree.policy import TreeShape
from cli.generate_images import Options
from cli.method_options import method_from
from cli.train_drafter import Options as Training
from main import COMMANDS, module_of, pick
from models.family import CKPTS
from models.registry import SPECS
from tests.support.runs import ROOT

TRAINING = ROOT / "configs" / "emoji-drafter.yaml"
PRESETS = sorted(set((ROOT / "configs").glob("*.yaml")) - {TRAINING})
PUBLISHED = ("anole", "lumina_mgpt", "llamagen", "llamagen2")
MANIFEST = json.loads((CKPTS / "manifest.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_what_its_name_says(path: Path) -> None:
    options = Options.parse(["--config", str(path)])
    model, _, kind = path.stem.partition("-")
    assert options.model == model and options.output_dir == f"runs/{path.stem}"
    assert f"configs/{path.name}" in path.read_text(encoding="utf-8").splitlines()[1]
    method = method_from(options)
    assert method.drafting == (kind != "ar") and method.name.startswith("adt") == kind.startswith("adt")
    assert (method.lantern is not None) == kind.endswith("lantern")
    if method.spec.network and isinstance(method.tree, TreeShape):
        assert method.tree.budget == 58


def test_every_method_of_the_paper_has_its_preset() -> None:
    kinds = ("ar", "eagle2", "lantern", "adt", "adt-lantern")
    names = {f"{model}-{kind}" for model in PUBLISHED for kind in kinds}
    assert names == {path.stem for path in PRESETS}
    assert Training.parse(["--config", str(TRAINING)]).optimizer == "muon"


def test_the_registry_looks_where_the_manifest_says() -> None:
    models = MANIFEST["models"]
    for name in SPECS.keys() & models.keys():
        folders = {"target": SPECS[name].target_folder, "drafter": SPECS[name].drafter_folder}
        assert folders == {part: ROOT / models[name][part]["folder"] for part in folders}
    assert set(PUBLISHED) <= set(models)


def test_the_manifest_states_no_more_than_is_known() -> None:
    for parts in MANIFEST["models"].values():
        for part in parts.values():
            assert {"hub", "folder", "files", "licence"} <= set(part) and part["files"]
            assert all(size is None or size > 0 for size in part["files"].values())
            for digest in part.get("sha256", {}).values():
                assert re.fullmatch(r"[0-9a-f]{64}", digest)


README = (ROOT / "README.md").read_text(encoding="utf-8")


def command_lines(text: str) -> list[tuple[str, str]]:
    """Returns the command and the further words of every `main.py COMMAND ...` in a document, in code blocks
    and inside lines. A line that a backslash continues is one; pipes, comments and later commands are cut."""
    return re.findall(r"main\.py (\w+)([^\n`|#&]*)", text.replace("\\\n", " "))


def parse(command: str, words: str) -> None:
    """Parses a command line as main.py does, and for generate_images also makes its method."""
    given = [word for word in shlex.split(words) if word not in ("...", "--help")]
    options = module_of(pick("main.py", command, COMMANDS)).Options.parse(given)
    if isinstance(options, Options):
        method_from(options)


LINES = command_lines(README) + command_lines((CKPTS / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("command", "words"), LINES)
def test_a_command_line_of_a_readme_is_accepted(
    command: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # its --config is a path below the repository
    parse(command, words)
