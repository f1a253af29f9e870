"""All presets parse, and manifest and registry agree on where checkpoints lie."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from adt_tree.budget import AutoTree
from adt_tree.policy import TreeShape
from cli.generate_images import Options
from cli.method_options import method_from
from cli.train_drafter import Options as Training
from models.registry import SPECS
from models.spec import CKPTS
from tests.runs import ROOT

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
    if model != "emoji" and method.spec.network and isinstance(method.tree, TreeShape):
        assert method.tree.budget == 58
    if model != "emoji":
        assert not isinstance(method.tree, AutoTree), "two runs of a preset give the same images"


def test_every_method_of_the_paper_has_its_preset() -> None:
    kinds = ("ar", "eagle2", "lantern", "adt", "adt-lantern")
    names = {f"{model}-{kind}" for model in PUBLISHED for kind in kinds}
    assert names <= {path.stem for path in PRESETS}
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
