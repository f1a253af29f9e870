"""Command lines as dataclasses: a field declares an option's flag, type, range, default, help and config key,
and which other options are read with it. The module that uses a group of options declares it.

    @declare("maps")  # heading of these options in --help
    class MapOptions(PromptSettings, RunOptions, CommandOptions):  # the groups that the command takes
        heatmaps: int = option("images that get a map of their trees", 4, unit="N", least=0)
        output_dir: str = "runs/maps"  # another default for an option of RunOptions

`MapOptions.parse(words)` returns an instance. Words override the flat YAML file that --config names. Every
mistake raises a UserError of one line. This file does not import torch, because --help must answer at once.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, Self, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import yaml

from adt_tree.errors import UserError
from models.checkpoint.files import expanded, read_text, reading

Class = TypeVar("Class")
NOT_IN_FILES = ("help", "config", "debug")
PATHS = ("DIR", "FILE", "PATH", "PLACE", "RESULT")  # units of options that name files


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
    reads: Mapping[Any, Collection[str]] | None = None,
) -> Any:
    """Declares a field of an options class as an option.

    text: the help; "(default: ...)" is added unless the text states it. unit: placeholder of the value in
    --help; with one of PATHS a leading ~ is the home folder. least, most: inclusive bounds of a number;
    above: exclusive lower bound. read: function that parses a word, in place of the one of the field's type.
    reads: a value of this option -> the other options that are read with it. The value True stands for all
    but None, False, 0 and "", and False for these.
    """
    declared = {"text": text, "unit": unit, "choices": choices, "read": read, "reads": reads or {}}
    return field(default=default, metadata={**declared, "bounds": (least, most, above)})


def positional(
    text: str,
    unit: str,
    default: tuple[str, ...] = (),
    choices: Sequence[str] | None = None,
    reads: Mapping[Any, Collection[str]] | None = None,
) -> Any:
    """Declares the field that takes the words without a flag; the arguments are those of option()."""
    item = option(text, default, unit=unit, choices=choices, reads=reads)
    return field(default=default, metadata={**item.metadata, "positional": True})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option, positional))
def declare(section: str, aliases: Mapping[str, str] | None = None) -> Callable[[type[Class]], type[Class]]:
    """Makes a class of options a frozen dataclass. section: heading in --help of the options that the class
    declares. aliases: another name of an option -> the option."""

    def make(cls: type[Class]) -> type[Class]:
        bases = [vars(base).get("__dataclass_fields__", {}) for base in cls.__mro__[1:]]
        for name in vars(cls).get("__annotations__", {}):
            item = vars(cls)[name]
            if not isinstance(item, Field):  # another default for an option of a base
                known = next(base[name] for base in bases if name in base)
                item = field(default=item, metadata=known.metadata)
            metadata = {"section": section, **item.metadata}
            setattr(cls, name, field(default=item.default, metadata=metadata))
        cls.aliases = aliases or {}  # type: ignore[attr-defined]
        return dataclass(frozen=True, kw_only=True)(cls)

    return make


@declare("every command")
class CommandOptions:
    """The options of every command."""

    config: str | None = option("flat YAML file of these options; the command line overrides it", unit="FILE")
    debug: bool = option("show the traceback of an error", False)

    @classmethod
    def parse(cls, argv: Sequence[str], prog: str = "main.py", description: str = "") -> Self:
        """Returns a command line's options. Raises a UserError of one line for bad words, and for an option
        that would change nothing; --help exits."""
        options = cls(**Parser(cls, prog, description).parse(argv))
        for name, reason in options.unread().items():
            refuse(options, name, reason)
        return options

    def unread(self) -> dict[str, str]:
        """Returns the given options that would change nothing, each with the reason, by what options declare
        with `reads`. A command that knows more of them adds it here."""
        reasons: dict[str, str] = {}
        for item in fields(self):
            value, reads = getattr(self, item.name), item.metadata["reads"]
            for name in dict.fromkeys(name for names in reads.values() for name in names):
                keys = [key for key, names in reads.items() if name in names]
                if as_written(self, name) is None or any(_is(value, key) for key in keys):
                    continue
                flag = item.metadata["unit"] if item.metadata.get("positional") else f"--{item.name}"
                named = ", ".join(str(key) for key in keys if not isinstance(key, bool))
                if named or True in keys:
                    reasons[name] = f"it belongs to {flag} {named}".rstrip()
                else:
                    reasons[name] = f"it does not go with {as_written(self, item.name)}"
        return reasons


def as_written(options: object, name: str) -> str | None:
    """Returns an option as it was written, such as "--depth 3"; None if it is not offered, or has its
    default."""
    item = getattr(type(options), "__dataclass_fields__", {}).get(name)
    value = getattr(options, name, None)
    if item is None or value == item.default:
        return None
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    words = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return words if item.metadata.get("positional") else f"--{name} {words}"


def _is(value: Any, key: Any) -> bool:
    """Tells whether a value, or one of several, is that of a key of `reads`."""
    if isinstance(key, bool):
        return bool(value) is key
    return key in value if isinstance(value, tuple) else value == key


def refuse(options: Any, name: str, reason: str) -> None:
    """Raises UserError if an option is given that is not read. reason: why it is not."""
    if (written := as_written(options, name)) is not None:
        raise UserError(f"{written}: {reason}; leave it out")


class Parser(argparse.ArgumentParser):
    """argparse for a class of options, with errors of one line, hints for misspelt options, and YAML."""

    def __init__(self, cls: type[CommandOptions], prog: str, description: str = "") -> None:
        super().__init__(
            prog, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS
        )
        types, sections = get_type_hints(cls), dict[str, list[Field[Any]]]()
        for item in fields(cls):
            sections.setdefault(item.metadata["section"], []).append(item)
        aliases = [pair for base in cls.__mro__ for pair in vars(base).get("aliases", {}).items()]
        for heading, items in reversed(sections.items()):  # the command's own options first
            group = self.add_argument_group(heading)
            for item in items:
                flags = [f"--{item.name}", *(f"--{alias}" for alias, name in aliases if name == item.name)]
                add_option(group, flags, item, types[item.name])

    def parse(self, argv: Sequence[str]) -> dict[str, Any]:
        """Returns the given values: those of argv, and of the file that --config names."""
        values = self._values(argv)
        if "config" in values:
            content = read_config(Path(values["config"]))
            try:
                words = [word for item in content.items() for word in self.words_of(*item)]
                values = self._values(words) | values
            except UserError as error:
                raise UserError(f"config {values['config']}: {error}") from None
        return values

    def _values(self, words: Sequence[str]) -> dict[str, Any]:
        values, unknown = self.parse_known_args(words)
        if unknown:
            self.error(f"unknown option {unknown[0]}{self.hint(unknown[0].partition('=')[0])}")
        given = {name: value for name, value in vars(values).items() if value != []}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}

    def error(self, message: str) -> NoReturn:
        """Raises a UserError; argparse would print the usage and exit."""
        raise UserError(f"{message} (see {self.prog} --help)")

    def hint(self, word: str) -> str:
        """Returns "; did you mean --OPTION?" for a misspelt option, or nothing."""
        matches = get_close_matches(word, self._option_string_actions, n=1)
        return f"; did you mean {matches[0]}?" if matches else ""

    def words_of(self, key: str, value: str | list[str]) -> list[str]:
        """Returns an entry of a file as command-line words, so that one place checks types and choices."""
        action = self._option_string_actions.get(f"--{key}")
        if action is None or key in NOT_IN_FILES:
            raise UserError(f"unknown key {key!r}{self.hint(f'--{key}')}")
        if isinstance(action, argparse.BooleanOptionalAction):
            switch = yaml.SafeLoader.bool_values.get(str(value).lower())
            if switch is None:
                raise UserError(f"{key} is {value!r}: give true or false")
            return [f"--{key}" if switch else f"--no-{key}"]
        if isinstance(value, list) and not action.nargs and action.type not in (_text, _path):
            value = ",".join(value)  # as class_labels is written on the command line
        words = value if isinstance(value, list) and action.nargs else [value]
        if not words or not all(isinstance(word, str) for word in words):
            raise UserError(f"{key} is {value!r}: give a plain value")
        if isinstance(value, list):
            return [f"--{key}", *words]
        return [f"--{key}={value}"]  # this form also takes a value that begins with a dash


def add_option(group: Any, flags: list[str], item: Field[Any], hint: Any) -> None:
    """Adds one option to argparse. item: a field that option() made; hint: its type."""
    declared, default = item.metadata, item.default
    text, unit, choices = declared["text"], declared["unit"], declared["choices"]
    if "(default" not in text:
        values = default if isinstance(default, tuple) else (default,)
        names = {True: "on", False: "off"} if isinstance(default, bool) else {}
        stated = " ".join(names.get(value, str(value)) for value in values if value is not None)
        text = f"{text} (default: {stated or 'none'})"
    text = text.replace("%", "%%")
    parts = get_args(hint)
    # The value type of int, int | None and tuple[int, ...] is int.
    kind = next(part for part in (parts or (hint,)) if part not in (NoneType, ...))
    if kind is bool:
        switch = group.add_argument(*flags, action=argparse.BooleanOptionalAction)
        switch.help = text  # set afterwards, because some versions of argparse append the default themselves
        return
    arguments: dict[str, Any] = {
        "type": declared["read"] or (_path if unit in PATHS else _reader(kind, *declared["bounds"])),
        "choices": choices,
        "metavar": unit or (None if choices else item.name.upper()),
        "help": text,
    }
    if declared.get("positional"):
        if choices:  # argparse would also look for the empty list of words among them
            arguments |= {"type": _one_of(choices), "choices": None}
        group.add_argument(item.name, nargs="*", default=None, **arguments)
    elif ... in parts:
        action = "extend" if get_origin(kind) is tuple else "store"  # pairs do not replace each other
        group.add_argument(*flags, nargs="+", action=action, **arguments)
    else:
        group.add_argument(*flags, **arguments)


def _reader(kind: type, low: float | None, high: float | None, above: float | None) -> Callable[[str], Any]:
    """Returns the function that reads a word as a finite value of a type within the bounds."""
    if kind not in (int, float):
        return _text
    tests = (
        ("at least", operator.ge, low),
        ("at most", operator.le, high),
        ("more than", operator.gt, above),
    )
    limits = [(words, holds, bound) for words, holds, bound in tests if bound is not None]
    wanted = [f"{words} {bound:g}" for words, _, bound in limits]

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (abs(value) < math.inf and all(holds(value, bound) for _, holds, bound in limits)):
            what = ", ".join(["an integer" if kind is int else "a number", *wanted])
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return number


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """Returns the function that returns a word which is one of the choices."""

    def choice(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is unknown; choose from {', '.join(choices)}")
        return text

    return choice


def _text(text: str) -> str:
    """Returns a word unless it is blank or cannot be encoded as UTF-8."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: give a value or leave the option out")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!a} is not UTF-8 text") from None
    return text


