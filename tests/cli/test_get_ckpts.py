"""get_ckpts: what it fetches, from where and into which folder. The hub is a fake: there is no network."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from models.published import CKPTS
from tests.conftest import Refused, Run

Calls = list[tuple[str, str, str | None, str]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    """Replaces the hub by one whose repositories have every file but *.jit, and ckpts/ by a folder.
    Returns the list of its calls: what was asked for, the files, the revision and the folder."""
    calls: Calls = []

    def snapshot(
        repo: str, *, repo_type: str, revision: str | None, allow_patterns: list[str] | None, local_dir: Path
    ) -> str:
        names = allow_patterns or []
        place = local_dir.relative_to(tmp_path).as_posix()
        calls.append((f"{repo_type} {repo}", " ".join(names), revision, place))
        for file in (local_dir / name.replace("*", "x") for name in names if not name.endswith(".jit")):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        return str(local_dir)

    monkeypatch.setattr("models.published.CKPTS", tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, revision, repo_type: None)
    return calls


GLM, LLAMAGEN = "model zai-org/GLM-Image", "model FoundationVision/LlamaGen"
GLM_FILES = "vision_language_encoder/* processor/*"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "anole",
            [
                ("model leloy/Anole-7b-v0.1-hf", "", None, "anole/Anole-7b-v0.1-hf"),
                ("model jadohu/anole_drafter", "", None, "anole/trained_drafters/anole_drafter"),
            ],
        ),
        ("glm_image --revision v1", [(GLM, GLM_FILES, "v1", "glm_image/GLM-Image")]),
        (
            "glm_image --pixels --revision v1",
            [
                (GLM, GLM_FILES, "v1", "glm_image/GLM-Image"),
                (GLM, "", "v1", "glm_image/GLM-Image"),
            ],
        ),
        (
            "llamagen_c2i --file c2i_B_256.pt",
            [
                (LLAMAGEN, "c2i_B_256.pt", None, "llamagen"),
                (LLAMAGEN, "vq_ds16_c2i.pt", None, "llamagen"),
            ],
        ),
        (
            "liquid --revision v1",
            [
                ("model Junfeng5/Liquid_V1_7B", "", "v1", "liquid/Liquid_V1_7B"),
                ("space Junfeng5/Liquid_demo", "chameleon/vqgan.yaml chameleon/vqgan.ckpt", None, "liquid"),
            ],
        ),
    ],
)
def test_what_is_fetched(run: Run, hub: Calls, words: str, expected: Calls) -> None:
    status, _, error = run("get_ckpts", *words.split())
    assert status == 0 and hub == expected
    assert ("vqgan.ckpt" in error and "form" in error) == (words == "anole")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("llama", "llama"),
        ("anole --pixels", "--pixels"),
        ("anole --file c2i_B_256.pt", "--file"),
        ("anole --into README.md", "--into README.md"),
        ("simplear --pixels", "decoder.jit"),  # which the repository lacks
    ],
)
def test_what_is_refused(refused: Refused, hub: Calls, words: str, named: str) -> None:
    assert named in refused("get_ckpts", *words.split())
    assert len(hub) == (2 if "simplear" in words else 0)


def test_without_the_hub_a_part_of_a_checkpoint_is_not_taken_for_the_whole(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real client returns the folder that is there."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("models.published.CKPTS", tmp_path)
    (tmp_path / "emu3" / "Emu3-Gen-hf").mkdir(parents=True)
    (tmp_path / "emu3" / "Emu3-Gen-hf" / "config.json").touch()
    assert "BAAI/Emu3-Gen-hf: " in refused("get_ckpts", "emu3")


def test_the_readme_has_the_table(run: Run, tmp_path: Path) -> None:
    text = (CKPTS / "README.md").read_text(encoding="utf-8")
    copy = tmp_path / "README.md"
    copy.write_text(text, encoding="utf-8")
    assert run("get_ckpts", "--into", copy)[0] == 0 and run("get_ckpts")[1].rstrip() in text
    assert copy.read_text(encoding="utf-8") == text, "run main.py get_ckpts --into ckpts/README.md"
