"""load_test: sends requests to a running service on this machine, times them and checks the answers."""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.parse import urlsplit

from adt_tree.errors import UserError
from adt_tree.method import LANTERN_SUFFIX, Lantern, all_names, split_name
from cli.parser import Options as Base
from cli.parser import as_written, declare, option
from eval.runs.prompts import BENCH_FILE, read_file
from serve.settings import is_loopback

if TYPE_CHECKING:
    from serve.load import Outcome

ROOT = Path(__file__).resolve().parent.parent
SERVICE_ALONE = ("pid", "rate", "cancelled", "compare")  # options that --offline does not read


@declare
class Options(Base):
    """load"""

    url: str = option("the service; it must run on this machine", "http://127.0.0.1:8000", unit="URL")
    pid: int | None = option(
        "process id of the service: also report its memory, open files and threads after a quarter of the "
        "requests and at the end (Linux)",
        unit="PID",
        least=1,
    )
    requests: int = option("number of requests", 200, least=1, most=10_000)
    concurrency: int = option(
        "number of clients that send one request after the other", 16, least=1, most=256
    )
    rate: float | None = option(
        "mean number of requests per second; they arrive at random, whatever --concurrency says",
        unit="PER_S",
        above=0,
    )
    minutes: float = option("time after which the test ends as failed", 15.0, above=0, most=120)
    cancelled: float = option(
        "share of requests whose client goes away at the first partial image", 0.0, least=0, most=1
    )
    partial_images: int = option(
        "partial images of each request; 0: the image alone", 3, least=0, most=3, unit="IMAGES"
    )
    methods: tuple[str, ...] = option(
        f"methods of the requests, in equal shares; NAME{LANTERN_SUFFIX}: with LANTERN as published",
        ("self-draft",),
        choices=all_names(),
        unit="METHOD",
    )
    temperatures: tuple[float, ...] = option("temperatures, in equal shares", (1.0,), least=0, most=100)
    guidances: tuple[float, ...] = option("scales of guidance, in equal shares", (3.0,), least=0, most=100)
    prompts: str | None = option(
        f"file of prompts, which are used in turn (default: configs/{BENCH_FILE.name})", unit="FILE"
    )
    seed: int = option("seed of the order of requests and of their images' seeds", 42)
    compare: str | None = option(
        "after the test, generate every image by Pipeline with this model, and compare its PNG", unit="NAME"
    )
    batch_size: int = option("images in flight for --compare", 4, unit="IMAGES", least=1)
    output_dir: str = option("folder of load.json, to which the result is added", "runs/load", unit="DIR")
    offline: int | None = option(
        "send nothing: time generate_images on --requests prompts, with this many images in flight",
        unit="BATCH_SIZE",
        least=1,
    )


def run(options: Options) -> None:
    """Sends the requests and adds their figures to load.json; the last line printed is one JSON document.

    Ends with status 1 after a fault: a request that failed, an image that differs from the one made offline,
    an image still in flight at the end, or, with --pid, memory, files or threads of the service that grew.
    Raises UserError if there is no service, or if time ran out.
    """
    if not is_loopback(urlsplit(options.url).hostname or ""):
        raise UserError(
            f"--url {options.url}: load is sent to this machine alone; give http://127.0.0.1:PORT"
        )
    row, faults = offline_row(options) if options.offline else service_row(options)
    from eval import load_tables
    from eval.runs.process import environment

    row |= {"command": f"python main.py {shlex.join(sys.argv[1:])}", "environment": environment("cpu")}
    load_tables.add(Path(options.output_dir) / load_tables.STORED, row)
    print("\n".join([*faults, load_tables.text_of([row])]))
    print(json.dumps({**row, "faults": faults}))
    if faults:
        sys.exit(1)


