"""gpu_check: runs the GPU tests, and measures the embedded model and random models of published dimensions.

scripts/gpu_check.sh calls it with an interpreter that can use the GPU.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from adt_tree.errors import UserError
from models.checkpoint.files import json_text, write_json
from models.registry import PUBLISHED
from storage.command_line import CommandOptions, declare, option, positional

# In the order of importance, and in all as much as 15 minutes of a GPU allow.
DEFAULT = ("tests", "anole", "emoji", "janus_pro", "llamagen", "batch", "rows")
PARTS = tuple(dict.fromkeys((*DEFAULT, *PUBLISHED)))


@declare("parts")
class Options(CommandOptions):
    """Which parts are measured."""

    parts: tuple[str, ...] = positional(
        "tests: the tests marked gpu; emoji: images of the embedded model in fp32, compared with the AR "
        "baseline's; batch: Anole with 16 images in flight; rows: Anole with several rows at once; "
        f"{', '.join(PUBLISHED)}: a model of the published dimensions with random weights; anole: also "
        f"compiled and without CUDA graphs (default: {' '.join(DEFAULT)}; they run in the order given)",
        "PART",
        choices=PARTS,
    )
    minutes: float = option(
        "time limit of each process; an interrupted measurement goes on when the command is run again",
        9.0,
        above=0,
    )
    device: str = option("cpu: try out the check itself", "cuda", choices=("cuda", "cpu"))
    output_dir: str = option("folder of the results", "runs/gpu_check", unit="DIR")


def run(options: Options) -> None:
    """Prints a table and what is wrong; the last line is one JSON document. Ends with status 1 if anything is
    wrong: a failed test, other codes in fp32, too much memory, or a part that did not run."""
    refuse_without_gpu(options.device)
    from eval import gpu_check

    folder = Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    parts = gpu_check.parts(options.device)
    chosen = [part for name in options.parts or DEFAULT for part in parts if part.name == name]
    results = [gpu_check.run(part, folder.resolve(), 60 * options.minutes, options.device) for part in chosen]
    lines = gpu_check.wrong(results)
    document = {
        "command": f"python main.py {shlex.join(sys.argv[1:])}",
        "environment": next((result["environment"] for result in results if "environment" in result), None),
        "rows": gpu_check.rows(results),
        "tests": next((result["tests"] for result in results if "tests" in result), None),
        "wrong": lines,
    }
    write_json(folder / "gpu_check.json", document)
    print("\n".join([gpu_check.text_of(results), *lines]))
    print(json_text(document))
    if lines:
        raise SystemExit(1)


def refuse_without_gpu(device: str) -> None:
    """Raises UserError if the device is cuda and torch sees none."""
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        build = "" if torch.version.cuda else ", a build for CPUs,"
        raise UserError(f"gpu_check: there is no GPU that torch {torch.__version__}{build} can use")
