"""Load for a running service, driven and timed by Locust:

    locust -f serve/locustfile.py --headless --host http://127.0.0.1:8000 --users 16 --run-time 5m

Every request streams one image. Beside whole answers, Locust's tables show the milliseconds to the first
picture and to the image. A request that the full queue refuses (429) counts as a failure. `main.py load_test`
compares the images that --save stores with those made offline. This file imports nothing of the project,
because Locust loads it alone.
"""

from __future__ import annotations

import base64
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from locust import HttpUser, events, task

HEADERS = {"Authorization": f"Bearer {os.environ.get('ADT_API_KEY', '')}"}
PROMPTS = Path(__file__).parents[1] / "configs" / "emoji_contact.txt"


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    """Declares the settings of the requests. Each request takes one value of each at random."""
    parser.add_argument("--methods", nargs="+", default=["self-draft"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0])
    parser.add_argument("--guidances", nargs="+", type=float, default=[3.0])
    parser.add_argument("--partial-images", type=int, default=3, help="partial images of each request")
    parser.add_argument("--cancelled", type=float, default=0.0, help="share of clients who leave early")
    parser.add_argument("--save", help="folder for the finished images and their requests")


class Client(HttpUser):
    """A client that sends one request after the other."""

    def on_start(self) -> None:
        """Asks for the name of the service's model, which load_test compares with that of its own."""
        models = self.client.get("/v1/models", headers=HEADERS)
        models.raise_for_status()
        self.model = models.json()["data"][0]["id"]

    @task
    def image(self) -> None:
        """Sends a request and follows its stream to the image, or leaves at the first picture."""
        options, seed = self.environment.parsed_options, random.randrange(2**31)
        text = random.choice(PROMPTS.read_text(encoding="utf-8").splitlines())
        fields: dict[str, Any] = {"prompt": text, "seed": seed, "model": self.model}
        for name in ("method", "temperature", "guidance"):
            fields[name] = random.choice(getattr(options, f"{name}s"))
        body = {**fields, "stream": True, "partial_images": options.partial_images}
        how: dict[str, Any] = {"json": body, "headers": HEADERS, "stream": True, "catch_response": True}
        started, leaves, first = time.perf_counter(), random.random() < options.cancelled, True
        with self.client.post("/v1/images/generations", name="answer", **how) as answer:
            for line in answer.iter_lines() if answer.ok else ():
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    answer.failure(event["error"]["message"])
                    return
                if first:
                    self.report("first picture", started)
                if event["type"] == "image_generation.completed":
                    self.report("image", started)
                    if options.save:
                        path = Path(options.save) / f"{seed}.png"
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_bytes(base64.b64decode(event["b64_json"]))
                        path.with_suffix(".json").write_text(json.dumps(fields))
                    return
                if leaves:
                    answer.close()
                    return
                first = False
            answer.failure(f"{answer.status_code}: no image" if answer.ok else answer.text[:200])

    def report(self, name: str, started: float) -> None:
        """Adds a time to the tables."""
        times = {"response_time": 1e3 * (time.perf_counter() - started), "response_length": 0}
        self.environment.events.request.fire(request_type="", name=name, exception=None, context={}, **times)