def service_row(options: Options) -> tuple[dict[str, Any], list[str]]:
    """Returns the figures of a test of the running service, and its faults."""
    try:
        from serve import load
    except ImportError as error:
        raise UserError(
            f"load_test needs openai ({error}): `bash scripts/setup.sh requirements-serve.txt` installs it"
        ) from None

    if options.cancelled and not options.partial_images:
        raise UserError(
            f"--cancelled {options.cancelled:g}: clients go at the first partial image, so give "
            "--partial_images 1 or more"
        )
    prompts = [prompt.text for prompt in read_file(Path(options.prompts or BENCH_FILE))]
    settings = (options.methods, options.temperatures, options.guidances)
    combinations = math.prod(map(len, settings))
    warm_up = load.plan(prompts, *settings, combinations, 0.0, options.seed)
    calls = load.plan(prompts, *settings, options.requests, options.cancelled, options.seed + 1)
    target = load.Target(options.url, options.pid, options.concurrency, options.rate, options.partial_images)
    try:
        measured = asyncio.run(load.measure(target, warm_up, calls, 60 * options.minutes))
    except URLError as error:
        raise UserError(f"--url {options.url}: {error.reason}; start `main.py serve` there") from None
    except TimeoutError:
        raise UserError(f"--minutes {options.minutes:g}: the requests took longer") from None
    images = [outcome for outcome in measured.outcomes if outcome.state == load.IMAGE]
    compared = differences(options, images) if options.compare else None
    arrivals = f"{options.concurrency} clients" if options.rate is None else f"{options.rate:g} per s"
    row = {"methods": list(options.methods), "arrivals": arrivals, "requests": len(calls)}
    row |= {"partial_images": options.partial_images, **measured.figures}
    if compared is not None:
        row |= {"compared": len(images), "different": len(compared)}
    return row, measured.faults + (compared or [])


def differences(options: Options, images: Sequence[Outcome]) -> list[str]:
    """Returns a line for every image whose PNG is not that of Pipeline for its settings and seed."""
    from adt_tree.pipeline import Pipeline
    from eval.runs.run_folder import png_bytes

    pipe = Pipeline.from_pretrained(str(options.compare))
    groups: dict[tuple[str, float, float], list[Outcome]] = defaultdict(list)
    for image in images:
        groups[image.call.method, image.call.temperature, image.call.guidance].append(image)
    lines = []
    for (method, temperature, guidance), group in groups.items():
        sampling = replace(pipe.sampling, temperature=temperature, guidance=guidance)
        seeds = [image.call.seed for image in group]
        texts = [image.call.prompt for image in group]
        plain, relaxed = split_name(method)
        chosen = pipe.method(plain, sampling=sampling, lantern=Lantern() if relaxed else None)
        output = pipe(texts, chosen, seed=seeds, batch_size=options.batch_size)
        for image, picture in zip(group, output.images, strict=True):
            if png_bytes(picture) != image.png:
                lines.append(f"{image.call}: the image differs from the one made offline")
    return lines


def offline_row(options: Options) -> tuple[dict[str, Any], list[str]]:
    """Returns the figures of generate_images, run in a new process. Raises UserError if it fails, and for
    options that it does not read."""
    for name in ("methods", "temperatures", "guidances"):
        if len(getattr(options, name)) > 1:
            raise UserError(f"--offline {options.offline} takes one value: {as_written(options, name)}")
    for name in SERVICE_ALONE:
        if getattr(options, name):
            raise UserError(f"{as_written(options, name)}: --offline sends no requests; leave one out")
    (method,), (temperature,), (guidance,) = options.methods, options.temperatures, options.guidances
    plain, relaxed = split_name(method)
    with tempfile.TemporaryDirectory() as folder:
        words = {
            "prompt": options.prompts or BENCH_FILE,
            "num_images": options.requests,
            "method": plain,
            "cfg": guidance,
            "temperature": temperature,
            "batch_size": options.offline,
            "heatmaps": 0,
            "output_dir": folder,
        }
        line = [sys.executable, "main.py", "generate_images"]
        line += [str(word) for name, value in words.items() for word in (f"--{name}", value)]
        line += ["--lantern"] if relaxed else []
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"--offline {options.offline}: {done.stderr.strip().splitlines()[-1]}")
    result = json.loads(done.stdout.splitlines()[-1])
    row = {"methods": [method], "arrivals": "generate_images", "slots": options.offline, "partial_images": 0}
    figures = {"requests": result["images"], "images": result["images"], "seconds": result["wall_s"]}
    return {**row, **figures, "images_per_min": 60 * result["images_per_s"]}, []
