"""The route POST /generate, by which SGLang's diffusion server lets another server make GLM-Image's codes.

It takes what SGLang 0.5.23 sends to its --srt-encoder-url: token ids, the grids of the image and of its
preview, and the settings of sampling, of one image or of a list. As from SGLang's own server, the answer to
one is an object, the answer to a list is a list, and settings that the client leaves out are SGLang's.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from adt_tree.errors import UserError
from adt_tree.grid import Grid
from adt_tree.settings import Sampling
from models.codecs.glm_pixels import CELL
from models.image_tokens import ImageTokens
from models.layouts.glm_image import grid_of
from models.target import Prompt
from serve.api_errors import ApiError, invalid, json_response
from serve.image_request import MAX_SEED, Fields, engine_key, fields_of, validated
from serve.images import check_length, chosen, read_body, unless_gone
from serve.job import Job, Order
from serve.service import Service

Sides = Annotated[list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=3, max_length=3)]


class ImageData(Fields):
    """Two grids, each (1, rows, columns): the image's and then its preview's."""

    image_grid_thw: Annotated[list[Sides], Field(min_length=2, max_length=2)]


class SamplingParams(Fields):
    """The settings of one image, with SGLang's names and defaults."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1  # -1 and 0 keep every code
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: int = 128
    ignore_eos: bool = False  # changes nothing, because only codes are generated
    sampling_seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None


class Batch(Fields):
    """A request. Entry n of each list is of image n."""

    input_ids: Annotated[list[Annotated[list[int], Field(min_length=1)]], Field(min_length=1)]
    image_data: list[Annotated[list[ImageData], Field(min_length=1, max_length=1)]]
    sampling_params: list[SamplingParams]


async def generate_codes(request: Request) -> Response:
    """Answers one request with the codes of its images, those of the preview first."""
    service: Service = request.app.state.service
    images = service.pipe.model.prompts.images
    if images is None:
        text = f"POST /generate: it gives codes of GLM-Image, and this server has {service.pipe.model.name}"
        raise ApiError(400, text, code="model_not_found")
    fields = fields_of(await read_body(request, service))
    ids = fields.get("input_ids")
    is_list = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    if not is_list:
        fields = {name: [value] for name, value in fields.items()}
    order = place(validated(Batch, fields), images, service)
    return await unless_gone(request, answer(order, images, is_list, service), order, service)


def place(batch: Batch, images: ImageTokens, service: Service) -> Order:
    """Puts the images of a request in the queue. Raises ApiError if they do not fit the model or the
    queue."""
    count, most = len(batch.input_ids), service.settings.slots + service.settings.queue
    for name in ("image_data", "sampling_params"):
        if len(getattr(batch, name)) != count:
            raise invalid(name, f"{len(getattr(batch, name))} entries for {count} prompts; give one for each")
    if count > most:
        raise invalid("input_ids", f"{count} prompts; at most {most} images are taken at once")
    order = Order()
    for ids, (data,), settings in zip(batch.input_ids, batch.image_data, batch.sampling_params, strict=True):
        grid = read_grid(ids, data, images, service)
        order.jobs.append(job_of(order, ids, grid, settings, service))
    service.scheduler.submit(order.jobs)
    return order


def read_grid(ids: list[int], data: ImageData, images: ImageTokens, service: Service) -> Grid:
    """Returns the grid of an image. Raises ApiError 400 for ids that are no prompt of the model, and for
    grids that none of its images has, or that need more room than an image of the server's own size."""
    model, sides = service.pipe.model, data.image_grid_thw
    vocabulary, room = model.decoder.config.vocab_size, model.grid.image
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise invalid("input_ids", f"{min(ids)} to {max(ids)}; token ids are 0 to {vocabulary - 1}")
    try:
        grid = images.read_grid([ids], torch.tensor(sides))
    except UserError as error:
        raise invalid("input_ids", error) from None
    try:
        preview = grid_of(grid.height * CELL, grid.width * CELL).before[0]
    except UserError as error:
        raise invalid("image_data", error) from None
    expected = [[1, grid.height, grid.width], [1, preview.height, preview.width]]
    if sides != expected:
        raise invalid("image_data", f"image_grid_thw {sides}; of this image and its preview it is {expected}")
    if grid.image.size > room.size:
        text = f"image_grid_thw {sides}; this server has room for {room.height} x {room.width} cells"
        raise invalid("image_data", f"{text} (--height, --width)")
    return grid


def job_of(order: Order, ids: list[int], grid: Grid, settings: SamplingParams, service: Service) -> Job:
    """Returns the job of one image. Raises ApiError 400 if the prompt or the settings do not fit."""
    pipe, prompt = service.pipe, Prompt(ids, None)
    check_length("input_ids", prompt, service)
    if settings.max_new_tokens < grid.size:
        text = f"max_new_tokens {settings.max_new_tokens}; the preview and the image have {grid.size} codes"
        raise invalid("sampling_params", text)
    top_k = min(max(settings.top_k, 0), pipe.model.num_codes)
    sampling = Sampling(settings.temperature, top_k, settings.top_p, guidance=1.0)
    engine = engine_key(pipe.method(sampling=sampling), pipe, service.settings, grid)
    seed = chosen(settings.sampling_seed)
    return Job(order, len(order.jobs), prompt, seed, sampling, engine, [grid.size])


async def answer(order: Order, images: ImageTokens, is_list: bool, service: Service) -> Response:
    """Returns the response with the codes of all images. Raises the error of an image that failed."""
    while not all(job.finished for job in order.jobs):
        news = await order.next()
        if news.error:
            raise news.error
        news.job.finished = True
        service.metrics.finish(news.job.submitted)
    entries = [entry(job, images) for job in order.jobs]
    return json_response(entries if is_list else entries[0])


def entry(job: Job, images: ImageTokens) -> dict[str, Any]:
    """Returns the answer for one image."""
    ids = images.sequence(job.codes, job.engine.grid)
    counts = {"prompt_tokens": job.prompt.length, "completion_tokens": len(ids)}
    return {"output_ids": ids, "meta_info": {**counts, "cached_tokens": 0, "reasoning_tokens": 0}}
