"""The VQ models against outputs of the published code and against transformers' encoders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from adt_tree.errors import CheckpointError
from models.codecs.vq import VQConfig, VQModel, from_uint8, to_uint8
from models.codecs.vq16 import published_names, read_vq16
from tests.support.decoding import CPU
from tests.support.golden import FOLDER, close, tensors


def test_vqgan_decodes_as_the_published_code() -> None:
    """Pixels differ by at most 1e-4 before rounding and by one level after it, on square and oblong grids."""
    state = tensors("chameleon_vqgan/decoder-1") | tensors("chameleon_vqgan/decoder-2")
    expected = tensors("chameleon_vqgan/expected")
    config = VQConfig.from_yaml(FOLDER / "chameleon_vqgan" / "vqgan.yaml")
    model = VQModel(replace(config, num_embeddings=len(state["quantize.embedding.weight"]))).eval()
    # The recorded decoder, and the rows of the codebook that the goldens use.
    model.load_state_dict({**model.state_dict(), **state})
    with torch.no_grad():
        square = model.decode(expected["codes"].long().view(1, 32, 32))
        oblong = model.decode(expected["oblong_codes"].long().view(1, 6, 10))
    close(square, expected["decoded_pixels"])
    for image, name in ((square, "decoded_uint8"), (oblong, "oblong_uint8")):
        assert (to_uint8(image)[0].int() - expected[name].int()).abs().max() <= 1


@pytest.mark.parametrize("attention", [(), (16,), (32, 16)])
def test_vqgan_encoder_equals_transformers(attention: tuple[int, ...]) -> None:
    """A random ChameleonVQVAE loads by its own keys and gives the same codes."""
    from transformers import ChameleonVQVAE, ChameleonVQVAEConfig

    fields = {"base_channels": 32, "channel_multiplier": [1, 2], "num_res_blocks": 2, "embed_dim": 8,
              "latent_channels": 12, "num_embeddings": 64, "resolution": 32, "attn_type": "vanilla",
              "attn_resolutions": list(attention) or None, "in_channels": 3,
              "double_latent": False}  # fmt: skip
    torch.manual_seed(0)
    theirs = ChameleonVQVAE(ChameleonVQVAEConfig(**fields)).eval()
    ours = VQModel(VQConfig.from_hf(fields)).eval()
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert not unexpected and all(name.startswith("decoder.") for name in missing)
    torch.nn.init.normal_(ours.quantize.embedding.weight)
    theirs.quantize.load_state_dict(ours.quantize.state_dict())
    images = torch.rand(2, 3, 32, 32) * 2 - 1
    with torch.no_grad():
        output = theirs.encode(images)
        latents = ours.latents(images)
        expected = theirs.quant_conv(output.last_hidden_state).permute(0, 2, 3, 1)
        assert torch.equal(ours.encode(images).flatten(), output.image_tokens.flatten())
    torch.testing.assert_close(latents, expected, atol=1e-5, rtol=1e-4)


def test_pixels_are_truncated_not_rounded() -> None:
    """uint8 = trunc((clamp(x) + 1) / 2 * 255). Pixels that are turned into numbers and back change by at most
    one level."""
    values = torch.tensor([-2.0, -1.0, 0.0, 0.999, 1.0, 3.0]).view(1, 1, 1, 6).expand(1, 3, 1, 6)
    assert to_uint8(values)[0, 0, :, 0].tolist() == [0, 0, 127, 254, 255, 255]
    levels = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(1, 16, 16, 3)
    assert (to_uint8(from_uint8(levels)).int() - levels.int()).abs().max() <= 1


def recorded_file(path: Path) -> Path:
    """Writes the recorded model as published: its decoder, an encoder of the right shapes, and the usage
    counter."""
    state = tensors("llamagen/vq-1") | tensors("llamagen/vq-2") | tensors("llamagen/vq-3")
    latent, code = state["post_quant_conv.weight"].shape[:2]
    config = VQConfig(32, (2, 1), 1, code, latent, len(state["quantize.embedding.weight"]), 32, (16,))
    ours, names = VQModel(config).state_dict(), published_names(config)
    missing = {names[name]: tensor for name, tensor in ours.items() if names[name] not in state}
    assert all(name.startswith(("encoder.", "quant_conv.")) for name in missing)
    torch.save({"model": {**state, **missing, "quantize.codebook_used": torch.zeros(65536)}}, path)
    return path


def test_vq16_decodes_as_the_published_code(tmp_path: Path) -> None:
    codec = read_vq16(recorded_file(tmp_path / "vq_ds16_t2i.pt"), CPU)
    expected = tensors("llamagen/vq_expected")
    with torch.no_grad():
        images = codec.decode(expected["codes"].long().view(2, 8, 8))
    close(images, expected["decoded_image"])
    pixels = to_uint8(images, codec.config.rounds)
    assert torch.equal(pixels, expected["decoded_uint8"].permute(0, 2, 3, 1))
    assert not torch.allclose(codec.codebook.norm(dim=-1), torch.ones(256))


SHAPES = [
    {"base_channels": 32, "channel_multiplier": [1, 2], "num_res_blocks": 1, "embed_dim": 8,
     "latent_channels": 16, "num_embeddings": 48},
    {"base_channels": 64, "channel_multiplier": [1, 1, 2], "num_res_blocks": 2, "embed_dim": 4,
     "latent_channels": 24, "num_embeddings": 64},
    {"base_channels": 32, "channel_multiplier": [2, 1], "num_res_blocks": 3, "embed_dim": 6,
     "latent_channels": 8, "num_embeddings": 32},
]  # fmt: skip


# JanusVQVAE's names -> LlamaGen's
RENAMED = {".mid.block_1.": ".mid.0.", ".mid.attn_1.": ".mid.1.", ".mid.block_2.": ".mid.2.",
           ".down.": ".conv_blocks.", ".up.": ".conv_blocks.", ".block.": ".res."}  # fmt: skip


def from_janus(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of JanusVQVAE under LlamaGen's names."""
    renamed = {}
    for name, tensor in state.items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


@pytest.mark.parametrize("fields", SHAPES)
def test_vq16_equals_transformers(tmp_path: Path, fields: dict) -> None:
    """A random JanusVQVAE, saved under the published names, decodes the same codes to the same images."""
    from transformers import JanusVQVAE, JanusVQVAEConfig

    torch.manual_seed(0)
    side = 4
    config = JanusVQVAEConfig(**fields, num_patches=side, in_channels=3, out_channels=3)
    theirs = JanusVQVAE(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    path = tmp_path / "model.safetensors"
    save_file(from_janus(theirs.state_dict()), path)
    ours = read_vq16(path, CPU)
    codes = torch.randint(fields["num_embeddings"], (2, side * side))
    size = side << (len(fields["channel_multiplier"]) - 1)
    images = torch.rand(1, 3, size, size) * 2 - 1
    with torch.no_grad():
        close(ours.decode(codes.view(2, side, side)), theirs.decode(codes))
        latents = theirs.quant_conv(theirs.encoder(images)).permute(0, 2, 3, 1)
        close(ours.latents(images), latents)


def test_another_file_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {"norm.weight": torch.zeros(3)}}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"x\.pt: encoder\.conv_in\.weight"):
        read_vq16(tmp_path / "x.pt", CPU)
    path = recorded_file(tmp_path / "vq.pt")
    state = torch.load(path, weights_only=True)["model"]
    del state["decoder.conv_out.bias"]
    torch.save({"model": state}, path)
    with pytest.raises(CheckpointError, match=r"decoder\.conv_out\.bias"):
        read_vq16(path, CPU)
