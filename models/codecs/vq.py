"""Chameleon's VQGAN, which turns images into codes and back. Tensor names follow transformers' ChameleonVQVAE
in the encoder and Meta's vqgan.ckpt in the decoder.

Dimensions: B images, C channels, H x W pixels, h x w cells (the grid), V codes, E size of a code vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.checkpoint.config import integer, integers
from models.checkpoint.files import read_text

NUM_GROUPS = 32
NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class VQConfig:
    """Shape of a VQGAN, with the field names of vq_config in transformers. Another codec states here how many
    codes it has, how large its cells and feature maps are, and how pixels become bytes."""

    base_channels: int = 128
    channel_multiplier: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    embed_dim: int = 256
    latent_channels: int = 256
    num_embeddings: int = 8192
    resolution: int = 512
    attn_resolutions: tuple[int, ...] = ()
    attn_type: str = "vanilla"
    in_channels: int = 3
    rounds: bool = False  # True: pixels are rounded to 8 bits; False: truncated
    normalises: bool = False  # code vectors are l2-normalised before use
    frames: int = 1  # frames that decoding makes of one image: more than one in a video codec

    @property
    def patch_size(self) -> int:
        """Side of a cell in pixels."""
        return 2 ** (len(self.channel_multiplier) - 1)

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> VQConfig:
        """Reads vq_config of config.json. KeyError or ValueError names a field that is missing or wrong."""
        return cls(
            base_channels=integer(fields, "base_channels"),
            embed_dim=integer(fields, "embed_dim"),
            latent_channels=integer(fields, "latent_channels"),
            num_res_blocks=integer(fields, "num_res_blocks"),
            num_embeddings=integer(fields, "num_embeddings"),
            resolution=integer(fields, "resolution"),
            channel_multiplier=integers(fields, "channel_multiplier"),
            attn_resolutions=integers(fields, "attn_resolutions"),
            attn_type=fields.get("attn_type", "vanilla"),
            in_channels=integer(fields, "in_channels", default=3),
        )

    @classmethod
    def from_yaml(cls, path: Path) -> VQConfig:
        """Reads Meta's vqgan.yaml, in the layout of taming-transformers (model.params.ddconfig)."""
        import yaml

        params = yaml.safe_load(read_text(path))["model"]["params"]
        ddconfig = params["ddconfig"]
        yaml_names = {
            "base_channels": "ch", "channel_multiplier": "ch_mult", "num_res_blocks": "num_res_blocks",
            "latent_channels": "z_channels", "resolution": "resolution",
            "attn_resolutions": "attn_resolutions", "in_channels": "in_channels",
        }  # fmt: skip
        fields = {name: ddconfig[key] for name, key in yaml_names.items()}
        return cls.from_hf({**fields, "embed_dim": params["embed_dim"], "num_embeddings": params["n_embed"]})


def group_norm(channels: int) -> nn.GroupNorm:
    """Returns the normalisation that every block uses."""
    return nn.GroupNorm(NUM_GROUPS, channels, eps=NORM_EPS)


class ResnetBlock(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x)))))). A 1x1 convolution adapts x if the number of channels
    changes."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.norm1 = group_norm(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.norm2 = group_norm(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        if channels_in != channels_out:
            self.nin_shortcut = nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C_in, H, W] -> [B, C_out, H, W]."""
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        return hidden + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class AttnBlock(nn.Module):
    """x + proj_out(attention(norm(x))), with a single head over all positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = group_norm(channels)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]. Attention scores are scaled by C^-1/2."""
        hidden = self.norm(x)
        q, k, v = (conv(hidden).flatten(2).transpose(1, 2) for conv in (self.q, self.k, self.v))
        hidden = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(hidden.transpose(1, 2).reshape(x.shape))


class Downsample(nn.Module):
    """Halves the side by a convolution, with zero padding only on the right and at the bottom."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H/2, W/2]."""
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Doubles the side by nearest-neighbour interpolation, followed by a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, 2H, 2W]."""
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Middle(nn.Module):
    """Two residual blocks at the lowest resolution with attention between them."""

    def __init__(self, channels: int, attn_type: str) -> None:
        super().__init__()
        self.block_1 = ResnetBlock(channels, channels)
        self.attn_1 = AttnBlock(channels) if attn_type == "vanilla" else nn.Identity()
        self.block_2 = ResnetBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, C, h, w]."""
        return self.block_2(self.attn_1(self.block_1(x)))


