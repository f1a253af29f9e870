"""The declaration engine: a frozen dataclass is flag, type, range, default, help and config key at once.

An option is a field `name: type = option(help, default, ...)`. A class of such fields is a group of --help,
its docstring the heading; a command's options are a class that inherits the groups it takes, and gives a
group's option another default by a plain `name: type = default`. `parse` turns words, over a flat YAML file
that --config names, into an instance, which nothing changes afterwards. Whatever is wrong is a UserError of
one line. No torch: --help must answer at once.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self, TypeVar, dataclass_transform, get_args, get_type_hints

import yaml

from adt_tree.errors import UserError

Class = TypeVar("Class")


def option(
    text: str,
    default: Any = None,
    *,
    unit: str | None = None,
    choices: Sequence[Any] | None = None,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    read: Callable[[str], Any] | None = None,
    repeat: bool = False,
) -> Any:
    """A field that is an option; default MISSING: it must be given.

    text: its help, to which "(default: ...)" is added unless it says so itself. least, most: inclusive bounds
    of a number; above: an exclusive lower one. read: the parser of a word, in place of the type's. repeat: it
    may be given several times, a value each.
    """
    said = {"text": text, "unit": unit, "choices": choices, "least": least, "most": most, "above": above,
            "read": read, "repeat": repeat}  # fmt: skip
    return field(default=default, metadata=said)


def positional(text: str, unit: str) -> Any:
    """A field of the words that stand without a flag; by default none."""
    return field(default=(), metadata={**option(text, unit=unit).metadata, "positional": True})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option, positional))
def declare(cls: type[Class]) -> type[Class]:
    """Make a class of options: a frozen dataclass."""
    return dataclass(frozen=True, kw_only=True)(cls)


@declare
class Options:
    """every command"""

    ALIASES: ClassVar[dict[str, str]] = {}  # another name -> the option; those of all groups hold
    config: str | None = option("flat YAML file of these options; the command line wins", unit="FILE")
    debug: bool = option("show the traceback of an error", False)

    @classmethod
    def parse(cls, argv: Sequence[str], prog: str = "main.py", description: str = "") -> Self:
        """The options of a command line. UserError, one line, for what cannot be; --help exits."""
        parser = Parser(prog=prog, description=description, allow_abbrev=False)
        values = vars(_fill(parser, cls).parse(argv))
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **lists})


def shown(options: object, name: str) -> str | None:
    """An option as it was given on the command line; None if it was not."""
    value = getattr(options, name, None)
    if value is None or value is False or value == ():
        return None
    words = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return f"--{name}" if value is True else f"--{name} {words}"


def groups(cls: type) -> list[type]:
    """The groups of a command's options in the order of its bases, its own and everybody's last."""
    if cls is Options:
        return [Options]
    above = [part for base in cls.__bases__ for part in groups(base) if part is not Options]
    return [*dict.fromkeys([*above, cls]), Options]


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line with a suggestion; options also from YAML."""

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse argv over the flat YAML file that --config names, if it names one: the command line wins.

        An option that does not exist is answered by the nearest one that does.
        """
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        first.add_argument("--config")
        try:
            path = first.parse_known_args(argv)[0].config
        except argparse.ArgumentError:
            path = None  # the full parser says what is wrong
        values, unknown = self.parse_known_args([*(self.words_of(Path(path)) if path else []), *argv])
        if unknown:
            self.error(f"unknown option {unknown[0]}{self.near(unknown[0].partition('=')[0])}")
        return values

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise UserError(f"{message} (see {self.prog} --help)")

    def near(self, word: str, bare: bool = False) -> str:
        """A suggestion of the option that a word may have meant."""
        found = difflib.get_close_matches(word, self._option_string_actions, n=1)
        return f"; did you mean {found[0].lstrip('-') if bare else found[0]}?" if found else ""

    def words_of(self, path: Path) -> list[str]:
        """A configuration file as command-line words, so that types and choices are checked once."""
        words: list[str] = []
        for key, value in read_config(path).items():
            action = self._option_string_actions.get(f"--{key}")
            if action is None or key in ("help", "config", "debug"):
                raise UserError(f"config {path}: unknown key {key!r}{self.near(f'--{key}', bare=True)}")
            switch = isinstance(action, argparse.BooleanOptionalAction)
            if switch != isinstance(value, bool):
                wanted = "true or false" if switch else "a value"
                raise UserError(f"config {path}: {key} is {value!r}, it must be {wanted}")
            if isinstance(value, list) and action.nargs is None:
                raise UserError(f"config {path}: {key} is {value!r}, it takes a single value")
            if switch:
                words.append(f"--{key}" if value else f"--no-{key}")
            elif isinstance(value, list):
                words += [f"--{key}", *map(str, value)]
            else:
                words.append(f"--{key}={value}")
        return words


def _fill(parser: Parser, cls: type[Options]) -> Parser:
    """The parser with the options of a class, in their groups."""
    types, defaults = get_type_hints(cls), {item.name: item.default for item in fields(cls)}
    aliases: dict[str, list[str]] = {}
    for part in groups(cls):
        for alias, name in vars(part).get("ALIASES", {}).items():
            aliases.setdefault(name, []).append(f"--{alias}")
    shared: dict[str, Any] = {}  # groups of one heading are one
    for part in groups(cls):
        heading, _, text = (part.__doc__ or "").strip().partition("\n\n")
        for name in vars(part).get("__annotations__", {}):
            item = part.__dataclass_fields__.get(name)
            if item is None or not item.metadata:  # no option, or another default of a group's
                continue
            if heading not in shared:
                shared[heading] = parser.add_argument_group(heading, text.strip() or None)
            flags = [f"--{name}", *aliases.get(name, ())]
            _add(shared[heading], flags, types[name], defaults[name], item.metadata)
    return parser


def _add(group: Any, flags: list[str], kind: Any, default: Any, said: Mapping[str, Any]) -> None:
    """Add one option to argparse. said: what option() was told."""
    name, required = flags[0].lstrip("-"), default is MISSING
    text = said["text"]
    if not required and "(default" not in text:
        words = default if isinstance(default, tuple) else (default,)
        stated = " ".join(map(str, words)) if words not in ((), (None,)) else "none"
        text = f"{text} (default: {stated})"
    text = text.replace("%", "%%")
    if kind is bool:
        switch = group.add_argument(*flags, dest=name, default=default, action=argparse.BooleanOptionalAction)
        switch.help = text  # set afterwards: some versions of argparse add the default themselves
        return
    many = getattr(kind, "__origin__", None) is tuple
    plain = next(part for part in (get_args(kind) or (kind,)) if part not in (type(None), ...))
    words: dict[str, Any] = {
        "type": said["read"] or _reader(plain, said["least"], said["most"], said["above"]),
        "choices": said["choices"],
        "metavar": said["unit"] if said["unit"] or said["choices"] else name.upper(),
        "help": text,
        "default": None if required else default,
    }
    if said["repeat"]:
        words["action"] = "append"
    if "positional" in said:
        group.add_argument(name, nargs="*", **words)
        return
    if many:
        words["nargs"] = "+"
    group.add_argument(*flags, dest=name, required=required, **words)


def _reader(kind: type, low: float | None, high: float | None, above: float | None) -> Callable[[str], Any]:
    """A parser of words of a type within the bounds; NaN never passes."""

    def number(text: str) -> float:
        try:
            value = kind(text)
            if value != value:
                raise ValueError
        except ValueError:
            what = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        if high is not None and value > high:
            raise argparse.ArgumentTypeError(f"{text} is too large: give {high:g} or less")
        if low is not None and value < low:
            raise argparse.ArgumentTypeError(f"{text} is too small: give {low:g} or more")
        if above is not None and value <= above:
            raise argparse.ArgumentTypeError(f"{text} is too small: give more than {above:g}")
        return value

    return number if kind in (int, float) else _text


def _text(text: str) -> str:
    """A word that says something and can be written down."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: give a value or leave the option out")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!a} is not UTF-8 text") from None
    return text


class _Loader(yaml.SafeLoader):
    """YAML whose mappings name a key once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As SafeLoader's; a key that stands twice is an error."""
        keys = [key.value for key, _ in node.value]
        twice = next((key for place, key in enumerate(keys) if key in keys[:place]), None)
        if twice is not None:
            raise yaml.YAMLError(f"{twice} stands twice; leave one out")
        return super().construct_mapping(node, deep)


def read_config(path: Path) -> dict[str, object]:
    """A flat YAML file as a dictionary; UserError if it is missing, damaged or not flat."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise UserError(f"config {path}: cannot be read ({said})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"config {path}: not YAML ({' '.join(str(error).split())})") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"config {path}: it must be a flat list of `option: value` lines")
    for key, value in content.items():
        if value is None or isinstance(value, dict):
            raise UserError(f"config {path}: {key} has no plain value; write `{key}: value`")
    return content
