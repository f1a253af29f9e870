"""The demo's functions through gradio's own client: a race, a sheet, bad input, Cancel, the queue."""

from __future__ import annotations

import html
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

gr = pytest.importorskip("gradio", reason="needs gradio: bash scripts/setup.sh requirements-demo.txt")

from gradio_client import Client  # noqa: E402

from adt_tree import Pipeline, Sampling  # noqa: E402
from demo.page import serve  # noqa: E402

SETTINGS = {"seed": "7", "guidance": 3.0, "lantern": False}
RACE = {**SETTINGS, "prompt": "sun", "left": "ar", "right": "self-draft", "temperature": 1.0}
SHEET = {**SETTINGS, "prompts": "sun\nred moon", "method": "eagle-2", "temperature": 0.0}
SAME = "Same image, pixel for pixel"


class Slow(Pipeline):
    """A pipeline whose steps can be counted and slowed down."""

    pause, steps = 0.0, 0

    def stream(self, *given: Any, **named: Any) -> Iterator[Any]:
        """Pipeline.stream, a pause before each step."""
        for step in super().stream(*given, **named):
            time.sleep(self.pause)
            self.steps += 1
            yield step


@pytest.fixture(scope="module")
def pipe(tiny_checkpoint: Path) -> Slow:
    return Slow.from_pretrained(str(tiny_checkpoint), device="cpu", precision="fp32")


@pytest.fixture(scope="module")
def address(pipe: Slow) -> Iterator[str]:
    page, address = serve(pipe, batch_size=1, host="127.0.0.1", port=0)
    yield address
    page.close()


@pytest.fixture
def client(address: str, pipe: Slow) -> Client:
    pipe.pause = 0.0
    return Client(address, verbose=False)


def text(line: str) -> str:
    """A line of the page without its markup."""
    return html.unescape(line.partition(">")[2].removesuffix("</p>"))


def pixels(frame: str) -> list[str]:
    """Hashes of the finished images of a race."""
    return [part.partition('"')[0] for part in html.unescape(frame).split('"pixels": "')[1:]]


@pytest.mark.parametrize("seed", ["0", "7", "123456789"])
def test_an_exact_race_ends_in_one_image(client: Client, seed: str) -> None:
    news, frame = client.predict(**{**RACE, "seed": seed}, api_name="/race")
    left, right = pixels(frame)
    assert left == right and SAME in html.unescape(frame)
    assert "alert" not in news and f'"seed": "{seed}"' in html.unescape(frame)


def test_lantern_ends_in_another(client: Client) -> None:
    hot = {**RACE, "temperature": 2.0, "right": "eagle-2", "lantern": True}
    found = [pixels(client.predict(**{**hot, "seed": str(seed)}, api_name="/race")[1]) for seed in range(4)]
    assert any(left != right for left, right in found)


def test_the_sheet_tells_tau(client: Client, pipe: Slow) -> None:
    _, pictures = client.predict(**SHEET, api_name="/sheet")
    sampling = Sampling(temperature=SHEET["temperature"], guidance=SHEET["guidance"])
    for place, (prompt, picture) in enumerate(zip(("sun", "red moon"), pictures, strict=True)):
        tau = pipe(prompt, method="eagle-2", sampling=sampling, seed=7 + place).stats["tau"]
        assert picture["caption"] == f"tau {tau:.2f}: {prompt}"


HOSTILE = [
    ("/race", {"prompt": "x" * 10_000}, "10,000 characters"),
    ("/race", {"prompt": "  \n "}, "prompt is empty"),
    ("/race", {"seed": "seven"}, "seed is 'seven'"),
    ("/race", {"seed": "-1"}, "seed is '-1'"),
    ("/race", {"seed": "9" * 400}, "seed is"),
    ("/race", {"temperature": 7}, "temperature is '7'"),
    ("/race", {"temperature": -0.5}, "temperature is '-0.5'"),
    ("/race", {"guidance": 1e9}, "guidance is"),
    ("/sheet", {"prompts": ""}, "prompt is empty"),
    ("/sheet", {"prompts": "a\n" * 99}, "99 prompts"),
    ("/sheet", {"prompts": "x" * 10_000}, "10,000"),
]


@pytest.mark.parametrize(("tab", "given", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_bad_input_is_a_line_of_the_page(
    client: Client, tab: str, given: dict[str, Any], message: str
) -> None:
    news, shown = client.predict(**{**(RACE if tab == "/race" else SHEET), **given}, api_name=tab)
    assert message in text(news) and "Traceback" not in news and 'role="alert"' in news and not shown
    assert len(text(news)) < 200


def test_unknown_words_and_markup_are_drawn(client: Client) -> None:
    news, frame = client.predict(**{**RACE, "prompt": "<b>zorp</b> \u202e \U0001f9e8"}, api_name="/race")
    assert "<b>" not in news and "<b>" not in frame and len(set(pixels(frame))) == 1
    assert text(news) == "Done."


def test_cancel_ends_at_the_next_step(client: Client, pipe: Slow) -> None:
    pipe.pause, before = 0.3, pipe.steps
    job = client.submit(**RACE, api_name="/race")
    while pipe.steps < before + 2:
        time.sleep(0.02)
    said = text(client.predict(api_name="/cancel_race"))
    stopped = pipe.steps
    news, frame = job.result(timeout=30)
    time.sleep(1.0)
    assert pipe.steps <= stopped + 1
    assert said.startswith("Cancelled at ar: ") and text(news).startswith("Cancelled at ar: ") and not frame
    assert "Nothing of yours" in text(client.predict(api_name="/cancel_race"))


def test_a_second_visitor_waits(client: Client, address: str, pipe: Slow) -> None:
    pipe.pause = 0.1
    first = client.submit(**RACE, api_name="/race")
    second = Client(address, verbose=False)
    waiting = second.submit(**RACE, api_name="/race")
    time.sleep(0.8)
    assert not first.done() and waiting.status().code.name == "IN_QUEUE"
    assert "Nothing of yours" in text(second.predict(api_name="/cancel_race"))  # not the first one's
    pipe.pause = 0.0
    assert pixels(first.result(timeout=60)[1]) == pixels(waiting.result(timeout=60)[1])
