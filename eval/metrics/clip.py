"""CLIP over open_clip's state dicts of plain vision transformers: OpenAI's B/32, L/14, g-14, HPS's H-14.

Keys: visual.conv1.weight, visual.class_embedding, visual.transformer.resblocks.N.*, text_projection, ...
Sizes come from the tensors. Heads and activation are not in them: they come from open_clip_config.json,
without one from the widths of the published models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from eval.metrics.tensors import checked
from models.errors import CheckpointError
from models.weights import Weights, read_weights

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Vision width of H, g, bigG -> width of a head. B and L were published under either activation: not guessed.
HEAD_WIDTH = {1280: 80, 1408: 88, 1664: 104}
TEXT_HEAD_WIDTH = 64
CONFIG = "open_clip_config.json"
START, END = "<|startoftext|>", "<|endoftext|>"


class _Transformer:
    """Pre-norm blocks: attention, then two linear layers."""

    def __init__(self, weights: Weights, heads: int, quick: bool) -> None:
        numbers = {int(name.split(".")[0]) for name in weights}
        names = ("ln_1", "ln_2", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")
        self._heads, self._quick = heads, quick
        self._blocks = [
            {name: (weights[f"{number}.{name}.weight"], weights[f"{number}.{name}.bias"]) for name in names}
            | {"in": (weights[f"{number}.attn.in_proj_weight"], weights[f"{number}.attn.in_proj_bias"])}
            for number in sorted(numbers)
        ]
        width = self._blocks[0]["ln_1"][0].shape[0]
        if width % heads:
            raise ValueError(f"width {width} does not divide into {heads} heads")

    def __call__(self, hidden: Tensor, causal: bool) -> Tensor:
        """hidden [B, T, D] -> the same shape."""
        for block in self._blocks:
            hidden = hidden + self._attend(_norm(hidden, block["ln_1"]), block, causal)
            inner = F.linear(_norm(hidden, block["ln_2"]), *block["mlp.c_fc"])
            inner = inner * torch.sigmoid(1.702 * inner) if self._quick else F.gelu(inner)
            hidden = hidden + F.linear(inner, *block["mlp.c_proj"])
        return hidden

    def _attend(self, hidden: Tensor, block: Mapping[str, Any], causal: bool) -> Tensor:
        parts = F.linear(hidden, *block["in"]).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self._heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return F.linear(mixed.transpose(1, 2).flatten(2), *block["attn.out_proj"])


def _norm(hidden: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
    weight, bias = parts
    return F.layer_norm(hidden, hidden.shape[-1:], weight, bias)


class Clip:
    """Both towers of a CLIP model, and its tokenizer."""

    def __init__(
        self, path: Path, config: Mapping[str, Any], tokenizer: Tokenizer | None, device: torch.device
    ) -> None:
        """path: weights. config: open_clip_config.json, {} without it. tokenizer: None if no text is read."""
        weights = read_weights(path)
        self.digest = weights.digest()
        self._tokenizer, self._device = tokenizer, device
        with checked(path, "open_clip state dict of a plain vision transformer"):
            self._build(weights.placed(device, torch.float32), *_heads(weights, config))
        prepared = config.get("preprocess_cfg", {})
        self.mean, self.std = prepared.get("mean", MEAN), prepared.get("std", STD)
        if tokenizer is not None:
            known = tokenizer.get_vocab_size()
            ids = [tokenizer.token_to_id(word) for word in (START, END)]
            if None in ids or known > self._tokens.shape[0]:
                raise CheckpointError(
                    f"{path}: the tokenizer beside it has {known} tokens, the model {self._tokens.shape[0]}: "
                    f"give CLIP's own, with {START} and {END}"
                )
            self._start, self._end = ids

    def _build(self, weights: Weights, heads: int, text_heads: int, quick: bool) -> None:
        vision = weights.below("visual.")
        self._patches, self._class = vision["conv1.weight"], vision["class_embedding"]
        self._places, self._proj = vision["positional_embedding"], vision["proj"]
        self._pre, self._post = (
            tuple(vision[f"{n}.{k}"] for k in ("weight", "bias")) for n in ("ln_pre", "ln_post")
        )
        self._vision = _Transformer(vision.below("transformer.resblocks."), heads, quick)
        self._tokens, self._positions = weights["token_embedding.weight"], weights["positional_embedding"]
        self._final = (weights["ln_final.weight"], weights["ln_final.bias"])
        self._text_proj = weights["text_projection"]
        self._text = _Transformer(weights.below("transformer.resblocks."), text_heads, quick)
        cells = len(self._places) - 1
        self.side = round(cells**0.5) * self._patches.shape[-1]
        if round(cells**0.5) ** 2 != cells:
            raise ValueError(f"its {cells} patches make no square")

    @property
    def width(self) -> int:
        """Values of an embedding."""
        return self._proj.shape[1]

    def images(self, pixels: Tensor) -> Tensor:
        """Normalised pixels [B, 3, side, side] -> embeddings [B, D], not of unit length."""
        patch = self._patches.shape[-1]
        cells = F.conv2d(pixels, self._patches, stride=patch).flatten(2).transpose(1, 2)
        hidden = torch.cat((self._class.expand(len(cells), 1, -1), cells), 1) + self._places
        hidden = self._vision(_norm(hidden, self._pre), causal=False)
        return _norm(hidden[:, 0], self._post) @ self._proj

    def texts(self, ids: Tensor) -> Tensor:
        """Token ids [B, T] of encode -> embeddings [B, D], taken at the end token."""
        hidden = self._tokens[ids] + self._positions[: ids.shape[1]]
        hidden = _norm(self._text(hidden, causal=True), self._final)
        ends = ids.eq(self._end).int().argmax(1)
        return hidden[torch.arange(len(ids), device=ids.device), ends] @ self._text_proj

    def encode(self, texts: Sequence[str], lead: str = "") -> Tensor:
        """Token ids [B, context]: start, lead, text, end, zeros; what is too long is cut and ended."""
        if self._tokenizer is None:
            raise ValueError("this model was loaded without its tokenizer")
        context, head = len(self._positions), self._words(lead)
        rows = torch.zeros(len(texts), context, dtype=torch.long)
        for row, text in zip(rows, texts, strict=True):
            ids = [self._start, *head, *self._words(text)][: context - 1] + [self._end]
            row[: len(ids)] = torch.tensor(ids)
        return rows.to(self._device)

    def _words(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.encode(text, add_special_tokens=False).ids if text else []


def _heads(weights: Weights, config: Mapping[str, Any]) -> tuple[int, int, bool]:
    """Vision heads, text heads and whether the activation is QuickGELU."""
    shapes, model = weights.shapes, config.get("model_cfg", {})
    width, text = shapes["visual.class_embedding"][0], shapes["ln_final.weight"][0]
    vision_cfg, text_cfg = model.get("vision_cfg", {}), model.get("text_cfg", {})
    own = vision_cfg.get("head_width", 64 if model else HEAD_WIDTH.get(width))
    if own is None:
        raise ValueError(f"a width of {width} does not say which: put its {CONFIG} beside it")
    heads = text_cfg.get("heads", 8 if model else text // TEXT_HEAD_WIDTH)
    return width // own, heads, bool(model.get("quick_gelu", False))


def read_clip_config(path: Path | None) -> dict[str, Any]:
    """open_clip_config.json; {} without one. CheckpointError if it is damaged."""
    if path is None or not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content.get("model_cfg"), dict):
            raise ValueError("it has no model_cfg")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is no configuration of open_clip ({error}): fetch it again") from None
    return content
