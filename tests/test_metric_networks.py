"""Feature networks against the libraries that publish them, recorded, and against transformers and torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from eval.errors import UserError
from eval.metrics import pictures, sources
from eval.metrics.aesthetic import Aesthetic
from eval.metrics.clip import Clip, read_clip_config
from eval.metrics.effnet import MEAN, STD, EffNet
from eval.metrics.inception import Inception
from eval.metrics.sources import clip_files, load_clip, weights_file
from eval.metrics.vgg import VGG
from models.errors import CheckpointError
from tests import metric_checkpoints as tiny
from tests.golden import close, tensors

CPU = torch.device("cpu")


def test_inception_is_torch_fidelitys(tmp_path: Path) -> None:
    expected, net = tensors("metrics/inception"), Inception(tiny.inception(tmp_path), CPU)
    image = tiny.picture(299, 299)
    pixels = torch.stack([pictures.to_tensor(image), pictures.to_tensor(image.rotate(90))])
    features = net.features(pixels)
    close(features, expected["features"])
    close(net.logits(features), expected["logits"])


def test_vgg_is_torchvisions(tmp_path: Path) -> None:
    shown = tiny.picture(90, 61).resize((224, 224), Image.Resampling.BILINEAR)
    pixels = pictures.normalise(pictures.to_tensor(shown), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    close(VGG(tiny.vgg(tmp_path), CPU).features(pixels[None]), tensors("metrics/vgg")["features"])


@pytest.mark.parametrize("activation", ["gelu", "quick"])
def test_clip_is_open_clips(tmp_path: Path, activation: str) -> None:
    folder, expected = tiny.clip(tmp_path), tensors("metrics/clip")
    config = json.loads((folder / "open_clip_config.json").read_text())
    config["model_cfg"]["quick_gelu"] = activation == "quick"
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    net = load_clip(clip_files(str(folder), "--clip_path"), "--clip_path", True, CPU)
    shown = [pictures.short_side(image, 32) for image in (tiny.picture(90, 61), tiny.picture(40, 77))]
    pixels = [pictures.normalise(pictures.to_tensor(image), net.mean, net.std) for image in shown]
    close(net.images(torch.stack(pixels)), expected[f"{activation}.images"])
    close(net.texts(expected["ids"]), expected[f"{activation}.texts"])


def in_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's names as transformers has them."""
    renamed = {}
    for name, tensor in state.items():
        tower = "vision_model" if name.startswith("visual.") else "text_model"
        rest = name.removeprefix("visual.")
        if "in_proj" in rest:
            place = rest.replace("transformer.resblocks.", f"{tower}.encoder.layers.")
            place, kind = place.replace("attn.in_proj_", "self_attn.X.").rsplit(".", 1)
            for part, own in zip("qkv", tensor.chunk(3), strict=True):
                renamed[f"{place[:-1]}{part}_proj.{kind}"] = own
            continue
        for old, new in (
            ("transformer.resblocks.", "encoder.layers."), ("ln_1", "layer_norm1"), ("ln_2", "layer_norm2"),
            ("attn.out_proj", "self_attn.out_proj"), ("mlp.c_fc", "mlp.fc1"), ("mlp.c_proj", "mlp.fc2"),
            ("token_embedding", "embeddings.token_embedding"), ("ln_pre", "pre_layrnorm"),
            ("ln_post", "post_layernorm"), ("ln_final", "final_layer_norm"),
            ("conv1", "embeddings.patch_embedding"), ("class_embedding", "embeddings.class_embedding"),
        ):  # fmt: skip
            rest = rest.replace(old, new)
        if rest == "positional_embedding":
            rest = "embeddings.position_embedding.weight"
        renamed[f"{tower}.{rest}"] = tensor
    renamed["visual_projection.weight"] = renamed.pop("vision_model.proj").T
    renamed["text_projection.weight"] = renamed.pop("text_model.text_projection").T
    renamed["logit_scale"] = renamed.pop("text_model.logit_scale")
    return renamed


def test_clip_is_transformers(tmp_path: Path) -> None:
    from transformers import CLIPConfig, CLIPModel

    towers = {"hidden_act": "gelu", "num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": 24}
    vision = towers | {"hidden_size": 48, "intermediate_size": 192, "patch_size": 8, "image_size": 32}
    text = towers | {
        "hidden_size": 32, "intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 16,
        "eos_token_id": 299,
    }  # fmt: skip
    other = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)).eval()
    missing, extra = other.load_state_dict(in_transformers(tiny.state("clip")), strict=False)
    assert not extra and all("position_ids" in name for name in missing)
    net = load_clip(clip_files(str(tiny.clip(tmp_path)), "--clip_path"), "--clip_path", True, CPU)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    ids = net.encode(["a cat", "photo of nothing at all and much more"])
    with torch.no_grad():
        images = other.get_image_features(pixels).pooler_output
        texts = other.get_text_features(ids).pooler_output
    close(net.images(pixels), images)
    close(net.texts(ids), texts)


