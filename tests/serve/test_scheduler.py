"""The service under faults and overload: an image that fails does not affect the others."""

from __future__ import annotations

import base64
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from adt_tree import Method, Pipeline, engine_cache
from adt_tree.errors import UserError
from models.target import ARTarget
from serve.app import create_app
from serve.job import Job
from serve.pixels import Painter
from serve.scheduler import Scheduler
from serve.settings import Settings
from tests.support.service import PROMPT, Running, offline, running, wait_for

SETTINGS = Settings(slots=2, queue=10, max_prompt_tokens=32, timeout_s=2.0)
ROWS = {"stream": True, "partial_rows": 1}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Returns a list of one number, the seconds for which every target pass pauses first."""
    pause, forward = [0.1], ARTarget.forward

    def pausing(target: ARTarget, *arguments: Any) -> object:
        time.sleep(pause[0])
        return forward(target, *arguments)

    monkeypatch.setattr(ARTarget, "forward", pausing)
    return pause


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Returns an event for which every target pass waits."""
    opened, forward = threading.Event(), ARTarget.forward

    def waiting(*given: Any) -> object:
        assert opened.wait(30)
        return forward(*given)

    monkeypatch.setattr(ARTarget, "forward", waiting)
    return opened


def flying(live: Running) -> int:
    """Returns the number of images in slots."""
    return int(live.figures['adt_in_flight_images{replica=""}'])


def check_failed(live: Running, before: dict[str, float], count: int) -> None:
    """Checks that since the figures `before` so many images failed, and that none was cancelled."""
    labels = (f'{{outcome="{name}",replica=""}}' for name in ("failed", "cancelled"))
    failed, cancelled = ("adt_images_total" + label for label in labels)
    wait_for(lambda: live.figures[failed] == before[failed] + count)
    assert live.figures[cancelled] == before[cancelled]


def test_nobody_starves(live: Running, gate: threading.Event) -> None:
    """While requests for one method keep coming, a request for another method is served in its turn."""
    finished: list[str] = []

    def ask(method: str, name: str) -> None:
        live.image(method=method)
        finished.append(name)

    names = [("self-draft", "early")] * 3 + [("ar", "other")] + [("self-draft", "late")] * 6
    with ThreadPoolExecutor(len(names)) as pool:
        for count, words in enumerate(names, start=1):
            pool.submit(ask, *words)
            wait_for(lambda count=count: live.service.scheduler.backlog == count)
        gate.set()
    assert finished[:4] == ["early"] * 3 + ["other"] and len(finished) == 10


def test_a_client_who_leaves_frees_its_slots(live: Running, pipe: Pipeline, slow: list[float]) -> None:
    """This holds for streams and plain requests, in slots and in the queue. An image beside them is not
    affected."""
    with ThreadPoolExecutor(3) as pool:
        beside = pool.submit(live.image, seed=7, method="ar")
        wait_for(lambda: flying(live) == 1)
        stream = live.openai.images.generate(
            prompt=PROMPT, stream=True, n=4, extra_body={"partial_rows": 1, "method": "ar"}
        )
        next(iter(stream))
        assert live.service.scheduler.backlog == 5
        stream.close()
        started = time.perf_counter()
        wait_for(lambda: live.service.scheduler.backlog == 1)
        assert time.perf_counter() - started < 2
        with pytest.raises(httpx.ReadTimeout):
            body = {"prompt": PROMPT, "method": "ar", "n": 3}
            httpx.post(f"{live.site}/v1/images/generations", json=body, timeout=0.3)
        wait_for(lambda: live.service.scheduler.backlog <= 1)
        assert beside.result() == offline(pipe, seed=7)
    assert live.image(seed=8) == offline(pipe, seed=8)


