"""LlamaGen's VQ model against outputs of the published code and against transformers' JanusVQVAE."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.codecs.vq import VQConfig, VQModel, to_uint8
from models.codecs.vq16 import published_names, read_vq16
from models.errors import CheckpointError
from tests.golden import FOLDER, close, tensors

CPU = torch.device("cpu")


def recorded_file(path: Path) -> Path:
    """The recorded model as published: its decoder, an encoder of the right shapes, and the usage counter."""
    state = {}
    for part in (1, 2, 3):
        state |= load_file(FOLDER / "llamagen" / f"vq-{part}.safetensors")
    latent, code = state["post_quant_conv.weight"].shape[:2]
    config = VQConfig(32, (2, 1), 1, code, latent, len(state["quantize.embedding.weight"]), 32, (16,))
    own, names = VQModel(config).state_dict(), published_names(config)
    missing = {names[name]: tensor for name, tensor in own.items() if names[name] not in state}
    assert all(name.startswith(("encoder.", "quant_conv.")) for name in missing)
    torch.save({"model": {**state, **missing, "quantize.codebook_used": torch.zeros(65536)}}, path)
    return path


def test_decoding_matches_the_published_code(tmp_path: Path) -> None:
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
    """JanusVQVAE's tensors under LlamaGen's names."""
    renamed = {}
    for name, tensor in state.items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("fields", SHAPES)
def test_random_models_equal_transformers(tmp_path: Path, fields: dict, seed: int) -> None:
    """A random JanusVQVAE, saved under the published names, draws the same images of the same codes."""
    janus = pytest.importorskip("transformers.models.janus.modeling_janus")
    from transformers import JanusVQVAEConfig

    torch.manual_seed(seed)
    side = 4
    config = JanusVQVAEConfig(**fields, num_patches=side, in_channels=3, out_channels=3)
    theirs = janus.JanusVQVAE(config).eval()
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
    with pytest.raises(CheckpointError, match=r"x\.pt holds no VQ .* \(encoder\.conv_in\.weight\)"):
        read_vq16(tmp_path / "x.pt", CPU)
    path = recorded_file(tmp_path / "vq.pt")
    state = torch.load(path, weights_only=True)["model"]
    del state["decoder.conv_out.bias"]
    torch.save({"model": state}, path)
    with pytest.raises(CheckpointError, match=r"decoder\.conv_out\.bias \[3\] is missing"):
        read_vq16(path, CPU)
