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
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, NoReturn, Self, TypeVar, dataclass_transform, get_args, get_type_hints

import yaml

from adt_tree.errors import UserError
from adt_tree.method import ADAPTIVE_OPTIONS
from models.checkpoint.files import expanded, read_text, reading

Class = TypeVar("Class")
NOT_IN_FILES = ("help", "config", "debug")
# Arguments of the library whose flag has another name; model_type is a key of config.json there.
ARGUMENTS = {
    "guidance": "cfg", "seed": "random_seed", "budget": "total_token", "lantern.delta": "lantern_delta",
    "lantern.k": "lantern_k", "tree": "total_token", "tree.depth": "depth", "tree.width": "draft_top_k",
    **{f"tree.{name.removeprefix('adt_')}": name for name in ADAPTIVE_OPTIONS},
}  # fmt: skip
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
    repeat: bool = False,
) -> Any:
    """Declares a field of an options class as an option.

    text: the help; "(default: ...)" is added unless the text states it. unit: placeholder of the value in
    --help; with one of PATHS a leading ~ is the home folder. least, most: inclusive bounds of a number;
    above: exclusive lower bound. read: function that parses a word, in place of the one of the field's type.
    repeat: the option may be given several times, with one value each.
    """
    declared = {"text": text, "unit": unit, "choices": choices, "read": read, "repeat": repeat}
    return field(default=default, metadata={**declared, "bounds": (least, most, above)})


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
        values = Parser(cls, prog, description).parse(argv)
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **lists})


def as_written(options: object, name: str) -> str | None:
    """Returns an option as it was written, such as "--depth 3"; None if it was not given."""
    value = getattr(options, name, None)
    if value is None or value is False or value == ():
        return None
    words = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return f"--{name}" if value is True else f"--{name} {words}"


def with_flags(line: str, cls: type[Options]) -> str:
    """Returns a message of the library with flags in place of the names of its arguments.

    A message begins with the argument and its value, as in "target_size 700: ..."; elsewhere in the line a
    name is recognised by its underscore or point.
    """
    names = {item.name: item.name for item in fields(cls) if item.name != "model_type"}
    names |= {argument: name for argument, name in ARGUMENTS.items() if name in names}
    flags = {argument: f"--{name}" for argument, name in names.items()}
    name, _, rest = line.partition(" ")
    if ":" in rest or name.endswith(":"):
        bare = name.removesuffix(":")
        line = flags.get(bare, bare) + line.removeprefix(bare)
    return re.sub(r"(?<![\w./-])\w+[_.]\w+(?![\w./-])", lambda word: flags.get(word[0], word[0]), line)


class Parser(argparse.ArgumentParser):
    """argparse for a class of options, with errors of one line, hints for misspelt options, and YAML files.

    In --help each class of the options' bases is a section, headed by its docstring.
    """

    def __init__(self, cls: type[Options], prog: str, description: str) -> None:
        super().__init__(prog, description=description, allow_abbrev=False)
        types, defaults = get_type_hints(cls), {item.name: item.default for item in fields(cls)}
        groups = cls.__mro__[:-1]
        self.repeated = [item.name for item in fields(cls) if item.metadata.get("repeat")]
        aliases = [pair for group in groups for pair in vars(group).get("ALIASES", {}).items()]
        sections: dict[str, Any] = {}
        for group in groups:
            heading, _, text = (group.__doc__ or "").partition("\n\n")
            for name in vars(group).get("__annotations__", {}):
                item = group.__dataclass_fields__.get(name)  # type: ignore[attr-defined]
                if item is None or not item.metadata:  # not an option, or only another default for one
                    continue
                if heading not in sections:
                    sections[heading] = self.add_argument_group(heading, text.strip() or None)
                flags = [f"--{name}", *(f"--{alias}" for alias, meant in aliases if meant == name)]
                add_option(sections[heading], flags, item.metadata, types[name], defaults[name])

    def parse(self, argv: Sequence[str]) -> dict[str, Any]:
        """Returns the values of argv, which override those of the file that --config names."""
        values = self._values(argv)
        if values.config:
            content = read_config(Path(values.config))
            try:
                stored = self._values([word for item in content.items() for word in self.words_of(*item)])
            except UserError as error:
                raise UserError(f"config {values.config}: {error}") from None
            for name in self.repeated:
                if getattr(values, name) is not None:
                    setattr(stored, name, None)  # argparse would append to the file's values
            values = self._values(argv, stored)
        return vars(values)

    def _values(self, words: Sequence[str], start: argparse.Namespace | None = None) -> argparse.Namespace:
        values, unknown = self.parse_known_args(words, start)
        if unknown:
            self.error(f"unknown option {unknown[0]}{self.hint(unknown[0].partition('=')[0])}")
        return values

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
        repeated = action.dest in self.repeated
        words = value if isinstance(value, list) and (action.nargs or repeated) else [value]
        if not all(isinstance(word, str) for word in words):
            raise UserError(f"{key} is {value!r}: give a plain value")
        if isinstance(value, list) and not repeated:
            return [f"--{key}", *value]
        return [f"--{key}={word}" for word in words]  # this form also takes a value that begins with a dash


def add_option(section: Any, flags: list[str], declared: Mapping[str, Any], hint: Any, default: Any) -> None:
    """Adds one option to argparse. declared: the arguments of option(); hint: type of the field."""
    text, unit, choices = declared["text"], declared["unit"], declared["choices"]
    if "(default" not in text:
        values = default if isinstance(default, tuple) else (default,)
        names = {True: "on", False: "off"} if isinstance(default, bool) else {}
        stated = " ".join(names.get(value, str(value)) for value in values if value is not None)
        text = f"{text} (default: {stated or 'none'})"
    text = text.replace("%", "%%")
    # The value type of int, int | None and tuple[int, ...] is int.
    kind = next(part for part in (get_args(hint) or (hint,)) if part not in (NoneType, ...))
    if kind is bool:
        switch = section.add_argument(*flags, default=default, action=argparse.BooleanOptionalAction)
        switch.help = text  # set afterwards, because some versions of argparse append the default themselves
        return
    arguments: dict[str, Any] = {
        "type": declared["read"] or (_path if unit in PATHS else _reader(kind, *declared["bounds"])),
        "choices": choices,
        "metavar": unit or (None if choices else flags[0].lstrip("-").upper()),
        "help": text,
        "default": default,
    }
    if declared.get("positional"):
        section.add_argument(flags[0].lstrip("-"), nargs="*", **arguments)
    elif declared["repeat"]:
        section.add_argument(*flags, action="append", **arguments)
    else:
        section.add_argument(*flags, nargs="+" if isinstance(default, tuple) else None, **arguments)


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
    """Returns a path or an id as text, with the home folder for a leading ~."""
    return expanded(_text(text))


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
        content = yaml.load(read_text(path), _Loader) or {}
        if not isinstance(content, dict):
            raise ValueError("is not a list of options")
    return content