def test_a_client_who_leaves_while_other_slots_are_filled(
    pipe: Pipeline, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image in a slot is given up while two others are prefilled, which are not affected."""
    prefill, submit, jobs = ARTarget.prefill, Scheduler.submit, list[Job]()

    def noted(scheduler: Scheduler, given: list[Job]) -> None:
        submit(scheduler, given)
        jobs.extend(given)

    def leaving(*given: Any) -> object:
        if len(jobs) == 3:
            live.service.scheduler.leave([jobs.pop(0)])
        return prefill(*given)

    monkeypatch.setattr(Scheduler, "submit", noted)
    monkeypatch.setattr(ARTarget, "prefill", leaving)
    body = {"prompt": PROMPT, "method": "ar", "n": 2, "seed": 7}
    with running(pipe, replace(SETTINGS, slots=3)) as live, ThreadPoolExecutor(2) as pool:
        pool.submit(live.post, {"prompt": PROMPT, "method": "ar"}, timeout=2)
        wait_for(lambda: flying(live) == 1)
        others = pool.submit(live.post, body)
        wait_for(lambda: len(jobs) == 3)
        gate.set()
        made = others.result()
        assert made.status_code == 200 and len(jobs) == 2, made.text
        for item in made.json()["data"]:
            assert base64.b64decode(item["b64_json"]) == offline(pipe, method="ar", seed=item["seed"])


def test_overflow_is_refused_with_the_time_to_wait(live: Running, slow: list[float]) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(live.post, {"prompt": PROMPT, "n": 10})
        wait_for(lambda: live.service.scheduler.backlog == 10)
        answer = live.post({"prompt": PROMPT, "n": 3})
        assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        with pytest.raises(openai.RateLimitError):
            live.openai.images.generate(prompt=PROMPT, n=10)
        slow[0] = 0.0
        assert len(first.result().json()["data"]) == 10


def test_logits_that_are_no_numbers(live: Running, pipe: Pipeline, slow: list[float]) -> None:
    """One prompt has a token whose embedding is NaN. It fails alone, and its slot makes images again."""
    slow[0], figures = 0.02, live.figures
    embedding = pipe.model.decoder.embed.weight
    token = max(set(pipe.model.encode("~").tokens(0)) - set(pipe.model.encode(PROMPT).tokens(0)))
    before = embedding[token].clone()
    try:
        embedding.data[token] = float("nan")
        with ThreadPoolExecutor(4) as pool:
            others = [pool.submit(live.image, seed=n) for n in range(3)]
            answer = live.post({"prompt": "~"})
            stream = live.openai.images.generate(prompt="~", stream=True)
            with pytest.raises(openai.APIError, match="not numbers"):
                list(stream)
            made = [other.result() for other in others]
    finally:
        embedding.data[token] = before
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert made == [offline(pipe, seed=n) for n in range(3)]
    check_failed(live, figures, 2)
    assert live.image(prompt="~", seed=1) == offline(pipe, "~", seed=1)


def test_pixels_have_their_own_thread(live: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are made neither by the decoding thread nor by the event loop, so that neither waits."""
    threads, paint = list[str](), Painter.picture

    def watched(*given: Any) -> str:
        threads.append(threading.current_thread().name)
        return paint(*given)

    monkeypatch.setattr(Painter, "picture", watched)
    assert live.post({"prompt": PROMPT, **ROWS}).status_code == 200
    assert len(threads) == 4 and all(name.startswith("pixels") for name in threads)


def test_a_codec_that_fails(live: Running, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    paint, bad, figures = Painter.picture, pipe(PROMPT, seed=6).codes[0], live.figures

    def failing(painter: Painter, codes: list[int], *more: Any) -> str:
        if codes[:5] == bad[:5]:
            raise RuntimeError("no pixels")
        return paint(painter, codes, *more)

    monkeypatch.setattr(Painter, "picture", failing)
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(live.image, seed=5)
        answer = live.post({"prompt": PROMPT, "seed": 6})
        assert answer.status_code == 500 and "no pixels" in answer.json()["error"]["message"]
        assert good.result() == offline(pipe, seed=5)
    with pytest.raises(openai.APIError, match="no pixels"):
        list(live.openai.images.generate(prompt=PROMPT, stream=True, extra_body={"seed": 6}))
    check_failed(live, figures, 2)


def test_a_decoding_that_fails(live: Running, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of our code fails all images in flight, but the next image is decoded."""
    figures = live.figures
    with monkeypatch.context() as patch:
        patch.setattr(ARTarget, "forward", lambda *_: 1 / 0)
        with ThreadPoolExecutor(2) as pool:
            for answer in pool.map(live.post, [{"prompt": PROMPT}] * 2):
                assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    check_failed(live, figures, 2)
    assert live.image(seed=5) == offline(pipe, seed=5)


def test_a_decoding_thread_that_ends(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the device is lost, images in flight and in the queue fail, and later requests are refused."""
    gate = threading.Event()

    def lost(*_: Any) -> None:
        assert gate.wait(30)
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(ARTarget, "forward", lost)
    monkeypatch.setattr("adt_tree.engine_cache.free_memory", lost)
    with running(pipe, SETTINGS) as live, ThreadPoolExecutor(3) as pool:
        first = pool.submit(live.post, {"prompt": PROMPT, "n": 3, "method": "ar"})
        wait_for(lambda: live.service.scheduler.backlog == 3)
        more = [pool.submit(live.post, {"prompt": PROMPT, "stream": stream}) for stream in (False, True)]
        wait_for(lambda: live.service.scheduler.backlog == 5)
        assert httpx.get(f"{live.site}/health").status_code == 200
        gate.set()
        assert first.result().status_code == more[0].result().status_code == 500
        assert '"server_error"' in more[1].result().text
        wait_for(lambda: not live.service.scheduler.alive)
        assert httpx.get(f"{live.site}/health").status_code == 503
        answer = live.post({"prompt": PROMPT})
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "server_error"


def test_the_first_engine_is_built_at_start(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is taken before a request comes. A service without room for it does not start."""
    build, built = engine_cache.build, list[str]()

    def noted(model: Any, method: Method, *room: Any) -> object:
        if len(built) == 2:
            raise UserError("no room")
        built.append(method.name)
        return build(model, method, *room)

    monkeypatch.setattr(engine_cache, "build", noted)
    with running(pipe, SETTINGS) as live:
        assert built == [pipe.default_method]
        live.image()
    assert len(built) == 1
    built.append("enough")
    with pytest.raises(UserError, match="no room"):
        create_app(pipe, SETTINGS)
