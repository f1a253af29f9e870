"""gpu_check: what a GPU has to prove, in one run and one JSON document; on the CPU with tiny shapes."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eval.errors import UserError
from eval.parser import at_least

PARTS = ("tests", "tokens", "emoji", "anole", "lumina_mgpt", "llamagen2", "transformers")
TESTS_S = 240  # seconds the tests may take
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|errors?|deselected)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of gpu_check."""
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one"
    )
    parser.add_argument(
        "--shapes",
        choices=("auto", "published", "tiny"),
        default="auto",
        help="dimensions of the models with random weights; auto: published on cuda, else tiny",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help="tests: those marked gpu; tokens: on the device those of the CPU, in fp32; emoji, anole, "
        "lumina_mgpt, llamagen2: speed of the embedded model and of the others with random weights; "
        "transformers: its generate() on the embedded model and on Anole's dimensions (default: all)",
    )
    parser.add_argument(
        "--codes",
        type=at_least(32),
        default=256,
        metavar="CODES",
        help="of an image whose drawing is timed, in the middle of a full one; in whole rows",
    )
    parser.add_argument("--model_path", metavar="DIR", help="the embedded model (default: the one here)")
    parser.add_argument(
        "--output", default="runs/gpu_check.json", metavar="FILE", help="where the document goes"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def run(args: argparse.Namespace) -> None:
    """Run the parts; the last line printed is one JSON document. UserError names the parts that failed."""
    from tqdm import tqdm

    from eval import gpu_parts
    from eval.outputs import write_json
    from eval.session import environment
    from models.loading import pick_device

    device = pick_device(args.device)
    shapes = args.shapes if args.shapes != "auto" else "published" if device == "cuda" else "tiny"
    setting = gpu_parts.Setting.of(device, shapes, args.codes, args.model_path)
    result: dict[str, Any] = {
        "command": f"python main.py {shlex.join(sys.argv[1:])}",
        **environment(device),
        "cuda": device == "cuda",
        "shapes": shapes,
        "parts": {},
    }
    work: dict[str, Callable[[], dict[str, Any]]] = {
        "tests": run_tests,
        "tokens": lambda: gpu_parts.tokens(setting),
        "emoji": lambda: gpu_parts.embedded(setting),
        "transformers": lambda: gpu_parts.transformers(setting),
        **{name: lambda name=name: gpu_parts.random(name, setting) for name in gpu_parts.SHAPED},
    }
    with tqdm(args.parts, unit="part", disable=None) as bar:
        for name in bar:
            bar.set_postfix_str(name)
            result["parts"][name] = attempt(work[name], args.debug)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    write_json(Path(args.output), result)
    print(json.dumps(result))
    failed = [name for name, found in result["parts"].items() if "failed" in found]
    if failed:
        raise UserError(f"gpu_check: failed: {', '.join(failed)}; what went wrong is in {args.output}")


def attempt(part: Callable[[], dict[str, Any]], debug: bool) -> dict[str, Any]:
    """What a part found, with its seconds; `failed` says why it did not. It must not hide the others."""
    started = time.perf_counter()
    try:
        found = part()
    except Exception as error:
        if debug:
            raise
        found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    return {**found, "seconds": round(time.perf_counter() - started, 1)}


def run_tests() -> dict[str, Any]:
    """The tests marked gpu; without a GPU they are skipped, which is counted."""
    root = Path(__file__).resolve().parent.parent
    words = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests")
    try:
        done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=TESTS_S, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"the tests took longer than {TESTS_S} s"}
    last = (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""])[-1]
    counts = {kind: int(number) for number, kind in COUNTED.findall(last)}
    return {"counts": counts} if done.returncode == 0 else {"failed": last or f"exit {done.returncode}"}
