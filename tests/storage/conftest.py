"""A finished run of each benchmark, which tests of report check, export and damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import main
from tests.support.checkpoints import Checkpoints

GENEVAL = [
    '{"tag": "single_object", "include": [{"class": "pizza", "count": 1}], "prompt": "a photo of a pizza"}',
    '{"tag":"counting","include":[{"class":"cat","count":2}],"exclude":[{"class":"cat","count":3}],'
    '"prompt":"a photo of two cats"}',
]
DPG = {"partiprompts7": "a red heart", "COCOval12": "a cat with a hat"}


@pytest.fixture(scope="session")
def finished(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the prompts and a run of each benchmark: geneval.jsonl, geneval, texts, dpg."""
    folder = tmp_path_factory.mktemp("benchmarks")
    (folder / "geneval.jsonl").write_text("\n".join(GENEVAL) + "\n\n")
    (folder / "texts").mkdir()
    for name, text in DPG.items():
        (folder / "texts" / f"{name}.txt").write_text(text)
    words = [*checkpoints["emoji"].words(), "--method", "ar", "--num_images", "-1", "--heatmaps", "0"]
    words += ["--images_per_prompt", "4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # the prompts are named as the tests find them in a copy
        for prompt, run in {"geneval.jsonl": "geneval", "texts": "dpg"}.items():
            assert main.main(["generate_images", *words, "--prompt", prompt, "--output_dir", run]) == 0
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a copy of that folder, which is the current one."""
    copy = Path(shutil.copytree(finished, tmp_path / "copy"))
    monkeypatch.chdir(copy)
    return copy
