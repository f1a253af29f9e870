"""The ASGI application of the service, over a loaded model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from fastapi import FastAPI
from fastapi.responses import Response
from starlette.routing import Route

from adt_tree.errors import UserError
from adt_tree.pipeline import Pipeline
from serve.api_errors import ApiError, install, json_response
from serve.image_request import engine_key
from serve.images import generate
from serve.middleware import AccessMiddleware
from serve.openmp import in_new_thread
from serve.service import Service
from serve.settings import DEFAULTS, Settings
from serve.sglang import generate_codes

GET = ["GET", "HEAD"]  # the server drops the body of an answer to HEAD
MAX_ENGINES = 4  # engines whose caches stay in memory for when they are needed again
PAGE = Path(__file__).resolve().parent / "page"
PAGES = {  # path -> file, type
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
OPEN = ("/health", *PAGES)  # paths that need no key


def create_app(pipe: Pipeline, settings: Settings = DEFAULTS) -> FastAPI:
    """Returns the application. Its lifespan starts and ends the thread that decodes.

    The engine of the default method is built at once, so that memory which it needs is taken before another
    process looks for room. Raises UserError if there is no room, and for a model without pixels, unless it is
    GLM-Image, whose codes SGLang asks for.
    """
    pixels = pipe.model.codec is not None
    if not pixels and pipe.model.prompts.images is None:
        raise UserError(f"the server shows pixels, and {pipe.model.no_codec_message}")
    pipe = Pipeline(pipe.model, MAX_ENGINES)
    in_new_thread(torch.get_num_threads(), build_first, pipe, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = service = Service(pipe, settings)
        yield
        await asyncio.to_thread(service.close)  # clients are told meanwhile that the server ends

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan, redirect_slashes=False)
    app.state.cut = 0  # number of requests that were unfinished when the server ended
    install(app)
    app.add_middleware(AccessMiddleware, settings=settings, open_paths=OPEN)
    app.add_api_route("/generate", generate_codes, methods=["POST"])
    if pixels:
        app.add_api_route("/v1/images/generations", generate, methods=["POST"])
        for path, (name, kind) in PAGES.items():
            page = Response((PAGE / name).read_bytes(), media_type=kind)
            app.router.routes.append(Route(path, page, methods=GET))
    add_models(app, pipe)

    @app.api_route("/health", methods=GET)
    async def health() -> Response:
        scheduler = app.state.service.scheduler
        scheduler.check()
        images = scheduler.backlog
        return json_response({"status": "ok", "images": images, "slots": settings.slots})

    @app.api_route("/metrics", methods=GET)
    async def metrics() -> Response:
        figures = app.state.service.metrics
        return Response(figures.text(), headers={"Content-Type": figures.content_type})

    return app


def build_first(pipe: Pipeline, settings: Settings) -> None:
    """Builds the engine of the default method, and leaves it to the first request."""
    key = engine_key(pipe.method(), pipe, settings)
    with pipe.engines.lease(key.method, key.slots, key.room, key.grid):
        pass


def add_models(app: FastAPI, pipe: Pipeline) -> None:
    """Adds the routes of OpenAI's API that describe models. There is one model, this server's, with its
    methods and the number of rows of codes in its images."""
    name = pipe.model.name
    model = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "adt-tree",
        "methods": pipe.methods,
        "default_method": pipe.default_method,
        "rows": pipe.model.grid.height,
    }

    models = json_response({"object": "list", "data": [model]})
    app.router.routes.append(Route("/v1/models", models, methods=GET))

    @app.api_route("/v1/models/{model_name}", methods=GET)
    async def one_model(model_name: str) -> Response:
        if model_name != name:
            raise ApiError(404, f"model {model_name!r}: this server has {name}", "model", "model_not_found")
        return json_response(model)
