"""Adopts a model that transformers has loaded: the new model shares its weights instead of reading files.

Tensors of the same layout are shared directly. Gate and up projections, and values, are stacked into new
matrices, and the parameters of the transformers model become views of these, so no weight is held twice. Only
queries and keys are copied, because their rows are in another order (models.llama_names). On a CPU,
decoding also copies all layers into oneDNN's layout (models.decoder.packed).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import fields, replace
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import ref

import torch

from adt_tree.errors import CheckpointError, UserError, shown
from models.checkpoint.config import refuse_quantised
from models.checkpoint.hub import locate
from models.checkpoint.weights import read_weights, weights_in_memory
from models.family import DEFAULTS, Checkpoint, InMemory, LoadOptions
from models.image_tokens import ImageTokens
from models.layouts import emu3, glm_image
from models.layouts.chat import ChatTokenizer
from models.model import DTYPES, Model
from models.registry import spec_of

READ = {"target_size", "drafter_path", "tokenizer_base_path", "need_drafter", "cuda_graphs"}  # of LoadOptions
ADOPTION = RLock()  # held while a model is taken over, which moves its parameters
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
    model_type is in WITH_IMAGE_TOKENS; prompts are then token ids. options: those in READ are read; for
    Chameleon, tokenizer_base_path is the folder of Meta's VQGAN, because transformers has no pixel decoder
    for it. The transformers model stays usable, but must not be moved. If its weights change in place, shared
    ones change and copied ones do not, so prompts are refused from then on. CheckpointError for another kind
    of model, for one that is quantised, has hooks or cannot be decoded as it is, and for options that are not
    read.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in FAMILY_OF:
        raise CheckpointError(
            f"a model of type {kind!r} cannot be adopted: the types that can are {', '.join(FAMILY_OF)}"
        )
    spec, title = spec_of(FAMILY_OF[kind]), f"the {kind} model"
    if not model.can_generate():
        raise CheckpointError(
            f"{title} is a {type(model).__name__}, a part: give the whole model, with its head"
        )
    _refuse_hooks(model, title)
    refuse_quantised(model.config.to_dict(), title)
    device, precision = _placed(model, title)
    given = {"device": str(device), "precision": precision}
    for name in (field.name for field in fields(LoadOptions)):
        read = name in READ or name in spec.options
        value = getattr(options, name)
        if not read and value not in (getattr(DEFAULTS, name), given.get(name)):
            raise CheckpointError(f"{name} {value}: {title} is loaded already; leave the option out")
    folder = Path(model.config._name_or_path or title)
    drafter = locate(options.drafter_path) if options.drafter_path else None
    state = weights_in_memory(model, folder)
    if kind == "chameleon" and folder.is_dir():  # its files may include pixels, which transformers leaves out
        state = state.beside(read_weights(folder))
    loaded = InMemory(model.config.to_dict(), state, _tokenizer(kind, tokenizer, model))
    ours = spec.reader.load(Checkpoint(spec, folder, drafter, DTYPES[precision], device, options, loaded))
    return replace(ours, check=unchanged(model))


def versions(model: Any) -> tuple[int, ...]:
    """Returns numbers that grow when the parameters are changed in place."""
    return tuple(0 if part.is_inference() else part._version for part in model.parameters())


def unchanged(model: Any) -> Callable[[], None]:
    """Returns a function that raises UserError once the parameters of a model have changed. It keeps no model
    alive."""
    kept, at = ref(model), versions(model)

    def check() -> None:
        if (present := kept()) is not None and versions(present) != at:
            raise UserError("the model of transformers has changed since: call from_transformers again")

    return check


def _tokenizer(kind: str, tokenizer: Any, model: Any) -> Any:
    """Returns a tokenizer or the one in a processor in the form that the layout of a model reads."""
    if tokenizer is None and kind in WITH_IMAGE_TOKENS:
        return None
    text_tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if not callable(text_tokenizer):
        raise CheckpointError(
            f"tokenizer {shown(tokenizer)}: give the tokenizer or processor of the {kind} model"
        )
    if kind == "chameleon":
        return text_tokenizer.backend_tokenizer
    if text_tokenizer.chat_template is None:
        text_tokenizer = copy(text_tokenizer)  # the caller's stays as it is
        text_tokenizer.chat_template = getattr(tokenizer, "chat_template", None)
    return ChatTokenizer(text_tokenizer, "the tokenizer", model.generation_config.to_dict())


def _refuse_hooks(model: Any, title: str) -> None:
    """Raises CheckpointError for a forward hook, by which quantisation, offloading and adapters change what a
    module computes. Those of transformers only store outputs."""
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        foreign = [hook for hook in hooks if not hook.__module__.startswith("transformers.")]
        if foreign or hasattr(module, "_hf_hook"):  # the second: of accelerate
            raise CheckpointError(f"{title} has a hook on {name or 'itself'}: remove it, or merge its effect")


def _placed(model: Any, title: str) -> tuple[torch.device, str]:
    """Returns the device and the precision of a model. CheckpointError if it has several devices, or weights
    of a dtype that is not in DTYPES."""
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) != 1 or "meta" in devices:
        raise CheckpointError(f"{title} lies on {', '.join(sorted(devices))}: load it on one device")
    precisions = {dtype: name for name, dtype in DTYPES.items()}
    for name, parameter in model.named_parameters():
        if parameter.dtype not in precisions:
            choices = ", ".join(map(str, precisions))
            raise CheckpointError(f"{title} has {name} in {parameter.dtype}: load it in one of {choices}")
    return torch.device(devices.pop()), precisions[model.dtype]