def _path(text: str) -> str:
    """Returns a path or an id as text, with the home folder for a leading ~ and the values of variables."""
    path = expanded(_text(text))
    if re.search(r"\$\{?\w", path) and not os.path.exists(path):
        raise argparse.ArgumentTypeError(f"{path!r} names a variable that is not set")
    return path


class _Loader(yaml.BaseLoader):
    """A YAML loader whose values are texts, so that 12:30 and `no` stay as they are written. It refuses a key
    that occurs twice, and one without a value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if len(set(keys)) < len(keys):
            raise ValueError(f"{max(keys, key=keys.count)} stands twice; leave one out")
        for key, value in node.value:
            if value.value in ("", "~", "null", "Null", "NULL") and value.style is None:
                raise ValueError(f"{key.value} has no value; give one, or leave it out")
        return super().construct_mapping(node, deep)


def read_config(path: Path) -> dict[str, Any]:
    """Returns the entries of a flat YAML file. Raises CheckpointError if it is missing or damaged."""
    with reading(path, "give a flat list of `option: value` lines by --config"):
        text = read_text(path)
        if path.suffix.lower() != ".json":
            content = yaml.load(text, _Loader) or {}
        else:  # stored by a run: options that were not given are null, and its other facts are objects
            stored = json.loads(text, parse_int=str, parse_float=str).items()
            given = ((name, value) for name, value in stored if name not in NOT_IN_FILES)
            content = {
                name: value for name, value in given if value != [] and not isinstance(value, dict | None)
            }
        if not isinstance(content, dict):
            raise ValueError("is not a list of options")
    return content
