"""The decoding method that transformers' `model.generate(..., custom_generate=...)` calls.

    from adt_tree import generate

    ids = model.generate(**inputs, max_new_tokens=10_000, custom_generate=generate, method="ar", seed=7)

The folder form, custom_generate="path or hub id", reaches the same function by custom_generate/generate.py.
It serves GLM-Image and Emu3. Chameleon's `generate` masks the codes, and Janus generates images in a separate
loop, so neither calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adt_tree.errors import as_seed
from adt_tree.generation.adopted import Adopted
from adt_tree.generation.call_settings import CallSettings, check, check_allowed, refuse, unpadded
from adt_tree.method import Method
from adt_tree.roles import Request
from models.target import Prompt

# Arguments with which `generate` fetched this function's folder; they are not for the model.
LOADING = ("revision", "token", "cache_dir", "force_download", "proxies", "local_files_only", "repo_type")


def generate(
    model: Any,
    input_ids: Tensor | None = None,
    *,
    method: str | Method | None = None,
    seed: int | None = None,
    **arguments: Any,
) -> Any:
    """Returns the result of model.generate(...) for images: prompts with their left padding, the images'
    token ids, and the tokens after them as far as max_new_tokens reaches, [B, T] int64; with
    return_dict_in_generate these are the `sequences` of a GenerateDecoderOnlyOutput.

    Only codes may come inside an image. At temperature 0 the tokens are those of `generate` under that
    constraint; otherwise they have its distribution. method: a name of adt_tree.METHODS, or a Method, whose
    sampling is replaced by that of `generate`; None: the model's default. seed: row n has seed + n;
    None: a seed from torch's global generator. arguments: those that transformers passes to any decoding
    method. UserError for those of them that cannot be honoured.
    """
    if "inputs" in arguments:  # the folder form: `generate` passes its arguments on before it prepares them
        return _prepare(model, input_ids, arguments, method, seed)
    from transformers.generation import GenerateDecoderOnlyOutput

    assert input_ids is not None
    check(input_ids, arguments)
    settings = CallSettings.read(arguments)
    with torch.no_grad():
        rows: Any = _decode(model, input_ids, arguments, settings, method, seed)
    as_dict = arguments["generation_config"].return_dict_in_generate
    return GenerateDecoderOnlyOutput(sequences=rows) if as_dict else rows


def _prepare(
    model: Any,
    input_ids: Tensor | None,
    arguments: dict[str, Any],
    method: str | Method | None,
    seed: int | None,
) -> Any:
    """Calls `generate` again with this file's function as its decoding method, so that transformers prepares
    the inputs and the effective configuration as for any decoding method."""
    from transformers import GenerationMixin

    for name in ("streamer", "assistant_model"):
        if arguments.get(name) is not None:  # a reader of the streamer would wait for ever
            refuse(f"{name}: it is not supported; leave it out")
    passed_on = {name: value for name, value in arguments.items() if name not in LOADING}
    if input_ids is not None:
        passed_on["input_ids"] = input_ids
    decode: Any = GenerationMixin.generate  # its types do not declare the arguments of a decoding method
    return decode(model, custom_generate=generate, method=method, seed=seed, **passed_on)


def _decode(
    model: Any,
    input_ids: Tensor,
    arguments: dict[str, Any],
    settings: CallSettings,
    method: str | Method | None,
    seed: int | None,
) -> Tensor:
    """Returns prompts, images and the tokens after them, [B, T] int64."""
    start, mask = input_ids.shape[1], arguments.get("attention_mask")
    prompts = unpadded("attention_mask", input_ids, mask)
    adopted = Adopted.of(model)
    tokens = adopted.tokens
    grid = tokens.read_grid(prompts, arguments.get("image_grid_thw"))
    length, room = tokens.length(grid), settings.max_length - start
    if room < length:
        refuse(f"max_new_tokens {room}: an image of {grid.height} x {grid.width} codes needs {length}")
    if settings.stops.intersection((*tokens.codes, *(() if tokens.row_end is None else (tokens.row_end,)))):
        refuse("eos_token_id: it names a token inside images, which would end there; leave it out")
    if settings.sampling.branches > 1 and not adopted.pipe.model.prompts.guided:
        refuse(f"guidance_scale {settings.sampling.guidance}: this model has no guidance; leave it out")
    closing = list(tokens.closing[: room - length])
    if settings.allowed:
        # Most such functions look at positions alone, so images of code 0 show most faults before decoding.
        blank = tokens.sequence([0] * grid.size, grid) + closing
        check_allowed(settings.allowed, with_rows(input_ids, [blank] * len(prompts)), start, tokens.codes)
    if seed is None:
        seed = 0 if settings.sampling.greedy else int(torch.randint(2**31, (), device="cpu"))
    seed = as_seed(seed)
    pairs = zip(prompts, unconditional(settings, input_ids), strict=True)
    requests = [Request(str(row), Prompt(*pair), as_seed(seed + row)) for row, pair in enumerate(pairs)]
    chosen = adopted.method(method, settings.sampling)
    images = adopted.pipe.decode(chosen, requests, len(requests), grid)
    rows = with_rows(input_ids, [tokens.sequence(image.codes, grid) + closing for image in images])
    if settings.allowed:
        check_allowed(settings.allowed, rows, start, tokens.codes)
    if tokens.open_end and room > length:
        rows = torch.cat((rows, next_tokens(model, rows, start, arguments, seed)), dim=1)
    return rows


def next_tokens(model: Any, rows: Tensor, start: int, arguments: dict[str, Any], seed: int) -> Tensor:
    """Returns the tokens [B, 1] that the model itself chooses after rows [B, T], among all of its tokens.

    The prompts are the first `start` columns. The model reads them in one pass and the images in a second,
    because in a pass with the prompt the codes would get other positions.
    """
    prompt, image, mask = rows[:, :start], rows[:, start:], arguments.get("attention_mask")
    names = ("image_grid_thw", "images_per_sample")
    grids = {name: arguments[name] for name in names if arguments.get(name) is not None}
    mask = torch.ones_like(prompt) if mask is None else mask
    full_mask = torch.cat((mask, mask.new_ones(image.shape)), dim=1)
    how = {"use_cache": True, "logits_to_keep": 1}
    first = model(prompt, attention_mask=mask, **how, **grids)
    second = model(image, attention_mask=full_mask, past_key_values=first.past_key_values, **how)
    scores = arguments["logits_processor"](rows, second.logits[:, -1].float())
    if not arguments["generation_config"].do_sample:
        return scores.argmax(dim=-1, keepdim=True)
    generator = torch.Generator(scores.device).manual_seed(seed)
    return torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)


def unconditional(settings: CallSettings, input_ids: Tensor) -> list[list[int]]:
    """Returns the prompts of the unconditional branch, as transformers' guidance takes them."""
    negative = settings.negative
    if negative is None:
        return input_ids[:, -1:].tolist()
    if len(negative) != len(input_ids):
        refuse(f"negative_prompt_ids: {len(negative)} rows for {len(input_ids)} prompts; give one each")
    return unpadded("negative_prompt_attention_mask", negative, settings.negative_mask)


def with_rows(input_ids: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
    """Returns the prompts [B, T] followed by the token ids of each row."""
    return torch.cat((input_ids, torch.tensor(rows, device=input_ids.device, dtype=input_ids.dtype)), dim=1)
