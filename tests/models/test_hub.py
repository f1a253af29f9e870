"""Hub ids become folders, and a failure to fetch is one line. The hub is a fake: there is no network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from adt_tree.errors import CheckpointError
from models.checkpoint.hub import HubId, locate
from models.family import LoadOptions
from models.loading import load
from tests.conftest import Refused
from tests.support.checkpoints import Checkpoints

RESPONSE = SimpleNamespace(headers={}, request=None, status_code=403, url="u")
Hub = Callable[..., list]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Returns a function that replaces the hub by one that answers with this folder or error, and returns the
    list of its calls."""

    def install(answer: object) -> list:
        calls: list = []

        def snapshot(
            repo: str, *, repo_type: str, revision: str | None, allow_patterns: list[str], local_dir: None
        ) -> object:
            assert repo_type == "model" and local_dir is None
            calls.append((repo, revision, allow_patterns))
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        return calls

    return install


def test_ids() -> None:
    assert HubId.read("leloy/Anole-7b-v0.1-hf") == HubId("leloy/Anole-7b-v0.1-hf", None, None)
    assert HubId.read("a/b@v1.0") == HubId("a/b", "v1.0", None)
    assert HubId.read("a/b/c/x.pt") == HubId("a/b", None, "c/x.pt")
    assert str(HubId.read("a/b@main/x.pt")) == "a/b@main/x.pt"
    for text in ("name", "/a/b", "./a/b", "a/b/c", "~/a", "../a", "a//b", ""):
        assert HubId.read(text) is None


def test_what_is_here_is_not_fetched(hub: Hub, tmp_path: Path) -> None:
    calls = hub(errors.OfflineModeIsEnabled("asked"))
    assert locate(str(tmp_path)) == tmp_path and not calls
    with pytest.raises(CheckpointError, match="revision"):
        locate(str(tmp_path), "main")
    with pytest.raises(CheckpointError, match="nowhere"):
        locate("nowhere")


def test_what_is_fetched(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    calls = hub(tmp_path)
    assert locate("a/b", "v2") == tmp_path
    ((repo, revision, patterns),) = calls
    assert (repo, revision) == ("a/b", "v2") and "*.safetensors" in patterns and "*.bin" not in patterns
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    calls.clear()
    assert locate("a/b@v1") == tmp_path and ["*.bin" in call[2] for call in calls] == [False, True]
    assert {call[1] for call in calls} == {"v1"}
    calls.clear()
    assert locate("a/b/sub/x.pt") == tmp_path / "sub" / "x.pt" and calls == [("a/b", None, ["sub/x.pt"])]


ERRORS = [
    (errors.GatedRepoError("x", response=RESPONSE), "https://huggingface.co/a/b"),
    (errors.RepositoryNotFoundError("x", response=RESPONSE), "HF_TOKEN"),
    (errors.LocalEntryNotFoundError("two\nlines"), "cache"),
    (errors.HfHubHTTPError("503 busy\nmore", response=RESPONSE), "503 busy"),
    (errors.HFValidationError("bad id"), "bad id"),
    (ConnectionError("no route"), "no route"),
    (OSError(28, "No space left on device"), "No space left"),
]


@pytest.mark.parametrize(("error", "word"), ERRORS, ids=lambda value: type(value).__name__)
def test_what_cannot_be_fetched_is_one_line(hub: Hub, error: Exception, word: str) -> None:
    hub(error)
    with pytest.raises(CheckpointError) as caught:
        locate("a/b@v9")
    assert word in str(caught.value) and "a/b@v9" in str(caught.value) and "\n" not in str(caught.value)


def test_without_a_network_the_real_client_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CheckpointError, match=r"owner/name: .*cache"):
        locate("owner/name")


@pytest.mark.parametrize("option", ["--model_path", "--drafter_path"])
def test_on_the_command_line(hub: Hub, refused: Refused, tmp_path: Path, option: str) -> None:
    hub(ERRORS[0][0])
    line = refused("generate_images", option, "a/b", "--prompt", "sun", "--output_dir", tmp_path / "o")
    assert ERRORS[0][1] in line and not (tmp_path / "o").exists()


def test_only_two_folders_of_glm_image_are_fetched(hub: Hub, checkpoints: Checkpoints) -> None:
    """This holds for the hub id, for the family's name, and for another repository of the same layout."""
    repository = checkpoints["glm_image"].path.parent
    parts = ("vision_language_encoder/", "processor/")
    base = LoadOptions(device="meta", precision="fp32", need_drafter=False, height=64, width=64)
    for model, options, expected in (
        ("zai-org/GLM-Image", replace(base, revision="v1"), ("zai-org/GLM-Image", "v1")),
        ("zai-org/GLM-Image@v2", base, ("zai-org/GLM-Image", "v2")),
        ("glm_image", replace(base, model_path="a/b", revision="v3"), ("a/b", "v3")),
    ):
        calls = hub(repository)
        assert load(model, options).name == "glm_image"
        ((*asked, patterns),) = calls
        assert tuple(asked) == expected and all(pattern.startswith(parts) for pattern in patterns)
        for part in parts:
            assert {f"{part}*.json", f"{part}*.jinja", f"{part}*.safetensors"} <= set(patterns)
