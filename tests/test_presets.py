"""Presets parse, and manifest, script and registry say the same of where checkpoints lie."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from adt_tree.policy import TreeShape
from cli.generate_images import Options
from cli.method import method_from
from cli.train_drafter import Options as Training
from models.registry import SPECS
from models.spec import CKPTS

ROOT = Path(__file__).resolve().parent.parent
TRAINING = ROOT / "configs" / "emoji-drafter.yaml"
PRESETS = sorted(set((ROOT / "configs").glob("*.yaml")) - {TRAINING})
PUBLISHED = ("anole", "lumina_mgpt", "llamagen", "llamagen2")
MANIFEST = json.loads((CKPTS / "manifest.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_what_its_name_says(path: Path) -> None:
    options = Options.parse(["--config", str(path)])
    model, _, kind = path.stem.partition("-")
    assert options.model == model and options.output_dir == f"runs/{path.stem}"
    assert f"configs/{path.name}" in path.read_text(encoding="utf-8").splitlines()[0]
    method = method_from(options)
    assert method.drafting == (kind != "ar") and method.name.startswith("adt") == kind.startswith("adt")
    assert (method.lantern is not None) == kind.endswith("lantern")
    if model != "emoji" and method.needs_drafter and isinstance(method.tree, TreeShape):
        assert method.tree.budget == 58


def test_the_training_preset_parses() -> None:
    assert Training.parse(["--config", str(TRAINING)]).optimizer == "muon"


def test_every_method_of_the_paper_has_its_preset() -> None:
    kinds = ("ar", "eagle2", "lantern", "adt", "adt-lantern")
    wanted = {f"{model}-{kind}" for model in PUBLISHED for kind in kinds}
    assert wanted <= {path.stem for path in PRESETS}


def fetched(tmp_path: Path, *names: str) -> set[tuple[str, str]]:
    """(repository, folder) of what the script would fetch, by a client that only writes down."""
    client, log = tmp_path / "hf", tmp_path / "log"
    client.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    client.chmod(client.stat().st_mode | stat.S_IXUSR)
    words = ["bash", str(ROOT / "scripts" / "get_ckpts.sh"), *names]
    done = subprocess.run(
        words, env={**os.environ, "HF": str(client)}, capture_output=True, text=True, check=True
    )
    by_hand = any((CKPTS / name / "chameleon" / "tokenizer" / "vqgan.ckpt").is_file() for name in names)
    assert ("vqgan.ckpt" in done.stderr) == (not by_hand and not {"anole", "lumina_mgpt"}.isdisjoint(names))
    lines = [line.split() for line in log.read_text().splitlines()]
    assert all(words[0] == "download" and words[2] == "--local-dir" for words in lines)
    return {(words[1], words[3]) for words in lines}


@pytest.mark.parametrize("name", MANIFEST["models"])
def test_the_script_fetches_what_the_manifest_lists(tmp_path: Path, name: str) -> None:
    parts = MANIFEST["models"][name].values()
    assert fetched(tmp_path, name) == {(part["hub"], part["folder"]) for part in parts if part["hub"]}


def test_the_registry_looks_where_the_manifest_says() -> None:
    for name, spec in SPECS.items():
        target, drafter = spec.target_folder, spec.drafter_folder
        if name in MANIFEST["models"]:
            listed = MANIFEST["models"][name]
            assert (
                target == ROOT / listed["target"]["folder"] and drafter == ROOT / listed["drafter"]["folder"]
            )
    assert set(PUBLISHED) <= set(MANIFEST["models"])


def test_the_manifest_states_no_more_than_is_known() -> None:
    for parts in MANIFEST["models"].values():
        for part in parts.values():
            assert {"hub", "folder", "files", "licence"} <= set(part) and part["files"]
            assert all(size is None or size > 0 for size in part["files"].values())
            for digest in part.get("sha256", {}).values():
                assert re.fullmatch(r"[0-9a-f]{64}", digest)


@pytest.mark.parametrize(("words", "status"), [(["--help"], 0), ([], 2), (["chameleon"], 2)])
def test_the_script_explains_itself(words: list[str], status: int) -> None:
    script = ["bash", str(ROOT / "scripts" / "get_ckpts.sh"), *words]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == status and "lumina_mgpt" in done.stdout + done.stderr
