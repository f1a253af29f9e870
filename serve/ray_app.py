"""The service on Ray Serve: replicas of the ASGI application that `main.py serve` runs, one engine in each.

serve/ray.yaml configures it and says how it is started. Ray starts the replicas, sends each request to the
less loaded of two, adds replicas as queues grow and replaces those that die. Replicas share nothing: an image
depends on its own prompt and seed alone, so any of them gives the same bytes. A request whose replica dies is
answered by a 5xx, which OpenAI's clients repeat.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp

from adt_tree.pipeline import Pipeline
from serve.app import create_app
from serve.openmp import in_new_thread
from serve.settings import DEFAULTS, KEY_VARIABLE, Settings, checked_key

# Requests that a replica takes beyond its slots and queue: those that it refuses with 429, /health, /metrics.
# Ray answers 503 above its limit, and its default of 5 would leave slots idle.
SPARE_REQUESTS = 32
GRACE_S = 120.0  # longer than an image and those queued before it


class Arguments(BaseModel):
    """The fields of `args` in the configuration file."""

    model_config = ConfigDict(extra="forbid")

    model: str = "emoji"  # a name, a folder or a hub id
    drafter: str | None = None
    precision: str = "auto"
    num_gpus: float = Field(default=0.0, ge=0.0)  # GPUs per replica; 0.5: two share one; 0: on the CPU
    num_cpus: float = Field(default=1.0, gt=0.0)  # CPUs per replica; Ray makes a whole number its threads
    slots: int = DEFAULTS.slots
    queue: int = DEFAULTS.queue
    max_prompt_tokens: int = DEFAULTS.max_prompt_tokens
    server_names: tuple[str, ...] = DEFAULTS.server_names


@serve.ingress()
class Images:
    """A replica: it loads the model and serves the application over it."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments

    def __serve_build_asgi_app__(self) -> ASGIApp:
        pipe = in_new_thread(torch.get_num_threads(), self._load)
        replica = serve.get_replica_context().replica_id.unique_id
        limits = self.arguments.model_dump(include={"slots", "queue", "max_prompt_tokens", "server_names"})
        key = checked_key(os.environ.get(KEY_VARIABLE), KEY_VARIABLE)
        settings = Settings(**limits, api_key=key, replica=replica)
        self.application = create_app(pipe, settings)
        return self.application

    def check_health(self) -> None:
        """Raises ApiError if the replica can decode no more. Ray calls it again and again, and replaces a
        replica for which it raises."""
        self.application.state.service.scheduler.check()

    def _load(self) -> Pipeline:
        arguments = self.arguments
        return Pipeline.from_pretrained(
            arguments.model,
            drafter=arguments.drafter,
            device="cuda" if arguments.num_gpus else "cpu",
            precision=arguments.precision,
        )


def build(args: dict[str, Any]) -> Application:
    """Returns the application for `serve deploy` and `serve run`.

    args: the Arguments of the configuration file, which may also set any option of the deployment, such as
    its autoscaling. Raises pydantic's error, which names the argument, for one that is unknown or wrong.
    """
    arguments = Arguments.model_validate(args)
    resources = {"num_gpus": arguments.num_gpus, "num_cpus": arguments.num_cpus}
    deployment = serve.deployment(Images, name="Images").options(
        ray_actor_options=resources,
        max_ongoing_requests=arguments.slots + arguments.queue + SPARE_REQUESTS,
        graceful_shutdown_timeout_s=GRACE_S,
    )
    return deployment.bind(arguments)
