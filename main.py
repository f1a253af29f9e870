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

from eval.commands import COMMANDS, STAGES, Command
from eval.errors import UserError
from eval.parser import Parser
from models.errors import CheckpointError
from training.errors import StageError


def _overview(prog: str, commands: dict[str, Command]) -> str:
    lines = [f"usage: {prog} {'STAGE' if commands is STAGES else 'COMMAND'} [options]", ""]
    lines += [f"  {name:<20} {command.help}" for name, command in commands.items()]
    if commands is COMMANDS:
        lines.append(f"  {'train_emoji':<20} build the embedded model, stage by stage: {', '.join(STAGES)}")
    return "\n".join([*lines, "", f"`{prog} NAME --help` shows the options."])


def _pick(prog: str, word: str, commands: dict[str, Command]) -> Command:
    if word not in commands:
        names = [*commands, *(("train_emoji",) if commands is COMMANDS else ())]
        near = get_close_matches(word, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(names)}"
        raise UserError(f"{prog}: there is no {word!r}; {hint}")
    return commands[word]


def _dispatch(argv: Sequence[str]) -> None:
    """Parse and run one command."""
    prog, commands, words = "main.py", COMMANDS, list(argv)
    if words[:1] == ["train_emoji"]:
        prog, commands, words = "main.py train_emoji", STAGES, words[1:]
    if not words or words[0] in ("-h", "--help"):
        print(_overview(prog, commands))
        return
    command = _pick(prog, words[0], commands)
    parser = Parser(f"{prog} {words[0]}", command.help)
    import_module(command.options).add_arguments(parser)
    args = parser.with_config(words[1:]) if commands is COMMANDS else parser.parse(words[1:])
    import_module(command.work).run(args)


def main(argv: Sequence[str]) -> int:
    """Run a command; every error becomes one line on stderr and an exit status."""
    debug = "--debug" in argv or bool(os.environ.get("ADT_DEBUG"))
    try:
        _dispatch(argv)
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
    except (UserError, StageError, CheckpointError, OSError, MemoryError, FloatingPointError) as error:
        if debug:
            raise
        status, line = 2, f"error: {error or type(error).__name__}"
    except Exception as error:
        if debug:
            raise
        status, line = 1, f"internal error: {type(error).__name__}: {error} (--debug shows where)"
    print(" ".join(line.split()), file=sys.stderr)
    return status


def _stop(number: int, frame: object) -> None:
    """SIGTERM, which schedulers and launchers send first, ends a command as Ctrl-C does."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main(sys.argv[1:]))
