"""The parts of a GPU check, each a process of its own: what they run, and what their results say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from adt_tree.method import METHODS
from eval.tables import STORED, table
from models.registry import PUBLISHED, SPECS
from storage.process import environment

ROOT = Path(__file__).resolve().parents[1]
EXACT = tuple(name for name, spec in METHODS.items() if spec.exact and name != "ar")
NODES = "32"  # of self-drafted trees, whose sizes would otherwise follow the measured times
# What Anole is measured with: the default, which records the parts of a step as CUDA graphs, with a profile;
# then one factor at a time. Other families have the default alone.
FACTORS = (("--profile",), ("--compile",), ("--no-cuda_graphs",))
IN_FLIGHT, ROW_START = "16", "2"
MAX_MEMORY = 1.2  # peak over estimate

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """One process of a check."""

    name: str  # the group that the command line names: one of cli.gpu_check.PARTS
    words: tuple[str, ...]  # what follows the interpreter

    @property
    def folder(self) -> str:
        """Returns the name of the folder of this part's results."""
        return "_".join(word.lstrip("-") for word in self.words if word not in ("main.py", "bench"))


def parts(device: str) -> list[Part]:
    """Returns all parts of a check. On a CPU there is one factor, the default."""
    bench = ("main.py", "bench", "--device", device, "--temperatures", "1")
    random = (*bench, "--random_weights", "--model")
    drafted = ("--methods", "self-draft", "--total_token", NODES)
    found = [
        Part("tests", ("-m", "pytest", "-q", "-o", "addopts=", "-m", "gpu", "tests/models/test_gpu.py")),
        Part("emoji", (*bench, "--precision", "fp32", "--methods", *EXACT)),
        Part("batch", (*random, "anole", "--batch_size", IN_FLIGHT, "--num_images", IN_FLIGHT, *drafted)),
        Part("rows", (*random, "anole", "--num_images", "1", "--methods", "ar", "--row_start", ROW_START)),
    ]
    for family in PUBLISHED:
        factors = FACTORS if (family, device) == ("anole", "cuda") else FACTORS[:1]
        methods = [drafted, *([("--methods", "eagle-2")] if METHODS[SPECS[family].method].network else [])]
        for factor, method in product(factors, methods):
            found.append(Part(family, (*random, family, "--num_images", "1", *method, *factor)))
    return found


def run(part: Part, folder: Path, seconds: float, device: str) -> Document:
    """Runs a part for at most `seconds` and returns its result: the counts of tests or the document of bench,
    or under "failed" the reason why there is none. The stored document of the same code, device and torch is
    not made anew."""
    target = folder / part.folder
    tests = part.name == "tests"
    store = ("--junitxml", f"{target}.xml") if tests else ("--output_dir", str(target))
    command = [sys.executable, *part.words, *store]
    print(f"gpu_check: {' '.join(command[1:])}", file=sys.stderr)
    result: Document = {"part": part.name, "command": " ".join(("python", *command[1:]))}
    if (target / STORED).is_file():
        stored, now = json.loads((target / STORED).read_text(encoding="utf-8")), environment(device)
        if all(stored["environment"][key] == now[key] for key in ("code", "device", "torch")):
            return result | stored
    try:
        done = subprocess.run(
            command, cwd=ROOT, timeout=seconds, text=True, check=False,
            stdout=sys.stderr if tests else subprocess.PIPE,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return result | {"failed": f"not finished after {seconds:.0f} s; run it again with more --minutes"}
    if tests and done.returncode in (0, 1):
        return result | {"tests": counts(Path(f"{target}.xml"))}
    if done.returncode:
        return result | {"failed": f"ended with status {done.returncode}; its reason stands above"}
    return result | json.loads(done.stdout.splitlines()[-1])


def counts(file: Path) -> Document:
    """Returns the counts of the tests in pytest's JUnit file, and the names of those that failed."""
    cases = list(ElementTree.parse(file).iter("testcase"))
    skipped = sum(case.find("skipped") is not None for case in cases)
    kinds = ("failure", "error")
    failed = [case.get("name") for case in cases if any(case.find(kind) is not None for kind in kinds)]
    return {"passed": len(cases) - skipped - len(failed), "skipped": skipped, "failed": failed}


def rows(results: Sequence[Mapping[str, Any]]) -> list[Document]:
    """Returns a row for every method that a part measured, with the part's model, precision and factor."""
    found = []
    for result in results:
        memory, weights = result.get("memory") or {}, result.get("weights_read") or {}
        for row in result.get("rows", ()):
            options = result["options"]
            found.append(
                {
                    "model": options["model"],
                    "type": result["environment"]["precision"],
                    "method": row["method"],
                    "factor": " ".join(word for (word,) in FACTORS[1:] if word in result["command"]),
                    "exact": row["exact"],
                    **{key: row[key] for key in ("step_ms", "tau", "SR", "images", "same_image")},
                    **{key: weights.get(key) for key in ("weights_mb", "read_ms")},
                    **{key: memory.get(key) for key in ("peak_bytes", "estimate_bytes")},
                    "compile_s": result.get("compile_s"),
                }
            )
    return found


def wrong(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for everything that must not happen on any GPU: a failed test, a part that did not run,
    other codes than the AR baseline's in fp32, and more memory than the estimate by a fifth. Times are not
    judged."""
    lines = [f"failed: {result['command']}: {result['failed']}" for result in results if "failed" in result]
    for result in results:
        lines += [f"test failed: {name}" for name in result.get("tests", {}).get("failed", ())]
    for row in rows(results):
        name = " ".join(filter(None, (row["model"], row["type"], row["method"], row["factor"])))
        if row["exact"] and row["type"] == "fp32" and row["same_image"] < 1:
            lines.append(f"other codes: {name}: {row['same_image']:.0%} of the images are those of ar")
        if row["peak_bytes"] and row["peak_bytes"] > MAX_MEMORY * row["estimate_bytes"]:
            peak, estimate = row["peak_bytes"] / 1e9, row["estimate_bytes"] / 1e9
            lines.append(f"more memory: {name}: {peak:.2f} GB, and the estimate is {estimate:.2f} GB")
    return lines


def text_of(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns the results as a table and a line on the tests."""
    shown = {
        "model": "model", "type": "type", "method": "method", "factor": "factor", "step_ms": "ms per step",
        "read_ms": "ms to read the weights", "tau": "tau", "SR": "speed-up", "same_image": "= AR",
        "compile_s": "s to compile",
    }  # fmt: skip
    lines = []
    for row in rows(results):
        line = {title: str(row[key]) for key, title in shown.items() if row[key] not in (None, "")}
        if row["peak_bytes"]:
            line |= {key: f"{row[f'{key}_bytes'] / 1e9:.2f} GB" for key in ("peak", "estimate")}
        lines.append(line)
    tests = [
        f"tests: {done['passed']} passed, {done['skipped']} skipped, {len(done['failed'])} failed"
        for done in (result["tests"] for result in results if "tests" in result)
    ]
    return "\n\n".join([*([table(lines)] if lines else []), *tests])
