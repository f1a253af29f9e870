"""Puts load on a running service: the `openai` client sends requests of mixed settings. No torch.

A request streams its image, with or without partial images. Some clients go away at the first partial image.
The plan is made from a seed, so that two runs send the same requests. A request that the service refuses
(429) is counted and not sent again.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
from openai import APIError, APIStatusError, AsyncOpenAI

from adt_tree.method import split_name
from serve.settings import KEY_VARIABLE

STATES = IMAGE, CANCELLED, REFUSED, FAILED = "images", "cancelled", "refused", "failed"
PERCENTILES = (50, 90, 99)
SETTLING = 50  # most queries of /health, 0.2 s apart, while images are in flight
MAX_GROWTH = 1.05  # ratio of the memory after all requests to that after the first quarter


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a plan."""

    prompt: str
    seed: int
    method: str  # with LANTERN's suffix: the request asks for LANTERN with its published settings
    temperature: float
    guidance: float
    cancel: bool  # whether the client goes away at the first partial image

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the request that OpenAI's API does not have."""
        method, lantern = split_name(self.method)
        values = {"temperature": self.temperature, "guidance": self.guidance}
        return {"seed": self.seed, "method": method, "lantern": lantern, **values}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a request. Seconds count from the moment at which it was sent."""

    call: Call
    state: str  # IMAGE, CANCELLED, REFUSED (429) or FAILED
    first: float | None = None  # seconds to the first partial image
    seconds: float | None = None  # to the image
    png: bytes = b""
    fault: str = ""  # of a failed request


@dataclass(frozen=True, slots=True)
class Process:
    """The resources of a process on this machine, which must run Linux."""

    rss: int  # bytes
    files: int  # open files, sockets and pipes
    threads: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Reads the resources of a process from /proc. Raises OSError without /proc or such a process."""
        folder = Path("/proc") / str(pid)
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        rss, threads = int(status["VmRSS"].split()[0]) * 1024, int(status["Threads"])
        return cls(rss, len(list((folder / "fd").iterdir())), threads)


def plan(
    prompts: Sequence[str],
    methods: Sequence[str],
    temperatures: Sequence[float],
    guidances: Sequence[float],
    count: int,
    cancelled: float,
    seed: int,
) -> list[Call]:
    """Returns `count` requests: every combination of settings occurs equally often, in random order.

    cancelled: share of requests whose client goes away. seed: chooses the order of the settings, the requests
    that are cancelled and the seeds of the images.
    """
    generator = random.Random(seed)
    settings = list(product(methods, temperatures, guidances))
    chosen = [settings[number % len(settings)] for number in range(count)]
    leaving = [number < round(cancelled * count) for number in range(count)]
    for values in (chosen, leaving):
        generator.shuffle(values)
    return [
        Call(prompts[number % len(prompts)], generator.randrange(2**31), *values, cancel)
        for number, (values, cancel) in enumerate(zip(chosen, leaving, strict=True))
    ]


async def send(client: AsyncOpenAI, call: Call, partial_images: int) -> Outcome:
    """Sends one request and follows its stream to the image, or to where its client goes away.

    partial_images: number of them that the client asks for, 0 to 3.
    """
    started, first = time.perf_counter(), None
    try:
        stream = await client.images.generate(
            prompt=call.prompt, stream=True, partial_images=partial_images, extra_body=call.fields
        )
        async with stream:
            async for event in stream:
                now = time.perf_counter() - started
                if event.type == "image_generation.completed":
                    png = base64.b64decode(event.b64_json)
                    return Outcome(call, IMAGE, first or now, now, png)
                first = first or now
                if call.cancel:
                    return Outcome(call, CANCELLED, first)
        return Outcome(call, FAILED, first, fault="the stream ended before the image")
    except APIStatusError as error:
        state = REFUSED if error.status_code == 429 else FAILED
        return Outcome(call, state, fault=f"{error.status_code} {error.message}")
    except APIError as error:
        return Outcome(call, FAILED, first, fault=f"{type(error).__name__}: {error.message}")


