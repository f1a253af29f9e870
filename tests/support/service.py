"""A service in a thread of this process, and clients of it."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from openai import OpenAI
from PIL import Image

from adt_tree.pipeline import Pipeline
from serve import server
from serve.app import create_app
from serve.service import Service
from serve.settings import Settings
from storage.run_folder import png_bytes

PROMPT = "red heart"


@dataclass(frozen=True)
class Running:
    """A service that listens."""

    service: Service
    port: int

    @property
    def site(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def openai(self) -> OpenAI:
        """Returns a client of the `openai` package, which does not repeat a request that fails."""
        return OpenAI(base_url=f"{self.site}/v1", api_key="none", max_retries=0)

    def post(self, body: object, **more: Any) -> httpx.Response:
        """Asks for images by plain HTTP; a body that is not bytes is sent as JSON."""
        headers = {"Content-Type": "application/json", **more.pop("headers", {})}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        address = f"{self.site}/v1/images/generations"
        return httpx.post(address, content=content, headers=headers, **{"timeout": 60, **more})

    @property
    def figures(self) -> dict[str, float]:
        """Returns the figures of /metrics by their names and labels."""
        lines = httpx.get(f"{self.site}/metrics").text.splitlines()
        parts = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in parts}

    def image(self, **fields: Any) -> bytes:
        """Returns one image as a file."""
        answer = self.post({"prompt": PROMPT, **fields})
        assert answer.status_code == 200, answer.text
        return base64.b64decode(answer.json()["data"][0]["b64_json"])


@contextmanager
def running(pipe: Pipeline, settings: Settings) -> Iterator[Running]:
    """Serves a model until the block ends."""
    app, listener = create_app(pipe, settings), server.bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    web_server = uvicorn.Server(server.configure(app, settings, grace_s=10))
    thread = threading.Thread(target=web_server.run, kwargs={"sockets": [listener]})
    thread.start()
    wait_for(lambda: web_server.started)
    try:
        yield Running(app.state.service, port)
    finally:
        web_server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive() and not app.state.service.scheduler.alive


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Waits until a condition holds. Fails after that many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def offline(pipe: Pipeline, prompt: str = PROMPT, **settings: Any) -> bytes:
    """Returns the PNG of an image that Pipeline makes without the service."""
    return png_bytes(pipe(prompt, **settings).images[0])


def opened(data: bytes) -> Image.Image:
    """Returns the picture in the bytes of an image file."""
    return Image.open(io.BytesIO(data))
