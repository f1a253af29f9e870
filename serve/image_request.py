"""The fields of a request to POST /v1/images/generations, their checks, and the method that they choose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from adt_tree.engine_cache import EngineKey
from adt_tree.errors import UserError
from adt_tree.grid import Grid
from adt_tree.method import Method
from adt_tree.pipeline import Pipeline
from adt_tree.settings import Sampling
from serve.api_errors import ApiError, invalid
from serve.settings import MAX_IMAGES, Settings

Body = TypeVar("Body", bound="Fields")
MAX_SEED = 2**63 - 1 - MAX_IMAGES  # image i of a request has seed + i, and seeds have 64 bits


class Fields(BaseModel):
    """Fields of JSON. Unknown fields, values of another type and infinities are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class LanternFields(Fields):
    """LANTERN's settings; those left out are the published ones."""

    delta: Annotated[float | None, Field(ge=0, le=100)] = None
    k: Annotated[int, Field(ge=0)] | None = None


class ImageRequest(Fields):
    """The fields of OpenAI's request, and from `seed` on those of this server."""

    prompt: Annotated[str, Field(min_length=1)]
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES)] = 1
    model: str | None = None
    size: str = "auto"
    output_format: Literal["png", "webp", "jpeg"] = "png"
    output_compression: Annotated[int, Field(ge=0, le=100)] = 100
    response_format: Literal["b64_json"] = "b64_json"
    background: Literal["auto", "opaque"] = "auto"
    # quality, moderation, style and the two below it change nothing: OpenAI's clients may send them.
    quality: Literal["auto", "standard", "hd", "low", "medium", "high", "xhigh", "max"] = "auto"
    moderation: Literal["auto", "low"] = "auto"
    style: Literal["vivid", "natural"] = "vivid"
    user: str = ""
    safety_identifier: str = ""
    stream: bool = False
    partial_images: Annotated[int, Field(ge=0, le=3)] = 0

    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    method: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    guidance: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    lantern: bool | LanternFields = False
    partial_rows: Annotated[int, Field(ge=1)] | None = None


def parse(body: bytes) -> ImageRequest:
    """Returns the request in a body. Raises ApiError 400, which names the field, for a malformed request."""
    # OpenAI's clients may send null for a field that is left out.
    fields = {name: value for name, value in fields_of(body).items() if value is not None}
    request = validated(ImageRequest, fields)
    _check_together(request)
    return request


def fields_of(body: bytes) -> dict[str, Any]:
    """Returns the fields of a JSON object. Raises ApiError 400 for any other body."""
    try:
        fields = json.loads(body)  # NaN and infinities are refused with the name of their field
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    return fields


def validated(cls: type[Body], fields: Mapping[str, Any]) -> Body:
    """Returns a request of these fields. Raises ApiError 400, which names the first that is wrong."""
    for name in fields:
        if name not in cls.model_fields:
            raise ApiError(400, f"{name!a}: there is no such field", name, "unknown_parameter")
    try:
        return cls(**fields)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        worst = max(errors, key=lambda part: len(part["loc"]))  # of a value of several types, the nearest one
        place = ".".join(map(str, worst["loc"]))
        code = "missing_required_parameter" if worst["type"] == "missing" else "invalid_value"
        raise ApiError(400, f"{place}: {worst['msg']}", str(worst["loc"][0]), code) from None


def _check_together(request: ImageRequest) -> None:
    """Raises ApiError 400 for fields that contradict one another."""
    if request.output_format == "png" and request.output_compression < 100:
        raise invalid("output_compression", "it is for webp and jpeg")
    if request.partial_images and not request.stream:
        raise invalid("partial_images", "only with stream: true")
    if request.partial_rows and (not request.stream or request.partial_images):
        raise invalid("partial_rows", "only with stream: true, and without partial_images")


def check_model(request: ImageRequest, pipe: Pipeline) -> None:
    """Raises ApiError for another model, or for a size that the model does not generate."""
    name, size = pipe.model.name, size_of(pipe)
    if request.model not in (None, name):
        raise ApiError(404, f"model {request.model!r}: the model here is {name}", "model", "model_not_found")
    if request.size not in ("auto", size):
        raise invalid("size", f"{request.size!r}; this model's images are {size}")


def size_of(pipe: Pipeline) -> str:
    """Returns the size of the model's images as "WIDTHxHEIGHT"."""
    raster, config = pipe.model.grid.image, pipe.model.codec.config
    assert config is not None  # a model without pixels is refused when the server starts
    side = config.patch_size
    return f"{raster.width * side}x{raster.height * side}"


def method_of(request: ImageRequest, pipe: Pipeline) -> Method:
    """Returns the method that a request chooses. Raises ApiError 400 for one that the model does not have."""
    name, num_codes = request.method or pipe.default_method, pipe.model.num_codes
    if name not in pipe.methods:
        raise invalid("method", f"{name!r}; choose one of {', '.join(pipe.methods)}")
    given = request.model_dump(include={"temperature", "top_k", "top_p", "guidance"}, exclude_none=True)
    if request.top_k is not None:
        given["top_k"] = min(request.top_k, num_codes)
    sampling = replace(pipe.sampling, **given)
    lantern = None
    if request.lantern:
        fields = {} if request.lantern is True else request.lantern.model_dump(exclude_none=True)
        lantern = replace(pipe.model.spec.lantern, **fields)
    try:
        if lantern:
            lantern.neighbours(num_codes)
        return pipe.method(name, sampling=sampling, lantern=lantern)
    except UserError as error:
        raise invalid("lantern" if lantern else "method", error) from None


def engine_key(method: Method, pipe: Pipeline, settings: Settings, grid: Grid | None = None) -> EngineKey:
    """Returns the key of the engine that decodes images of `method`. grid: of their codes; None: the model's.

    Methods that differ only in temperature, guidance and top_p have the same engine, because each of its
    slots takes these values from its image.
    """
    # An engine with any guidance other than 1 has room for the second branch of guided images.
    guidance = pipe.sampling.guidance if pipe.sampling.branches == 2 else 3.0
    guidance = guidance if pipe.model.prompts.guided else 1.0
    temperature = 0.0 if method.greedy and method.greedy_rule_differs else 1.0
    sampling = Sampling(temperature, method.sampling.top_k, 1.0, guidance)
    method = replace(method, sampling=sampling)
    return EngineKey(method, settings.slots, settings.max_prompt_tokens, grid or pipe.model.grid)
