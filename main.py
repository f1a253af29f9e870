"""The dispatcher: `python main.py COMMAND [options]`. Commands are imported late: --help answers at once.

Exit status: 0 done, 1 a fault of ours, 2 something for the user to put right, 130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from adt_tree.errors import UserError

# command -> what it does; cli/COMMAND.py has its Options and run(options)
COMMANDS = {
    "generate_images": "make images from prompts, with statistics and maps",
    "bench": "time every method against the AR baseline in one run",
    "demo": "a page on which two methods race and every step can be looked into",
    "report": "stored results -> tables, plots, a document or a page",
    "check_ckpts": "name what is wrong with a model's files, from headers",
    "memory": "what each model needs in memory, from its dimensions",
    "generate_codebook": "write the table of nearest codes that --lantern reads",
    "generate_train_data": "let the target generate what its drafter learns from",
    "extract_code": "pictures with captions -> codes to learn from",
    "train_drafter": "train a drafter for any of the models",
    "train_emoji": "build the embedded model, stage by stage: data, tokenizer, bpe, target and more",
    "eval_fid_clip": "CLIP score of a run, FID against real images",
    "eval_prec_recall": "precision and recall against real images",
    "eval_hpsv2": "human preference score of a run",
    "eval_quality": "Inception Score, KID, aesthetic score, EffNet-FD",
}


def overview(prog: str, names: dict[str, str]) -> str:
    """What there is to choose from."""
    lines = [f"usage: {prog} NAME [options]", ""]
    lines += [f"  {name:<20} {text}" for name, text in names.items()]
    return "\n".join([*lines, "", f"`{prog} NAME --help` shows the options."])


def pick(prog: str, word: str, names: dict[str, str]) -> str:
    """The name a word is; UserError with a suggestion if there is none."""
    if word not in names:
        near = get_close_matches(word, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(names)}"
        raise UserError(f"{prog}: there is no {word!r}; {hint}")
    return word


def dispatch(argv: Sequence[str]) -> None:
    """Parse and run one command."""
    if not argv or argv[0] in ("-h", "--help"):
        print(overview("main.py", COMMANDS))
        return
    name = pick("main.py", argv[0], COMMANDS)
    command = import_module(f"cli.{name}")
    if name != "train_emoji":
        command.run(command.Options.parse(argv[1:], f"main.py {name}", COMMANDS[name]))
        return
    prog, stages = "main.py train_emoji", {name: own.__doc__ for name, own in command.STAGES.items()}
    if not argv[1:] or argv[1] in ("-h", "--help"):
        print(overview(prog, stages))
        return
    command.run(pick(prog, argv[1], stages), argv[2:])


def device_errors() -> tuple[type[Exception], ...]:
    """Returns the exception of a full device. A command that has not imported torch cannot raise it."""
    torch = sys.modules.get("torch")
    return (torch.OutOfMemoryError,) if torch else ()


def main(argv: Sequence[str]) -> int:
    """Run a command; every error becomes one line on stderr and an exit status."""
    debug = "--debug" in argv
    try:
        dispatch(argv)
        sys.stdout.flush()
        return 0
    except SystemExit as stop:  # argparse after --help
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt:
        kept = "finished images, measurements and training checkpoints are kept"
        status, line = 130, f"interrupted: {kept}; the same command goes on from there"
        if debug:
            raise
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (MemoryError, *device_errors()) as error:
        if debug:
            raise
        tried = ". ".join(str(error).split(". ")[:2]) or "out of memory"
        kept = "What is finished is kept, codes without pixels too"
        advice = "give a smaller --batch_size, a smaller --total_token or --precision bf16"
        status, line = 2, f"error: {tried}: {advice}. {kept}: the same command goes on from there"
    except (UserError, OSError, FloatingPointError) as error:
        if debug:
            raise
        status, line = 2, f"error: {error or type(error).__name__}"
    except Exception as error:
        if debug:
            raise
        status, line = 1, f"internal error: {type(error).__name__}: {error} (--debug shows where)"
    print(" ".join(line.split()), file=sys.stderr)
    return status


def stop(number: int, frame: object) -> None:
    """SIGTERM, which schedulers and launchers send first, ends a command as Ctrl-C does."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    if not sys.stderr.isatty():  # a log: a sign of progress now and then, and none of what is soon over
        os.environ.setdefault("TQDM_MININTERVAL", "10")
        os.environ.setdefault("TQDM_DELAY", "2")
    sys.exit(main(sys.argv[1:]))