@dataclass(frozen=True, slots=True)
class Target:
    """A service, and how requests arrive there."""

    url: str
    pid: int | None  # process whose resources the test watches; None: it watches none
    concurrency: int  # number of clients, each of which sends a request when its last one has ended
    rate: float | None  # mean requests per second of a Poisson process; None: `concurrency` clients send them
    partial_images: int  # of every request


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of a test: figures, the outcome of every request, and a line for every fault."""

    figures: dict[str, Any]
    outcomes: list[Outcome]
    faults: list[str]


async def send_all(client: AsyncOpenAI, target: Target, calls: Sequence[Call]) -> list[Outcome]:
    """Sends requests as they arrive, and returns their outcomes in the order in which they ended."""
    generator, outcomes = random.Random(len(calls)), list[Outcome]()
    places = asyncio.Semaphore(target.concurrency if target.rate is None else len(calls))

    async def one(call: Call) -> None:
        try:
            outcomes.append(await send(client, call, target.partial_images))
        finally:
            places.release()

    async with asyncio.TaskGroup() as tasks:
        for call in calls:
            if target.rate is not None:
                await asyncio.sleep(generator.expovariate(target.rate))
            await places.acquire()
            tasks.create_task(one(call))
    return outcomes


async def settle(url: str, limit_s: float) -> dict[str, Any]:
    """Waits until the service works on no image, for about 10 seconds at most: it needs time to notice that
    clients left. Returns what /health said last. limit_s: seconds to wait for one answer."""
    for _ in range(SETTLING):
        with await asyncio.to_thread(urlopen, f"{url}/health", timeout=limit_s) as answer:
            health = json.load(answer)
        await asyncio.sleep(0.2)
        if not health["images"]:
            break
    return health


async def measure(
    target: Target, warm_up: Sequence[Call], calls: Sequence[Call], limit_s: float
) -> Measurement:
    """Sends the requests of warm_up, which are not counted, and then `calls`.

    If the target has a pid, the first quarter of the requests ends before the next one is sent. The resources
    of the process after that quarter are compared with those at the end. Raises TimeoutError after limit_s
    seconds, and URLError if nothing answers at the address.
    """
    key, base = os.environ.get(KEY_VARIABLE, "none"), f"{target.url}/v1"
    quarter = len(calls) // 4 if target.pid else 0
    outcomes, held, seconds = list[Outcome](), list[Process](), 0.0
    async with (
        asyncio.timeout(limit_s),
        AsyncOpenAI(api_key=key, base_url=base, max_retries=0, timeout=limit_s) as client,
    ):
        await settle(target.url, limit_s)
        warmed_up = await send_all(client, replace(target, concurrency=1, rate=None), warm_up)
        for part in (calls[:quarter], calls[quarter:]):
            started = time.perf_counter()
            outcomes += await send_all(client, target, part)
            seconds += time.perf_counter() - started
            health = await settle(target.url, limit_s)
            if target.pid:
                held.append(Process.of(target.pid))
    failed = [outcome for outcome in warmed_up + outcomes if outcome.state == FAILED]
    faults = [f"{outcome.call}: {outcome.fault}" for outcome in failed]
    if health["images"]:
        faults.append(f"{health['images']} images are in flight after the last request")
    figures = {"slots": health["slots"], **summary(outcomes, seconds)}
    if target.pid:
        figures["held"] = [asdict(process) for process in held]
        faults += growth(*held)
    return Measurement(figures, outcomes, faults)


def growth(before: Process, after: Process) -> list[str]:
    """Returns a line for every resource of a process that grew: memory by more than 5 %, files and threads by
    any number."""
    bounds = {"rss": MAX_GROWTH * before.rss, "files": before.files, "threads": before.threads}
    return [
        f"the service had {name} = {getattr(before, name)}, now it has {getattr(after, name)}"
        for name, bound in bounds.items()
        if getattr(after, name) > bound
    ]


def summary(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Returns the figures of a test that took `seconds`: requests by outcome, images per minute, and
    percentiles of the seconds to the first partial image and to the image."""
    images = [outcome for outcome in outcomes if outcome.state == IMAGE]
    counts = {state: sum(outcome.state == state for outcome in outcomes) for state in STATES}
    rate = 60 * counts[IMAGE] / seconds
    return {**counts, "seconds": seconds, "images_per_min": rate, **percentiles(images)}


def percentiles(images: Sequence[Outcome]) -> dict[str, float]:
    """Returns the percentiles of the times of finished images, or an empty dict without images."""
    times = {"first": [image.first for image in images], "image": [image.seconds for image in images]}
    return {
        f"{name}_p{part}": float(np.percentile(values, part))
        for name, values in times.items()
        for part in PERCENTILES
        if values
    }
