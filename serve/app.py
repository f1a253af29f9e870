"""The ASGI application of the service, over a loaded model."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse, Response

from adt_tree.pipeline import Pipeline
from serve.errors import ApiError, install, json_response
from serve.guard import Guard
from serve.images import generate
from serve.service import Service
from serve.settings import Settings

DEFAULTS = Settings()
PAGE = Path(__file__).resolve().parent / "page"
OPEN = ("/health", "/", "/page.js", "/icon.svg", "/page.css")  # paths that need no key


def create_app(pipe: Pipeline, settings: Settings = DEFAULTS) -> FastAPI:
    """Returns the application. Its lifespan starts and ends the thread that decodes."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = service = Service(pipe, settings)
        yield
        service.close()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan, redirect_slashes=False)
    app.state.cut = 0  # number of requests that were unfinished when the server ended
    install(app)
    app.add_middleware(Guard, settings=settings, open_paths=OPEN)
    app.add_api_route("/v1/images/generations", generate, methods=["POST"])
    add_models(app, pipe)

    @app.get("/health")
    async def health() -> Response:
        service: Service = app.state.service
        if not service.scheduler.alive:
            raise ApiError(503, "the decoding thread has ended", code="server_error")
        images = service.scheduler.backlog
        return json_response({"status": "ok", "images": images, "slots": settings.slots})

    @app.get("/metrics")
    async def metrics() -> Response:
        figures = app.state.service.metrics
        return Response(figures.text(), headers={"Content-Type": figures.content_type})

    @app.get("/")
    async def page() -> Response:
        return FileResponse(PAGE / "index.html")

    @app.get("/page.js")
    async def script() -> Response:
        return FileResponse(PAGE / "page.js", media_type="text/javascript")

    @app.get("/icon.svg")
    async def icon() -> Response:
        return FileResponse(PAGE / "icon.svg")

    @app.get("/page.css")
    async def style() -> Response:
        return FileResponse(PAGE / "page.css")

    return app


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

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model]})

    @app.get("/v1/models/{model_name}")
    async def one_model(model_name: str) -> Response:
        if model_name != name:
            raise ApiError(404, f"model {model_name!r}: this server has {name}", "model", "model_not_found")
        return json_response(model)
