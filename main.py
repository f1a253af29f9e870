"""Runs a command: `python main.py COMMAND [options]`. Imports no other command, so that --help is quick.

Exit status: 0 done; 1 an internal error, or a fault that report --check, gpu_check or serve reports; 2 an
error that the user can put right; 130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType

# Before what PYTHONPATH names, and also where Python leaves a script's folder out (-I, PYTHONSAFEPATH).
sys.path.insert(0, str(Path(__file__).resolve().parent))

from adt_tree.errors import UserError, is_out_of_memory
from cli.flags import with_flags
from storage.command_line import CommandOptions

# command -> what it does; cli/COMMAND.py has its Options and its run(options); eval_* are in cli/evaluate.py
COMMANDS = {
    "generate_images": "generate images from prompts, with statistics and maps",
    "bench": "time methods against the AR baseline in one run",
    "demo": "open a page on which two methods race and every step can be inspected",
    "serve": "answer requests for images over HTTP, in the form of OpenAI's API",
    "report": "turn stored results into tables, plots and documents",
    "gpu_check": "check and measure this machine's GPU, part by part",
    "get_ckpts": "fetch published checkpoints into ckpts/",
    "check_ckpts": "check a model's files by their headers and name every fault",
    "memory": "compute how much memory each model needs",
    "generate_codebook": "write the table of nearest codes that --lantern reads",
    "generate_train_data": "generate the images that a drafter learns from",
    "extract_code": "encode captioned pictures for a drafter to learn from",
    "train_drafter": "train a drafter for a model that takes guidance",
    "evaluate": "score the images of a run: CLIP, HPS v2, FID, KID, Inception Score and others",
    "eval_fid_clip": "evaluate --metrics clip fid",
    "eval_prec_recall": "evaluate --metrics precision_recall",
    "eval_hpsv2": "evaluate --metrics hps",
    "eval_quality": "evaluate --metrics effnet_fd",
}
STORED = (
    "finished images, measurements and training checkpoints are stored; the same command continues from there"
)
SMALLER = {  # options that decide how much memory a command takes
    "batch_size": "a smaller --batch_size",
    "bs": "a smaller --bs",
    "total_token": "a smaller --total_token",
    "cache_gb": "a smaller --cache_gb",
    "precision": "--precision bf16",
}


def overview() -> str:
    """Returns the help of main.py: the commands, and what each of them does."""
    lines = [f"  {name:<20} {text}" for name, text in COMMANDS.items()]
    usage = ("usage: main.py NAME [options]", "")
    return "\n".join([*usage, *lines, "", "`main.py NAME --help` shows the options."])


def module_of(name: str) -> ModuleType:
    """Returns the module of a command."""
    return import_module("cli.evaluate" if name.startswith("eval_") else f"cli.{name}")


def options_of(name: str) -> type[CommandOptions]:
    """Returns the class of a command's options."""
    command = module_of(name)
    return command.ALIASES[name] if name.startswith("eval_") else command.Options


def dispatch(argv: Sequence[str]) -> None:
    """Parses and runs one command."""
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return
    name = argv[0]
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COMMANDS)}"
        raise UserError(f"main.py: {name!r} is unknown; {hint}")
    options = options_of(name)
    try:
        module_of(name).run(options.parse(argv[1:], f"main.py {name}", COMMANDS[name]))
    except UserError as error:
        error.args = (with_flags(str(error), options),)
        raise


def described(error: Exception, command: str) -> tuple[int, str]:
    """Returns the exit status and the line for an error of a command."""
    if is_out_of_memory(error):
        # The further sentences of torch's message are about its allocator.
        cause = ". ".join(str(error).split(". ")[:2]) or "out of memory"
        offered = options_of(command).__dataclass_fields__
        advice = " or ".join(words for name, words in SMALLER.items() if name in offered)
        return 2, f"error: {cause}: give {advice or 'a larger machine'}; {STORED}"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return 2, f"error: {error.filename}: a file or a link to nothing is in the way; give another folder"
    if isinstance(error, UserError | OSError | FloatingPointError):
        return 2, f"error: {str(error) or type(error).__name__}"
    return 1, f"internal error: {type(error).__name__}: {error} (--debug shows where)"


def main(argv: Sequence[str]) -> int:
    """Runs a command and returns its exit status; every error becomes one line on stderr."""
    debug = "--debug" in argv
    try:
        dispatch(argv)
        sys.stdout.flush()
        return 0
    except SystemExit as stop:  # --help ends so, and a command that reports a fault
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt:
        status, line = 130, f"interrupted: {STORED}"
        if debug:
            raise
    except BrokenPipeError:
        # The reader of stdout has gone. Python flushes stdout once more at its exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        status, line = described(error, argv[0])
    print(" ".join(line.split()), file=sys.stderr)
    return status


def stop(number: int, frame: object) -> None:
    """Ends a command on SIGTERM as on Ctrl-C. Schedulers and launchers send it before they kill."""
    raise KeyboardInterrupt


def open_streams() -> None:
    """Gives the process the streams that it was started without, as by cron or 2>&-, so that no file takes
    their numbers."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115


if __name__ == "__main__":
    open_streams()
    signal.signal(signal.SIGTERM, stop)
    if not sys.stderr.isatty():  # a log gets a line of progress now and then, and none for short work
        os.environ.setdefault("TQDM_MININTERVAL", "10")
        os.environ.setdefault("TQDM_DELAY", "2")
    sys.exit(main(sys.argv[1:]))
