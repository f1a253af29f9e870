"""A model that transformers has loaded, taken over as it lies in memory.

What has one layout on both sides is shared. Gate and up, and values, lie in fused matrices here: those are
made, and the other model's parameters become views of them, so neither stands twice. Only queries and keys
are copied, because their rows are in another order (models.layouts.chameleon). On a CPU decoding packs the
layers in oneDNN's own layout (models.packed), which is a copy of them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.anole import grid_of
from models.checkpoint.folder import read_fields
from models.checkpoint.hub import locate
from models.checkpoint.weights import read_weights, weights_in_memory
from models.codecs.vqgan import read_codec
from models.errors import CheckpointError
from models.layouts import emu3, janus
from models.layouts.chameleon import block_from_chameleon, decoder_config
from models.layouts.chameleon_files import ChameleonFiles, Prompts, TokenLayout, check_tokenizer
from models.layouts.chat import ChatTokenizer
from models.model import Model
from models.registry import spec_of
from models.spec import Checkpoint, LoadOptions
from models.transformer import DecoderConfig

FAMILIES = {"janus": "janus_pro", "emu3": "emu3", "chameleon": "anole"}  # model_type -> ours


def adopt(theirs: Any, tokenizer: Any, options: LoadOptions) -> Model:
    """The model of a Janus-, Emu3- or ChameleonForConditionalGeneration, in its own type on its own device.

    tokenizer: its processor or tokenizer, of transformers. options: target_size, ratio, drafter_path and,
    for Chameleon, tokenizer_base_path, where Meta's VQGAN lies. The other model stays usable; training or
    moving it moves ours, or parts them. CheckpointError for another kind of model, or one over several
    devices.
    """
    kind = getattr(theirs.config, "model_type", None)
    if kind not in FAMILIES:
        raise CheckpointError(
            f"a model of type {kind!r} cannot be adopted: give one of {', '.join(FAMILIES)}"
        )
    devices = {parameter.device for parameter in theirs.parameters()}
    if len(devices) != 1:
        raise CheckpointError(f"the {kind} model is spread over {len(devices)} devices: load it on one")
    spec, folder = spec_of(FAMILIES[kind]), Path(theirs.config._name_or_path or f"the {kind} model")
    drafter = locate(options.drafter_path) if options.drafter_path else None
    place = Checkpoint(spec, folder, drafter, theirs.dtype, devices.pop(), options)
    config, state = theirs.config.to_dict(), weights_in_memory(theirs.state_dict(), folder)
    text = getattr(tokenizer, "tokenizer", tokenizer)
    if text.chat_template is None:
        text.chat_template = getattr(tokenizer, "chat_template", None)
    chat = ChatTokenizer(text, "the tokenizer")
    if kind == "chameleon":
        return _chameleon(theirs, text, place, config)
    inner = theirs.model.language_model if kind == "janus" else theirs.model.text_model
    layers = partial(_layers, inner=inner)
    if kind == "emu3":
        return emu3.assemble(place, config, state, lambda: chat, layers)
    made = janus.assemble(place, config, state, lambda: chat, theirs.generation_config.to_dict(), layers)
    inner.embed_tokens.weight.data = made.decoder.embed.weight.data[: made.first_code]
    return made


def _chameleon(theirs: Any, text: Any, place: Checkpoint, config: Mapping[str, Any]) -> Model:
    """Anole: transformers' Chameleon has no pixel decoder, so that one is read from Meta's files."""
    folder, state = place.folder, weights_in_memory(theirs.state_dict(), place.folder)
    layout, shape = read_fields(folder, lambda: (TokenLayout.read(config), decoder_config(config)))
    tokenizer = text.backend_tokenizer
    check_tokenizer(tokenizer, config["vocabulary_map"], shape.vocab_size)
    stored = read_weights(folder) if folder.is_dir() else state  # a decoder that transformers left out
    codec = read_codec(config, stored, folder, place.places, place.device)
    layers = partial(_layers, inner=theirs.model)
    files = ChameleonFiles(place, config, tokenizer, layout, shape, state, codec, layers)
    begin = layout.begin_of_image
    prompts = Prompts(tokenizer, layout, (begin,), (layout.begin_of_text, begin))
    return files.model(read_fields(folder, lambda: grid_of(config)), prompts)


@torch.no_grad()
def _layers(state: Mapping[str, Tensor], prefix: str, config: DecoderConfig, inner: Any) -> dict[str, Tensor]:
    """Layers and final norm from the modules themselves, one after another, each sharing what it can."""
    ours = {"norm.weight": inner.norm.weight.detach()}
    values = config.num_kv_heads * config.head_dim
    for number, layer in enumerate(inner.layers):
        block = block_from_chameleon(layer.state_dict(), "", config)
        gate, up = block["mlp.gate_up.weight"].chunk(2)
        layer.mlp.gate_proj.weight.data, layer.mlp.up_proj.weight.data = gate, up
        layer.self_attn.v_proj.weight.data = block["attention.qkv.weight"][-values:]
        ours.update({f"blocks.{number}.{name}": tensor for name, tensor in block.items()})
    return ours
