"""The service on Ray Serve, without a cluster: the options of its deployment, and the health of a replica."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from adt_tree import Pipeline
from serve.settings import Settings
from tests.support.runs import ROOT

pytest.importorskip("ray.serve")
from pydantic import ValidationError

from cli.serve import Options
from serve.api_errors import ApiError
from serve.app import create_app
from serve.ray_app import Arguments, Images, build


def deployed(**arguments: Any) -> Any:
    """Returns the deployment that these arguments give."""
    return build(arguments)._bound_deployment


def test_the_options_of_a_deployment() -> None:
    """No limit of Ray leaves a slot or a place in the queue idle, or cuts off images of the queue."""
    for arguments in ({}, {"slots": 8, "queue": 200}):
        deployment, taken = deployed(**arguments), Arguments.model_validate(arguments)
        assert deployment.max_ongoing_requests > taken.slots + taken.queue
        assert deployment._deployment_config.graceful_shutdown_timeout_s >= Options.parse([]).grace
    resources = deployed(num_gpus=0.5, num_cpus=2).ray_actor_options
    assert (resources["num_gpus"], resources["num_cpus"]) == (0.5, 2)


@pytest.mark.parametrize("wrong", [{"slot": 4}, {"slots": "many"}, {"num_gpus": -1}, {"num_cpus": 0}])
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        build(wrong)


def test_the_configuration_file() -> None:
    """Its arguments are those that the application takes, and it configures the deployment by its name."""
    (application,) = yaml.safe_load((ROOT / "serve" / "ray.yaml").read_text())["applications"]
    assert application["import_path"] == "serve.ray_app:build"
    Arguments.model_validate(application["args"])
    assert [part["name"] for part in application["deployments"]] == [deployed().name]


def test_a_replica_that_can_decode_no_more_says_so(pipe: Pipeline) -> None:
    async def check() -> None:
        app = create_app(pipe, Settings(slots=1))
        replica = SimpleNamespace(application=app)
        async with app.router.lifespan_context(app):
            Images.check_health(replica)
            app.state.service.scheduler.close()
            with pytest.raises(ApiError, match="thread"):
                Images.check_health(replica)

    asyncio.run(check())
