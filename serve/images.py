"""The route POST /v1/images/generations, which answers with whole images or with a stream of partial ones."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from adt_tree.errors import UserError
from adt_tree.grid import Grid
from models.target import EncodedPrompt
from serve.api_errors import ApiError, failure, invalid, json_response
from serve.image_request import ImageRequest, check_model, engine_key, method_of, parse, size_of
from serve.job import Job, News, Order
from serve.service import Service

SEED_BITS = 48  # of a seed that the server chooses; JavaScript represents such a number exactly
CLIENT_CLOSED = 499  # nginx's status for a client that has closed its connection, for the log alone


async def generate(request: Request) -> Response:
    """Answers one request."""
    service: Service = request.app.state.service
    image_request = parse(await read_body(request, service))
    check_model(image_request, service.pipe)
    order = await place(image_request, service)
    if image_request.stream:
        return Stream(events(order, image_request, service), order, service)
    return await unless_gone(request, answer(order, image_request, service), order, service)


async def read_body(request: Request, service: Service) -> bytes:
    """Returns the body. Raises ApiError if it is not JSON, is too large, arrives too slowly or not at all."""
    settings = service.settings
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" or "content-encoding" in request.headers:
        raise ApiError(415, f"content type {kind!r}: send application/json, not compressed")
    body = b""
    try:
        async with asyncio.timeout(settings.timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > settings.max_body:
                    raise ApiError(413, f"the body is too large: send at most {settings.max_body} bytes")
    except TimeoutError:
        text = f"the body did not arrive within {settings.timeout_s:g} s"
        raise ApiError(408, text, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before its body had arrived") from None
    return body


async def place(image_request: ImageRequest, service: Service) -> Order:
    """Puts the images of a request in the queue. Raises ApiError if they do not fit the model or the
    queue."""
    pipe = service.pipe
    method = method_of(image_request, pipe)
    try:
        prompt = await service.painter.encode(image_request.prompt)
    except UserError as error:
        raise invalid("prompt", error) from None
    check_length("prompt", prompt, service)
    order, seed = Order(), chosen(image_request.seed)
    engine = engine_key(method, pipe, service.settings)
    for index in range(image_request.n):
        marks = marks_of(image_request, pipe.model.grid)
        order.jobs.append(Job(order, index, prompt, seed + index, method.sampling, engine, marks))
    service.scheduler.submit(order.jobs)
    return order


def check_length(field: str, prompt: EncodedPrompt, service: Service) -> None:
    """Raises ApiError 400, which names the field, for a prompt that the caches have no room for."""
    most = service.settings.max_prompt_tokens
    if prompt.length > most:
        raise invalid(field, f"it has {prompt.length} tokens, at most {most} are taken")


def chosen(seed: int | None) -> int:
    """Returns the seed that a client gives, or else one at random."""
    return secrets.randbelow(2**SEED_BITS) if seed is None else seed


def marks_of(image_request: ImageRequest, grid: Grid) -> list[int]:
    """Returns the numbers of codes after which the client gets a picture. The last is that of a whole image.

    For example, partial_images 1 of an image of 16 codes gives [8, 16].
    """
    if not image_request.stream:
        return [grid.size]
    if image_request.partial_rows:
        rows = range(image_request.partial_rows, grid.height, image_request.partial_rows)
        return [*(grid.starts[-1] + row * grid.width for row in rows), grid.size]
    parts = image_request.partial_images + 1
    return [-(-grid.size * part // parts) for part in range(1, parts + 1)]


async def paint(news: News, image_request: ImageRequest, service: Service) -> str:
    """Returns the picture that a piece of news announces, in base64. Raises its error if the image failed."""
    if news.error:
        raise news.error
    codes = news.job.codes[: news.codes]
    form = image_request.output_format, image_request.output_compression
    try:
        picture = await service.painter.paint(codes, *form)
    except Exception:
        news.job.failed = True
        raise
    whole = len(codes) == service.pipe.model.grid.size
    if image_request.stream and not news.job.shown:
        service.metrics.first_partial.observe(time.perf_counter() - news.job.submitted)
    news.job.shown = True
    if whole:
        news.job.finished = True
        service.metrics.finish(news.job.submitted)
    return picture


async def answer(order: Order, image_request: ImageRequest, service: Service) -> Response:
    """Returns the response with all images, in the order of their seeds."""
    data: dict[int, dict[str, Any]] = {}
    while len(data) < len(order.jobs):
        news = await order.next()
        picture = await paint(news, image_request, service)
        data[news.job.index] = {"b64_json": picture, "seed": news.job.seed}
    content = {
        "created": int(time.time()),
        "data": [data[index] for index in range(len(data))],
        "background": "opaque",
        "output_format": image_request.output_format,
        "size": size_of(service.pipe),
        "usage": usage(order, service, len(data)),
        **warnings_of(order),
    }
    return json_response(content)


def usage(order: Order, service: Service, images: int) -> dict[str, Any]:
    """Returns OpenAI's counts of a request: the tokens of the prompt and the codes of the images."""
    text, codes = order.jobs[0].prompt.length, images * service.pipe.model.grid.size
    return {
        "input_tokens": text,
        "input_tokens_details": {"text_tokens": text, "image_tokens": 0},
        "output_tokens": codes,
        "total_tokens": text + codes,
    }


def warnings_of(order: Order) -> dict[str, list[str]]:
    """Returns what the client must know about the prompt, such as that it was cut, as a field of the answer;
    no field if there is nothing."""
    texts = [f"prompt: {text}" for text in order.jobs[0].prompt.warnings]
    return {"warnings": texts} if texts else {}


async def events(order: Order, image_request: ImageRequest, service: Service) -> AsyncGenerator[bytes, None]:
    """Yields the images of a request as server-sent events. An error ends them."""
    common = {
        "background": "opaque",
        "output_format": image_request.output_format,
        "quality": "auto",  # the stream must name one, and all are the same here
        "size": size_of(service.pipe),
    }
    partials, finished = dict.fromkeys(order.jobs, 0), 0
    while finished < len(order.jobs):
        news = await order.next()
        job = news.job
        try:
            picture = await paint(news, image_request, service)
        except Exception as error:
            yield failure(error).event
            return
        event = {"b64_json": picture, "created_at": int(time.time()), "seed": job.seed, **common}
        if len(order.jobs) > 1:
            event["image_index"] = job.index
        if job.finished:
            finished += 1
            event |= {"type": "image_generation.completed", "usage": usage(order, service, 1)}
            event |= warnings_of(order)
        else:
            event |= {"type": "image_generation.partial_image", "partial_image_index": partials[job]}
            partials[job] += 1
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


class Stream(StreamingResponse):
    """A response of server-sent events. Once the client leaves, its images leave their slots."""

    def __init__(self, content: AsyncGenerator[bytes, None], order: Order, service: Service) -> None:
        # nginx would hold events back until its buffer is full.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._content, self._order, self._service = content, order, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._service.leave(self._order)
            await self._content.aclose()  # else the garbage collector closes it, in whatever thread it runs


async def unless_gone(request: Request, work: Any, order: Order, service: Service) -> Response:
    """Returns the result of the coroutine `work`. If the client goes first, cancels it and returns status
    CLIENT_CLOSED."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return Response(status_code=CLIENT_CLOSED)
        return working.result()
    except ApiError:
        raise
    except Exception as error:
        raise failure(error) from error
    finally:
        working.cancel()
        leaving.cancel()
        service.leave(order)


async def disconnected(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
