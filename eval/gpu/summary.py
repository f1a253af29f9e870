"""The document of a GPU check: the merged results of its parts, compared with bounds, and their table.

This file does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eval.tables import markdown

MAX_AR_STEP = 1.3  # upper bound of an AR step, as a multiple of the time that reading the weights takes
MAX_TREE_STEP = 1.35  # upper bound of a step of self-draft with 32 nodes, as a multiple of an AR step
LARGE_MB = 12_000  # the bounds hold for models with more weights than this, such as 7B in 16 bits
SAME = ("commit", "changes", "device", "torch", "threads")  # parts of one document agree in these

Row = Mapping[str, Any]
GB = "{:.2f}".format
# Heading of a column -> key in a row, and the function that formats its values.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "model": ("model", str),
    "type": ("precision", str),
    "method": ("method", str),
    "mode": ("mode", str),
    "ms per step": ("step_ms", "{:.2f}".format),
    "ms to read": ("read_ms", "{:.2f}".format),
    "launches": ("launches", "{:.1f}".format),
    "first image, s": ("first_s", "{:.2f}".format),
    "other length, s": ("other_s", "{:.2f}".format),
    "compiling, s": ("compile_s", "{:.1f}".format),
    "peak GB": ("peak_bytes", lambda value: GB(value / 1e9)),
    "estimate GB": ("estimate_bytes", lambda value: GB(value / 1e9)),
    "= AR": ("same_image", "{:.0%}".format),
}


def document(parts: Mapping[str, Mapping[str, Any]], every: Sequence[str], command: str) -> dict[str, Any]:
    """Returns the document of all parts that have run. The last one decides which environment counts.

    parts: results of eval.gpu.part.run_part by part, in the order of running. every: names of all parts.
    """
    current = next(reversed(parts.values()))["environment"]
    whole: dict[str, Any] = {"command": command, "environment": current, "seconds": {}, "rows": []}
    whole |= {"tests": None, "left_out": {}, "failed": {}}
    for part in every:
        result = parts.get(part)
        if result is None:
            whole["left_out"][part] = "it has not been run"
        elif any(result["environment"].get(name) != current.get(name) for name in SAME):
            whole["left_out"][part] = "it ran on another device, commit or version of torch"
        else:
            whole["seconds"][part] = result["seconds"]
            whole["rows"] += result["rows"]
            whole["tests"] = next(iter(result["tests"]), whole["tests"])
            whole["left_out"] |= result["left_out"]
            whole["failed"] |= result["failed"]
    return {**whole, "missed": missed(whole)}


def missed(whole: Mapping[str, Any]) -> list[str]:
    """Returns a line for every bound that was missed and for everything that failed."""
    lines = [f"test failed: {name}" for name in (whole["tests"] or {}).get("failed", ())]
    lines += [f"failed: {name}: {reason}" for name, reason in whole["failed"].items()]
    graphs = {(row["model"], row["method"]): row for row in whole["rows"] if row["mode"] == "graphs"}
    for (model, method), row in graphs.items():
        if method != "ar" or row.get("weights_mb", 0) < LARGE_MB:
            continue
        step, tree = row["step_ms"], graphs.get((model, "self-draft"), {}).get("step_ms")
        if step > MAX_AR_STEP * row["read_ms"]:
            lines.append(
                f"bound missed: {model} ar, graphs: {step:.2f} ms per step, more than {MAX_AR_STEP} x the "
                f"{row['read_ms']:.2f} ms that reading the weights takes"
            )
        if tree is not None and tree > MAX_TREE_STEP * step:
            lines.append(
                f"bound missed: {model} self-draft with 32 nodes, graphs: {tree:.2f} ms per step, more than "
                f"{MAX_TREE_STEP} x the {step:.2f} ms of ar"
            )
    return lines


def text_of(whole: Mapping[str, Any]) -> str:
    """Returns the table, and lines on attention, tests, what was left out and what was missed."""
    columns = {
        heading: (key, shown)
        for heading, (key, shown) in COLUMNS.items()
        if any(row.get(key) is not None for row in whole["rows"])
    }
    cells = [
        ["-" if row.get(key) is None else shown(row[key]) for key, shown in columns.values()]
        for row in whole["rows"]
    ]
    lines = [markdown([list(columns), *cells]), ""] if cells else []
    for row in whole["rows"]:
        for backend, kernels in row.get("attention", {}).items():
            names = ", ".join(dict.fromkeys(map(short, kernels))) or "no kernel seen"
            lines.append(f"attention of {row['model']} {row['method']}: {backend}: {names}")
    if tests := whole["tests"]:
        lines.append(f"tests: {tests['passed']} passed, {len(tests['failed'])} failed")
    by_reason: dict[str, list[str]] = {}
    for name, reason in whole["left_out"].items():
        by_reason.setdefault(reason, []).append(name)
    lines += [f"left out: {'; '.join(names)} ({reason})" for reason, names in by_reason.items()]
    return "\n".join([*lines, *whole["missed"]])


def short(kernel: str) -> str:
    """Returns the name of a kernel without template arguments and parameters."""
    return kernel.removeprefix("void ").partition("<")[0].partition("(")[0]
