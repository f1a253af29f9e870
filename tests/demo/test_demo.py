"""The demo page, through gradio's own client: a race, bad input, Cancel, the queue."""

from __future__ import annotations

import html
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adt_tree import Pipeline
from adt_tree.errors import UserError
from cli import demo as command
from cli.model_from_options import load_with_drafter_if_any

RACE = {"prompt": "sun", "left": "ar", "right": "self-draft", "seed": 7, "temperature": 1.0, "guidance": 3.0,
        "lantern": False}  # fmt: skip


class SlowPipeline(Pipeline):
    """A pipeline that counts its steps and pauses before each."""

    pause, steps = 0.0, 0

    def stream(self, *args: Any, **options: Any) -> Iterator[Any]:
        for step in super().stream(*args, **options):
            time.sleep(self.pause)
            self.steps += 1
            yield step


@pytest.fixture(scope="module")
def pipe(tiny_checkpoint: Path) -> SlowPipeline:
    return SlowPipeline.from_pretrained(str(tiny_checkpoint), device="cpu", precision="fp32")


@pytest.fixture(scope="module")
def address(pipe: SlowPipeline) -> Iterator[str]:
    pytest.importorskip("gradio", reason="needs gradio: bash scripts/setup.sh requirements-demo.txt")
    from demo.app import serve

    page, address = serve(pipe, host="127.0.0.1", port=0)
    yield address
    page.close()


@pytest.fixture
def client(address: str, pipe: SlowPipeline) -> Any:
    from gradio_client import Client

    pipe.pause = 0.0
    return Client(address, verbose=False)


def pixels(frame: str) -> list[str]:
    """Returns the hashes of the finished images of a race."""
    return re.findall(r'"pixels": "(\w+)"', html.unescape(frame))


def test_methods_end_in_one_image_unless_relaxed(client: Any) -> None:
    prompt = "<b>sun</b> \u202e \U0001f9e8"
    progress, frame = client.predict(**{**RACE, "prompt": prompt}, api_name="/race")
    left, right = pixels(frame)
    assert left == right and "<b>" not in progress + frame
    hot = {**RACE, "temperature": 2.0, "right": "eagle-2", "lantern": True}
    races = [pixels(client.predict(**{**hot, "seed": seed}, api_name="/race")[1]) for seed in range(4)]
    assert any(left != right for left, right in races)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [("prompt", "x" * 10_000, "10000"), ("prompt", "  \n ", "prompt"), ("prompt", "\ud800", "surrogate"),
     ("seed", None, "seed")],
)  # fmt: skip
def test_bad_input_is_named(address: str, pipe: SlowPipeline, field: str, value: Any, named: str) -> None:
    from demo.app import gr, race

    with pytest.raises(gr.Error, match=named):
        next(race(pipe, **{**RACE, field: value}))


def test_the_fields_hold_what_the_model_can_decode(client: Any) -> None:
    from gradio_client.exceptions import AppError

    for field, value in {"seed": 2**60, "temperature": 7, "guidance": -1, "left": "sjd"}.items():
        with pytest.raises(AppError, match=str(value)):
            client.predict(**{**RACE, field: value}, api_name="/race")


def test_cancel_ends_the_decoding(client: Any, pipe: SlowPipeline) -> None:
    pipe.pause, before = 0.1, pipe.steps
    job = client.submit(**RACE, api_name="/race")
    while pipe.steps < before + 2:
        time.sleep(0.02)
    job.cancel()
    time.sleep(1.0)  # several times PROGRESS_S
    stopped = pipe.steps
    time.sleep(0.5)
    assert pipe.steps == stopped < before + pipe.model.grid.size
    calls = client.config["dependencies"]
    (race,) = (call["id"] for call in calls if call["api_name"] == "race")
    assert any(call["cancels"] == [race] for call in calls)  # the page's button does what job.cancel did


def test_a_second_visitor_waits(address: str, client: Any, pipe: SlowPipeline) -> None:
    pipe.pause = 0.1
    first = client.submit(**RACE, api_name="/race")
    second = type(client)(address, verbose=False).submit(**RACE, api_name="/race")
    time.sleep(0.8)
    assert not first.done() and second.status().code.name == "IN_QUEUE"
    pipe.pause = 0.0
    assert pixels(first.result(timeout=60)[1]) == pixels(second.result(timeout=60)[1])


def test_the_command_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(UserError, match=r"requirements-demo\.txt"):
        command.run(command.Options.parse([]))


def test_the_page_does_without_a_drafter(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A drafter that is there must be whole."""
    model = Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    options = command.Options.parse(["--model_path", str(model)])
    (model / "drafter" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="drafter"):
        load_with_drafter_if_any(options)
    shutil.rmtree(model / "drafter")
    assert "eagle-2" not in load_with_drafter_if_any(options).methods
