"""The ASGI application of the service, over a loaded model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from adt_tree.errors import UserError
from adt_tree.pipeline import Pipeline
from serve.api_errors import HANDLERS, ApiError, json_response
from serve.image_request import engine_key
from serve.images import generate
from serve.middleware import AccessMiddleware
from serve.openmp import in_new_thread
from serve.service import Service
from serve.settings import DEFAULTS, Settings
from serve.sglang import generate_codes

MAX_ENGINES = 4  # engines whose caches stay in memory for when they are needed again
PAGE = Path(__file__).resolve().parent / "page"
PAGES = {  # path -> file, type
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
OPEN = ("/health", *PAGES)  # paths that need no key


def create_app(pipe: Pipeline, settings: Settings = DEFAULTS) -> Starlette:
    """Returns the application. Its lifespan starts and ends the thread that decodes.

    The engine of the default method is built at once, so that memory which it needs is taken before another
    process looks for room. Raises UserError if there is no room, and for a model without pixels, unless it is
    GLM-Image, whose codes SGLang asks for.
    """
    pixels = not pipe.model.codec.missing
    if not pixels and pipe.model.prompts.images is None:
        raise UserError(f"the server shows pixels, and {pipe.model.codec.missing}")
    pipe = Pipeline(pipe.model, MAX_ENGINES)
    in_new_thread(torch.get_num_threads(), build_first, pipe, settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.service = service = Service(pipe, settings)
        yield
        await asyncio.to_thread(service.close)  # clients are told meanwhile that the server ends

    async def health(request: Request) -> Response:
        scheduler = request.app.state.service.scheduler
        scheduler.check()
        return json_response({"status": "ok", "images": scheduler.backlog, "slots": settings.slots})

    async def metrics(request: Request) -> Response:
        figures = request.app.state.service.metrics
        return Response(figures.text(), headers={"Content-Type": figures.content_type})

    routes = [Route("/health", health), Route("/metrics", metrics), *routes_of_models(pipe)]
    routes.append(Route("/generate", generate_codes, methods=["POST"]))
    if pixels:
        routes.append(Route("/v1/images/generations", generate, methods=["POST"]))
        for path, (name, kind) in PAGES.items():
            page = Response((PAGE / name).read_bytes(), media_type=kind)
            routes.append(Route(path, page, methods=["GET"]))
    access = Middleware(AccessMiddleware, settings=settings, open_paths=OPEN)
    app = Starlette(routes=routes, middleware=[access], exception_handlers=HANDLERS, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.cut = 0  # number of requests that were unfinished when the server ended
    return app


def build_first(pipe: Pipeline, settings: Settings) -> None:
    """Builds the engine of the default method, and leaves it to the first request."""
    key = engine_key(pipe.method(), pipe, settings)
    with pipe.engines.lease(key.method, key.slots, key.room, key.grid):
        pass


def routes_of_models(pipe: Pipeline) -> list[Route]:
    """Returns the routes of OpenAI's API that describe models. There is one model, this server's, with its
    methods and the number of rows of codes in its images."""
    model = {
        "id": pipe.model.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "adt-tree",
        "methods": pipe.methods,
        "default_method": pipe.default_method,
        "rows": pipe.model.grid.height,
    }

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != model["id"]:
            text = f"model {name!r}: this server has {model['id']}"
            raise ApiError(404, text, "model", "model_not_found")
        return json_response(model)

    models = json_response({"object": "list", "data": [model]})
    return [Route("/v1/models", models, methods=["GET"]), Route("/v1/models/{name}", one_model)]
