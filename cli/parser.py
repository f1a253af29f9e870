"""Command lines as dataclasses: a field declares an option's flag, type, range, default, help and config key.

    @declare
    class Options(PromptOptions, RunOptions):  # the groups that the command takes
        "maps"  # heading in --help of the options that this class declares

        heatmaps: int = option("images that get a map of their trees", 4, unit="N", least=0)
        output_dir: str = "runs/maps"  # another default for an option of RunOptions

`Options.parse(words)` returns an instance. Words override the flat YAML file that --config names. Every
mistake raises a UserError of one line. This file does not import torch, because --help must answer at once.
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
from models.checkpoint.files import reading

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
    """Declares a field of an options class as an option.

    text: the help; "(default: ...)" is added unless the text states it. default: MISSING makes the option
    required. unit: placeholder of the value in --help. least, most: inclusive bounds of a number; above:
    exclusive lower bound. read: function that parses a word, in place of the one of the field's type. repeat:
    the option may be given several times, with one value each.
    """
    declaration = {"text": text, "unit": unit, "choices": choices, "least": least, "most": most,
                   "above": above, "read": read, "repeat": repeat}  # fmt: skip
    return field(default=default, metadata=declaration)


def positional(text: str, unit: str) -> Any:
    """Declares the field that takes the words without a flag; without any it is empty."""
    return field(default=(), metadata={**option(text, unit=unit).metadata, "positional": True})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option, positional))
def declare(cls: type[Class]) -> type[Class]:
    """Makes a class of options a frozen dataclass."""
    return dataclass(frozen=True, kw_only=True)(cls)


@declare
class Options:
    """every command"""

    ALIASES: ClassVar[dict[str, str]] = {}  # alias -> option; aliases of all groups apply
    config: str | None = option("flat YAML file of these options; the command line overrides it", unit="FILE")
    debug: bool = option("show the traceback of an error", False)

    @classmethod
    def parse(cls, argv: Sequence[str], prog: str = "main.py", description: str = "") -> Self:
        """Returns a command line's options. Raises a UserError of one line for bad words; --help exits."""
        parser = Parser(prog=prog, description=description, allow_abbrev=False)
        values = vars(_add_options(parser, cls).parse(argv))
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **lists})


def as_written(options: object, name: str) -> str | None:
    """Returns an option as it was written, such as "--depth 3"; None if it was not given."""
    value = getattr(options, name, None)
    if value is None or value is False or value == ():
        return None
    words = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return f"--{name}" if value is True else f"--{name} {words}"


def groups(cls: type) -> list[type]:
    """Returns the option groups of a command: those of its bases in order, then `cls`, then Options."""
    if cls is Options:
        return [Options]
    inherited = [group for base in cls.__bases__ for group in groups(base) if group is not Options]
    return [*dict.fromkeys([*inherited, cls]), Options]


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, suggestions for misspelt options, and options from YAML."""

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses argv, which overrides the flat YAML file that --config names."""
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        first.add_argument("--config")
        try:
            path = first.parse_known_args(argv)[0].config
        except argparse.ArgumentError:
            path = None  # the full parser says what is wrong
        values, unknown = self.parse_known_args([*(self.words_of(Path(path)) if path else []), *argv])
        if unknown:
            self.error(f"unknown option {unknown[0]}{self.suggestion(unknown[0].partition('=')[0])}")
        return values

    def error(self, message: str) -> NoReturn:
        """Raises a UserError; argparse would print the usage and exit."""
        raise UserError(f"{message} (see {self.prog} --help)")

    def suggestion(self, word: str, bare: bool = False) -> str:
        """Returns "; did you mean --OPTION?" for a misspelt option, or nothing. bare: without the dashes."""
        matches = difflib.get_close_matches(word, self._option_string_actions, n=1)
        return f"; did you mean {matches[0].lstrip('-') if bare else matches[0]}?" if matches else ""

    def words_of(self, path: Path) -> list[str]:
        """Returns a configuration file as command-line words, so that one place checks types and choices."""
        words: list[str] = []
        for key, value in read_config(path).items():
            action = self._option_string_actions.get(f"--{key}")
            if action is None or key in ("help", "config", "debug"):
                raise UserError(f"config {path}: unknown key {key!r}{self.suggestion(f'--{key}', bare=True)}")
            switch = isinstance(action, argparse.BooleanOptionalAction)
            if switch != isinstance(value, bool):
                expected = "true or false" if switch else "a value"
                raise UserError(f"config {path}: {key} is {value!r}, it must be {expected}")
            if isinstance(value, list) and action.nargs is None:
                raise UserError(f"config {path}: {key} is {value!r}, it takes a single value")
            for word in (value if isinstance(value, list) else [value]) if action.type else ():
                try:
                    action.type(str(word))
                except argparse.ArgumentTypeError as error:
                    raise UserError(f"config {path}: {key}: {error}") from None
            if switch:
                words.append(f"--{key}" if value else f"--no-{key}")
            elif isinstance(value, list):
                words += [f"--{key}", *map(str, value)]
            else:
                words.append(f"--{key}={value}")
        return words


