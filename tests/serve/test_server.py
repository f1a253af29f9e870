"""`main.py serve` as a process: what it refuses, and how it ends."""

from __future__ import annotations

import base64
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from adt_tree import Pipeline
from adt_tree.errors import UserError
from cli import serve as command
from models.codecs.codec import CodeVectors
from serve.app import create_app
from serve.settings import Settings
from tests.support.checkpoints import Checkpoints
from tests.support.runs import ROOT
from tests.support.service import offline, running, wait_for

# main.py, whose passes wait until the file named by the first argument exists.
GATED = """
import asyncio, os, sys, time
from models.target import ARTarget
import main, torch
gate, forward = sys.argv.pop(1), ARTarget.forward
torch.set_num_threads(1)
def wait_and_forward(*arguments):
    while not os.path.exists(gate):
        time.sleep(0.01)
    return forward(*arguments)
ARTarget.forward = wait_and_forward
async def wait_closed(server):  # as from Python 3.12 on: until the last connection is closed
    if server._waiters is not None:
        server._waiters.append(server._loop.create_future())
        await server._waiters[-1]
asyncio.base_events.Server.wait_closed = wait_closed
sys.exit(main.main(sys.argv[1:]))
"""
BODY: dict[str, Any] = {"prompt": "red heart", "method": "ar", "n": 4}


@contextmanager
def served(gate: Path, words: list[str], *more: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yields the process and its address. No image is finished before the file `gate` exists."""
    options = [*words, "--port", "0", "--slots", "2", *map(str, more)]
    line = [sys.executable, "-c", GATED, str(gate), "serve", *options]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for text in process.stdout:
            if match := re.search(r"(http://\S+)/v1", text):
                break
        else:
            raise AssertionError(process.communicate()[1])
        yield process, match[1]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def words(checkpoints: Checkpoints) -> list[str]:
    """Returns the options of the tiny model."""
    return [*checkpoints["emoji"].words(), "--device", "cpu"]


def post(site: str, **fields: Any) -> httpx.Response:
    """Asks for images."""
    return httpx.post(f"{site}/v1/images/generations", json={**BODY, **fields}, timeout=180)


def accepted(site: str) -> int:
    """Returns the number of images that are in flight or wait."""
    return httpx.get(f"{site}/health", timeout=180).json()["images"]


def test_sigterm_loses_nothing(words: list[str], pipe: Pipeline, tmp_path: Path) -> None:
    """Images in slots, in the queue and in a stream are finished, and new requests are refused."""
    gate = tmp_path / "gate"
    with served(gate, words) as (process, site), ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(post, site, seed=number) for number in range(3)]
        answers.append(pool.submit(post, site, seed=9, stream=True, partial_rows=1))
        wait_for(lambda: accepted(site) == 4 * BODY["n"], 120)
        process.send_signal(signal.SIGTERM)
        gate.touch()
        made = [answer.result() for answer in answers]
        assert [answer.status_code for answer in made] == [200] * 4
        for number, answer in enumerate(made[:3]):
            for image in answer.json()["data"]:
                assert base64.b64decode(image["b64_json"]) == offline(pipe, method="ar", seed=image["seed"])
            assert answer.json()["data"][0]["seed"] == number
        assert made[3].text.count("event: image_generation.completed") == BODY["n"]
        assert process.wait(timeout=120) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{site}/health")


def test_a_client_is_told_when_the_grace_ends(words: list[str], tmp_path: Path) -> None:
    """The client of an unfinished image gets an error in OpenAI's form, in a stream as its last event, and
    the exit status is 1."""
    gate = tmp_path / "gate"
    with served(gate, words, "--grace", 1) as (process, site), ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(post, site, n=4, stream=stream) for stream in (False, True)]
        wait_for(lambda: accepted(site) == 8, 120)
        process.send_signal(signal.SIGTERM)
        cut, stream = (answer.result() for answer in answers)
        gate.touch()
        assert cut.status_code == 503 and cut.json()["error"]["code"] == "server_shutting_down"
        assert stream.status_code == 200 and stream.text == f"data: {json.dumps(cut.json())}\n\n"
        assert process.wait(timeout=120) == 1 and process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_second_signal_cuts_at_once(words: list[str], tmp_path: Path) -> None:
    """The process ends in order, without a traceback, and the exit status is 1."""
    gate = tmp_path / "gate"
    with served(gate, words) as (process, site), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, site, n=10)
        wait_for(lambda: accepted(site) == 10, 120)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: not listens(site))
        process.send_signal(signal.SIGTERM)
        time.sleep(1)  # time for the service to give up the images, whose pass still waits
        gate.touch()
        assert process.wait(timeout=60) == 1 and process.stderr is not None
        assert process.stderr.read() == ""
        assert isinstance(answer.exception(), httpx.RemoteProtocolError) or answer.result().status_code == 503


def listens(site: str) -> bool:
    """Returns whether the service takes connections."""
    try:
        return httpx.get(f"{site}/health").is_success
    except httpx.TransportError:
        return False


def parse(*arguments: object) -> command.Options:
    """Returns the options of these words."""
    return command.Options.parse([str(word) for word in arguments])


def test_beyond_this_machine_only_with_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(command.KEY_VARIABLE, raising=False)
    for host in ("0.0.0.0", "::", "example.org"):
        with pytest.raises(UserError, match=f"--host {host}"):
            command.run(parse("--host", host))
    key = tmp_path / "key"
    for content in (b"", b" \n", b"two words", "secret".encode("utf-16")):
        key.write_bytes(content)
        with pytest.raises(UserError, match="key"):
            command.read_key(parse("--api_key_file", key))
    key.write_text("\ufeffsésame\n", encoding="utf-8")
    assert command.read_key(parse("--api_key_file", key)) == "sésame"
    monkeypatch.setenv(command.KEY_VARIABLE, "other")
    assert command.read_key(parse()) == "other"
    with pytest.raises(UserError, match="missing"):
        command.read_key(parse("--api_key_file", tmp_path / "missing"))


def test_a_port_that_is_taken(pipe: Pipeline, refused: Callable[..., str]) -> None:
    with running(pipe, Settings(slots=1)) as live:
        assert f"--port {live.port}" in refused("serve", "--port", live.port)
        assert live.image(seed=1) == offline(pipe, seed=1)


def test_a_model_without_pixels(pipe: Pipeline) -> None:
    with pytest.raises(UserError, match="pixels"):
        create_app(Pipeline(replace(pipe.model, codec=CodeVectors(pipe.model.codebook, "no pixels"))))


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "serve.app", None)
    with pytest.raises(UserError, match=r"requirements-serve\.txt"):
        command.run(parse())


@pytest.mark.parametrize("words", [("--queue", 9), ("--slots", 0), ("--timeout", 0), ("--grace", -1)])
def test_numbers_out_of_range(words: tuple[object, ...], refused: Callable[..., str]) -> None:
    assert str(words[1]) in refused("serve", *words)
