"""gpu_check: checks and measures this machine's GPU part by part, each in a new process with a time limit.

scripts/gpu_check.sh calls it with an interpreter that can use the GPU.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from adt_tree.errors import UserError
from cli.parser import Options as Base
from cli.parser import declare, option, positional
from models.checkpoint.files import make_folder, read_json, write_json
from models.registry import RANDOM_WEIGHTS

PARTS = ("tests", "emoji", *RANDOM_WEIGHTS, "compiled")


@declare
class Options(Base):
    """gpu_check"""

    parts: tuple[str, ...] = positional(
        "tests: the tests marked gpu; emoji: images of the embedded model, compared with the AR baseline's; "
        f"{', '.join(RANDOM_WEIGHTS)}: a model of the published dimensions with random weights; compiled: "
        "emoji and all of these models with --compile (default: all parts)",
        "PART",
    )
    minutes: float = option(
        "time limit of each part; measurements that it has not reached by then are left out",
        9.0,
        above=0,
        most=1440,
    )
    device: str = option(
        "cpu: try out the check itself, without graphs and compiled layers", "cuda", choices=("cuda", "cpu")
    )
    output_dir: str = option(
        "folder of the results; the table also has the parts that earlier calls stored there",
        "runs/gpu_check",
        unit="DIR",
    )


def run(options: Options) -> None:
    """Prints a table, the measurements left out and the bounds missed; the last line is one JSON document.

    Ends with status 1 if a bound was missed or a measurement failed.
    """
    for part in options.parts:
        if part not in PARTS:
            raise UserError(f"gpu_check {part}: unknown part; choose from {', '.join(PARTS)}")
    refuse_without_gpu(options.device)
    from eval.gpu.part import run_part
    from eval.gpu.summary import document, text_of

    folder = Path(options.output_dir)
    make_folder(folder)
    for part in options.parts or PARTS:
        print(f"gpu_check: {part}", file=sys.stderr)
        write_json(folder / f"{part}.json", run_part(part, options.device, 60 * options.minutes))
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    results = {file.stem: read_json(file, "remove it and run its part again") for file in files}
    result = document(results, PARTS, f"python main.py {shlex.join(sys.argv[1:])}")
    print(text_of(result))
    print(json.dumps(result))
    if result["missed"]:
        raise SystemExit(1)


def refuse_without_gpu(device: str) -> None:
    """Raises UserError if the device is cuda and torch sees none."""
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        build = "" if torch.version.cuda else ", a build for CPUs,"
        raise UserError(f"gpu_check: there is no GPU that torch {torch.__version__}{build} can use")