def _add_options(parser: Parser, cls: type[Options]) -> Parser:
    """Adds the options of a class to the parser; groups of the same heading are merged."""
    types, defaults = get_type_hints(cls), {item.name: item.default for item in fields(cls)}
    aliases: dict[str, list[str]] = {}
    for group in groups(cls):
        for alias, name in vars(group).get("ALIASES", {}).items():
            aliases.setdefault(name, []).append(f"--{alias}")
    sections: dict[str, Any] = {}
    for group in groups(cls):
        heading, _, text = (group.__doc__ or "").strip().partition("\n\n")
        for name in vars(group).get("__annotations__", {}):
            item = group.__dataclass_fields__.get(name)
            if item is None or not item.metadata:  # not an option, or only another default for one
                continue
            if heading not in sections:
                sections[heading] = parser.add_argument_group(heading, text.strip() or None)
            flags = [f"--{name}", *aliases.get(name, ())]
            _add_option(sections[heading], flags, types[name], defaults[name], item.metadata)
    return parser


def _add_option(
    section: Any, flags: list[str], hint: Any, default: Any, declaration: Mapping[str, Any]
) -> None:
    """Adds one option to argparse. hint: type of the field; declaration: the arguments of option()."""
    name, required = flags[0].lstrip("-"), default is MISSING
    text = declaration["text"] if required else _with_default(declaration["text"], default)
    if bool in (hint, *get_args(hint)):
        switch = section.add_argument(
            *flags, dest=name, default=default, action=argparse.BooleanOptionalAction
        )
        switch.help = text  # set afterwards, because some versions of argparse append the default themselves
        return
    # The value type of int, int | None and tuple[int, ...] is int.
    value_type = next(part for part in (get_args(hint) or (hint,)) if part not in (type(None), ...))
    bounds = (declaration["least"], declaration["most"], declaration["above"])
    arguments: dict[str, Any] = {
        "type": declaration["read"] or _reader(value_type, *bounds),
        "choices": declaration["choices"],
        "metavar": declaration["unit"] or (None if declaration["choices"] else name.upper()),
        "help": text,
        "default": None if required else default,
    }
    if declaration["repeat"]:
        arguments["action"] = "append"
    if "positional" in declaration:
        section.add_argument(name, nargs="*", **arguments)
        return
    if getattr(hint, "__origin__", None) is tuple:
        arguments["nargs"] = "+"
    section.add_argument(*flags, dest=name, required=required, **arguments)


def _with_default(text: str, default: Any) -> str:
    """Returns the help of an option with its default, escaped for argparse."""
    if "(default" not in text:
        values = default if isinstance(default, tuple) else (default,)
        names = {True: "on", False: "off"} if isinstance(default, bool) else {}
        stated = " ".join(names.get(value, str(value)) for value in values if value is not None)
        text = f"{text} (default: {stated or 'none'})"
    return text.replace("%", "%%")


def _reader(kind: type, low: float | None, high: float | None, above: float | None) -> Callable[[str], Any]:
    """Returns the function that reads a word as a value of a type within the bounds; NaN is refused."""

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
    """Returns a word unless it is blank or cannot be encoded as UTF-8."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: give a value or leave the option out")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!a} is not UTF-8 text") from None
    return text


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses a key which occurs twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
        if twice is not None:
            raise yaml.YAMLError(f"{twice} stands twice; leave one out")
        return super().construct_mapping(node, deep)


def read_config(path: Path) -> dict[str, object]:
    """Returns the contents of a flat YAML file. Raises UserError if it is missing, damaged or nested."""
    with reading(path, "give a flat list of `option: value` lines by --config"):
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader) or {}
        if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
            raise ValueError("is not a list of options")
        for key, value in content.items():
            if value is None or isinstance(value, dict):
                raise ValueError(f"{key} has no plain value")
    return content
