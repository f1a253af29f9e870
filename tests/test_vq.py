"""The VQGAN against outputs of the published code and against transformers' encoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.codecs.vq import VQConfig, VQModel, from_uint8, to_uint8

GOLDENS = Path(__file__).parent / "goldens" / "chameleon_vqgan"


@pytest.fixture(scope="module")
def golden_model() -> VQModel:
    """The reference's tiny VQGAN: its decoder, and the rows of its codebook that the goldens use."""
    state = {**load_file(GOLDENS / "decoder-1.safetensors"), **load_file(GOLDENS / "decoder-2.safetensors")}
    config = VQConfig.from_yaml(GOLDENS / "vqgan.yaml")
    model = VQModel(replace(config, num_embeddings=len(state["quantize.embedding.weight"])))
    model.load_state_dict({**model.state_dict(), **state})
    return model.eval()


def test_decoding_matches_the_published_code(golden_model: VQModel) -> None:
    """Pixels within 1e-4 before rounding, within one level after it; square and oblong grids."""
    expected = load_file(GOLDENS / "expected.safetensors")
    with torch.no_grad():
        square = golden_model.decode(expected["codes"].long().view(1, 32, 32))
        oblong = golden_model.decode(expected["oblong_codes"].long().view(1, 6, 10))
    torch.testing.assert_close(square, expected["decoded_pixels"], atol=1e-4, rtol=1e-4)
    for image, name in ((square, "decoded_uint8"), (oblong, "oblong_uint8")):
        assert (to_uint8(image)[0].int() - expected[name].int()).abs().max() <= 1


@pytest.mark.parametrize("attention", [(), (16,), (32, 16)])
def test_encoder_equals_transformers(attention: tuple[int, ...]) -> None:
    """A random ChameleonVQVAE loads by its own keys and gives the same codes."""
    chameleon = pytest.importorskip("transformers.models.chameleon.modeling_chameleon")
    from transformers import ChameleonVQVAEConfig

    fields = {"base_channels": 32, "channel_multiplier": [1, 2], "num_res_blocks": 2, "embed_dim": 8,
              "latent_channels": 12, "num_embeddings": 64, "resolution": 32, "attn_type": "vanilla",
              "attn_resolutions": list(attention) or None, "in_channels": 3,
              "double_latent": False}  # fmt: skip
    torch.manual_seed(0)
    theirs = chameleon.ChameleonVQVAE(ChameleonVQVAEConfig(**fields)).eval()
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
    """uint8 = trunc((clamp(x) + 1) / 2 * 255); the way back is within one level."""
    values = torch.tensor([-2.0, -1.0, 0.0, 0.999, 1.0, 3.0]).view(1, 1, 1, 6).expand(1, 3, 1, 6)
    assert to_uint8(values)[0, 0, :, 0].tolist() == [0, 0, 127, 254, 255, 255]
    levels = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(1, 16, 16, 3)
    assert (to_uint8(from_uint8(levels)).int() - levels.int()).abs().max() <= 1


def test_config_edges() -> None:
    """Widths that the group norm cannot split and double latents are refused."""
    with pytest.raises(ValueError, match="base_channels"):
        VQConfig(base_channels=48)
    with pytest.raises(ValueError, match="double_latent"):
        VQConfig.from_hf({"double_latent": True})
    assert VQConfig().patch_size == 16
