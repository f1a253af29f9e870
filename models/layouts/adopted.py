"""A model that transformers has loaded, taken over as it lies in memory.

What has one layout on both sides is shared. Gate and up, and values, lie in fused matrices here: those are
made, and the other model's parameters become views of them, so neither stands twice. Only queries and keys
are copied, because their rows are in another order (models.layouts.llama). On a CPU decoding packs the
layers in oneDNN's own layout (models.packed), which is a copy of them all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adt_tree.errors import CheckpointError
from models.checkpoint.hub import locate
from models.checkpoint.weights import read_weights, weights_in_memory
from models.layouts import chameleon, emu3, janus
from models.layouts.chat import ChatTokenizer
from models.model import Model
from models.registry import spec_of
from models.spec import Checkpoint, LoadOptions

FAMILIES = {"janus": "janus_pro", "emu3": "emu3", "chameleon": "anole"}  # model_type -> ours


def adopt(theirs: Any, tokenizer: Any, options: LoadOptions) -> Model:
    """The model of a Janus-, Emu3- or ChameleonForConditionalGeneration, in its own type on its own device.

    tokenizer: its processor or tokenizer, of transformers. options: target_size, ratio, drafter_path and,
    for Chameleon, tokenizer_base_path, where Meta's VQGAN lies: transformers has no pixel decoder for it. The
    other model stays usable; training or moving it moves ours, or parts them. CheckpointError for another
    kind of model, or one over several devices.
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
    config, state = theirs.config.to_dict(), weights_in_memory(theirs, folder)
    text = getattr(tokenizer, "tokenizer", tokenizer)
    if kind == "chameleon":
        if folder.is_dir():  # perhaps with a pixel decoder
            state = state.beside(read_weights(folder))
        return chameleon.assemble(place, config, state, text.backend_tokenizer)
    if text.chat_template is None:
        text.chat_template = getattr(tokenizer, "chat_template", None)
    chat = ChatTokenizer(text, "the tokenizer", theirs.generation_config.to_dict())
    assemble = emu3.assemble if kind == "emu3" else janus.assemble
    return assemble(place, config, state, lambda: chat)