def test_texts_are_cut_and_ended(tmp_path: Path) -> None:
    net = load_clip(clip_files(str(tiny.clip(tmp_path)), "--clip_path"), "--clip_path", True, CPU)
    words = tiny.tokenizer()
    start, end, cat = map(words.token_to_id, ("<|startoftext|>", "<|endoftext|>", "cat</w>"))
    short, long = net.encode(["Cat", "cat " * 40])
    assert short.tolist() == [start, cat, end] + [0] * 13
    assert long.tolist() == [start] + [cat] * 14 + [end]
    photo = words.token_to_id("photo</w>")
    led = net.encode(["cat"], "cat ")[0].tolist()
    assert led[:4] == [start, cat, cat, end] and photo not in led


def test_aesthetic_is_a_stack_of_linear_layers(tmp_path: Path) -> None:
    path = tiny.aesthetic(tmp_path, 24)

    class Published(nn.Module):
        """Dropouts between linear layers, as the head is defined."""

        def __init__(self) -> None:
            super().__init__()
            parts: list[nn.Module] = [nn.Linear(24, 32), nn.Dropout(0.2), nn.Linear(32, 16), nn.Dropout(0.2)]
            parts += [nn.Linear(16, 8), nn.Dropout(0.1), nn.Linear(8, 4), nn.Linear(4, 1)]
            self.layers = nn.Sequential(*parts)

    published = Published().eval()
    published.load_state_dict(torch.load(path, weights_only=True))
    embeddings = 7 * torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    wanted = published.layers(embeddings / embeddings.norm(dim=1, keepdim=True))
    close(Aesthetic(path, 24, CPU).scores(embeddings), wanted[:, 0])
    with pytest.raises(CheckpointError, match="reads 24 values, the CLIP model gives 25"):
        Aesthetic(path, 25, CPU)


def test_effnet_features_are_what_its_classifier_reads() -> None:
    net = EffNet(CPU)
    pixels = pictures.normalise(pictures.fine_resize(tiny.picture(224, 224), 224), MEAN, STD)[None]
    features = net.features(pixels)
    assert features.shape == (1, 1280)
    close(net._net._fc(features), net._net(pixels))


def test_preprocessing_is_the_published_one() -> None:
    """clean-fid's resize, CLIP's and LANTERN's by torchvision, HPS's by its own code."""
    expected, image = tensors("metrics/preprocessing"), tiny.picture(90, 61)
    close(pictures.fine_resize(image, 299)[:, ::23, ::23], expected["clean299"])
    assert torch.equal(pictures.to_tensor(pictures.short_side(image, 32)), expected["short32"])
    assert torch.equal(pictures.to_tensor(pictures.reference_crop(image, 40)), expected["lanczos40"])
    close(pictures.long_side(image, 32) / 255, expected["long32"])


def test_other_networks_are_refused_in_a_line(tmp_path: Path) -> None:
    vgg, inception = tiny.vgg(tmp_path), tiny.inception(tmp_path)
    for load in (
        lambda: Inception(vgg, CPU), lambda: VGG(inception, CPU), lambda: Aesthetic(vgg, 24, CPU),
        lambda: Clip(vgg, {}, None, CPU),
    ):  # fmt: skip
        with pytest.raises(CheckpointError) as caught:
            load()
        assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_heads_without_a_configuration(tmp_path: Path) -> None:
    """A bare state dict of a width that no published model has cannot be read by guessing."""
    folder = tiny.clip(tmp_path)
    (folder / "open_clip_config.json").unlink()
    with pytest.raises(
        CheckpointError, match="width of 48 does not say which: put its open_clip_config.json"
    ):
        load_clip(clip_files(str(folder), "--clip_path"), "--clip_path", True, CPU)
    (folder / "open_clip_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="fetch it again"):
        read_clip_config(folder / "open_clip_config.json")


def test_missing_weights_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.clip(tmp_path)
    with pytest.raises(UserError, match=r"--vgg_path: .* does not exist"):
        weights_file(str(tmp_path / "no.pth"), "--vgg_path")
    with pytest.raises(UserError, match="give the file itself"):
        weights_file(str(folder), "--vgg_path")
    (folder / "open_clip_model.safetensors").unlink()
    with pytest.raises(UserError, match="holds no open_clip_model.safetensors or"):
        clip_files(str(folder), "--clip_path")
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


def test_clip_of_a_hub_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only open_clip's files are fetched, each once."""
    folder, asked = tiny.clip(tmp_path), []

    def locate(text: str) -> Path:
        asked.append(text)
        return folder / text.rsplit("/", 1)[1]

    monkeypatch.setattr(sources, "locate", locate)
    files = clip_files("some/clip.model", "--clip_path")
    assert files.weights == folder / "open_clip_model.safetensors" and files.tokenizer and files.config
    assert [text.rsplit("/", 1)[1] for text in asked] == [
        "open_clip_config.json", "tokenizer.json", "open_clip_model.safetensors",
    ]  # fmt: skip
    assert clip_files("some/clip.model", "--clip_path", with_weights=False).weights is None