class Level(nn.Module):
    """Residual blocks at one resolution, each followed by attention if `attention` is set. The encoder or
    decoder that owns the level adds a `downsample` or `upsample` module."""

    def __init__(self, channels_in: int, channels_out: int, num_blocks: int, attention: bool) -> None:
        super().__init__()
        widths = [channels_in] + [channels_out] * num_blocks
        self.block = nn.ModuleList(ResnetBlock(a, b) for a, b in pairwise(widths))
        self.attn = nn.ModuleList(AttnBlock(channels_out) for _ in range(num_blocks if attention else 0))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C_in, H, W] -> [B, C_out, H, W]."""
        for index, block in enumerate(self.block):
            x = block(x)
            if len(self.attn):
                x = self.attn[index](x)
        return x


class Encoder(nn.Module):
    """Encodes images [B, 3, H, W] in [-1, 1] as latents [B, latent_channels, h, w]."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.base_channels * m for m in (1, *config.channel_multiplier)]
        last = len(config.channel_multiplier) - 1
        self.conv_in = nn.Conv2d(config.in_channels, config.base_channels, 3, padding=1)
        self.down = nn.ModuleList()
        for i in range(last + 1):
            attention = config.attn_type == "vanilla" and config.resolution >> i in config.attn_resolutions
            level = Level(widths[i], widths[i + 1], config.num_res_blocks, attention)
            if i < last:
                level.downsample = Downsample(widths[i + 1])
            self.down.append(level)
        self.mid = Middle(widths[-1], config.attn_type)
        self.norm_out = group_norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], config.latent_channels, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, latent_channels, h, w]."""
        x = self.conv_in(images)
        for level in self.down:
            x = level(x)
            if hasattr(level, "downsample"):
                x = level.downsample(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    """Decodes latents [B, latent_channels, h, w] to images [B, 3, H, W], nominally in [-1, 1]."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.base_channels * m for m in config.channel_multiplier]
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(config.latent_channels, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1], config.attn_type)
        self.up = nn.ModuleList()
        for i in range(last + 1):
            attention = config.attn_type == "vanilla" and config.resolution >> i in config.attn_resolutions
            level = Level(widths[min(i + 1, last)], widths[i], config.num_res_blocks + 1, attention)
            if i > 0:
                level.upsample = Upsample(widths[i])
            self.up.append(level)
        self.norm_out = group_norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], config.in_channels, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        """[B, latent_channels, h, w] -> [B, 3, H, W]."""
        x = self.mid(self.conv_in(latents))
        for level in reversed(self.up):
            x = level(x)
            if hasattr(level, "upsample"):
                x = level.upsample(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Quantizer(nn.Module):
    """The codebook, `embedding.weight` [V, E]."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.num_embeddings, config.embed_dim)
        self.normalises = config.normalises

    def vectors(self) -> Tensor:
        """Returns the vectors that codes are decoded to [V, E], l2-normalised if the model does so."""
        return F.normalize(self.embedding.weight, dim=-1) if self.normalises else self.embedding.weight

    def nearest(self, vectors: Tensor) -> Tensor:
        """Returns the code nearest to each of the vectors: [..., E] -> [...] int64. The squared Euclidean
        distance is computed as |v|^2 + |c|^2 - 2 v.c, as published."""
        flat, book = vectors.reshape(-1, vectors.shape[-1]), self.vectors()
        distance = flat.square().sum(1, keepdim=True) + book.square().sum(1) - 2 * flat @ book.T
        return distance.argmin(1).view(vectors.shape[:-1])


class VQModel(nn.Module):
    """The whole codec: encoder, codebook and decoder."""

    missing = ""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quantize = Quantizer(config)
        self.quant_conv = nn.Conv2d(config.latent_channels, config.embed_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.embed_dim, config.latent_channels, 1)

    @property
    def codebook(self) -> Tensor:
        """The stored code vectors [V, E], never normalised. Published tables of nearest codes are computed
        from them."""
        return self.quantize.embedding.weight

    def latents(self, images: Tensor) -> Tensor:
        """Returns the vectors [B, h, w, E] of images [B, 3, H, W] in [-1, 1], before quantisation."""
        return self.quant_conv(self.encoder(images)).permute(0, 2, 3, 1)

    def encode(self, images: Tensor) -> Tensor:
        """Returns the codes [B, h, w] int64 of images [B, 3, H, W] in [-1, 1]."""
        return self.quantize.nearest(self.latents(images))

    def decode_vectors(self, vectors: Tensor) -> Tensor:
        """Returns the images [B, 3, H, W] of vectors [B, h, w, E], not clamped to [-1, 1]."""
        return self.decoder(self.post_quant_conv(vectors.permute(0, 3, 1, 2)))

    def decode(self, codes: Tensor) -> Tensor:
        """Returns the images [B, 3, H, W] of codes [B, h, w] int64, not clamped to [-1, 1]."""
        return self.decode_vectors(F.embedding(codes, self.quantize.vectors()))


def to_uint8(images: Tensor, rounds: bool = False) -> Tensor:
    """Converts images [B, 3, H, W] to uint8 [B, H, W, 3]: clamps to [-1, 1], scales to 0 to 255 and
    truncates, or rounds if `rounds` is set."""
    pixels = (images.detach().float().clamp(-1, 1) + 1) / 2 * 255
    pixels = (pixels + 0.5).clamp(max=255) if rounds else pixels
    return pixels.to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def from_uint8(images: Tensor) -> Tensor:
    """Converts uint8 images [B, H, W, 3] to float32 [B, 3, H, W] in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1
