"""Adopts a model that transformers has loaded: the new model shares its weights instead of reading files.

Tensors of the same layout are shared directly. Gate and up projections, and values, are stacked into new
matrices, and the parameters of the transformers model become views of these, so no weight is held twice. Only
queries and keys are copied, because their rows are in another order (models.llama_names). On a CPU,
decoding also copies all layers into oneDNN's layout (models.decoder.packed).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adt_tree.errors import CheckpointError
from models.checkpoint.hub import locate
from models.checkpoint.weights import read_weights, weights_in_memory
from models.family import Checkpoint, LoadOptions
from models.image_tokens import ImageTokens
from models.layouts import chameleon, emu3, glm_image, janus
from models.layouts.chat import ChatTokenizer
from models.model import Model
from models.registry import spec_of

# model_type -> model family
FAMILY_OF = {"janus": "janus_pro", "emu3": "emu3", "chameleon": "anole", "glm_image": "glm_image"}
# model_type -> layout, of the families whose images transformers' `generate` can make
WITH_IMAGE_TOKENS = {"emu3": emu3, "glm_image": glm_image}


def image_tokens(model: Any) -> ImageTokens:
    """Returns the description of images in a model's sequences of token ids. CheckpointError for a kind of
    model whose images transformers' `generate` cannot make."""
    kind = getattr(model.config, "model_type", None)
    if kind not in WITH_IMAGE_TOKENS:
        raise CheckpointError(
            f"custom_generate: a model of type {kind!r} is not supported, only "
            f"{', '.join(WITH_IMAGE_TOKENS)} are; Pipeline.from_transformers takes {', '.join(FAMILY_OF)}"
        )
    return WITH_IMAGE_TOKENS[kind].image_tokens(model.config.to_dict())


def adopt(model: Any, tokenizer: Any | None, options: LoadOptions) -> Model:
    """Returns a Model of a Janus-, Emu3-, Chameleon- or GlmImageForConditionalGeneration, with its dtype and
    device.

    tokenizer: the processor or tokenizer of transformers that belongs to the model. It may be None if the
    model_type is in WITH_IMAGE_TOKENS; prompts are then token ids. options: the fields read are target_size,
    ratio, height, width, drafter_path and, for Chameleon, tokenizer_base_path, the folder of Meta's VQGAN,
    because transformers has no pixel decoder for it. The transformers model stays usable, but must not be
    trained or moved: shared weights would change with it, copied ones would not. CheckpointError for another
    kind of model, or for one that is spread over several devices.
    """
    kind = getattr(model.config, "model_type", None)
    if kind not in FAMILY_OF:
        raise CheckpointError(
            f"a model of type {kind!r} cannot be adopted: the types that can are {', '.join(FAMILY_OF)}"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise CheckpointError(f"the {kind} model is spread over {len(devices)} devices: load it on one")
    spec, folder = spec_of(FAMILY_OF[kind]), Path(model.config._name_or_path or f"the {kind} model")
    drafter = locate(options.drafter_path) if options.drafter_path else None
    checkpoint = Checkpoint(spec, folder, drafter, model.dtype, devices.pop(), options)
    config, state = model.config.to_dict(), weights_in_memory(model, folder)
    if tokenizer is None:
        return WITH_IMAGE_TOKENS[kind].assemble(checkpoint, config, state, None)
    text_tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor holds one
    if kind == "chameleon":
        if folder.is_dir():  # its files may include a pixel decoder, which transformers leaves out
            state = state.beside(read_weights(folder))
        return chameleon.assemble(checkpoint, config, state, text_tokenizer.backend_tokenizer)
    if text_tokenizer.chat_template is None:
        text_tokenizer.chat_template = getattr(tokenizer, "chat_template", None)
    chat = ChatTokenizer(text_tokenizer, "the tokenizer", model.generation_config.to_dict())
    assemble = {"janus": janus.assemble, "emu3": emu3.assemble, "glm_image": glm_image.assemble}[kind]
    return assemble(checkpoint, config, state, lambda: chat)
