"""The command-line parser: no abbreviations, one line an error, options also from flat YAML. No torch."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import yaml

from eval.errors import UserError


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to every option that does not state its own."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        return (
            text if "(default" in text or action.dest == "help" else super()._get_help_string(action) or text
        )


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are one line with a suggestion."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, formatter_class=_Formatter)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise UserError(f"{message} (see {self.prog} --help)")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse; an option that does not exist is answered by the nearest one that does."""
        args, unknown = self.parse_known_args(argv)
        if unknown:
            self.error(f"unknown option {unknown[0]}{self._suggest(unknown[0].partition('=')[0])}")
        return args

    def with_config(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse argv over the flat YAML file that --config names, if it names one: the command line wins."""
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        first.add_argument("--config")
        try:
            path = first.parse_known_args(argv)[0].config
        except argparse.ArgumentError:
            path = None  # the full parser says what is wrong
        return self.parse([*(self._tokens(Path(path)) if path else []), *argv])

    def _tokens(self, path: Path) -> list[str]:
        """A configuration file as command-line words, so that types and choices are checked once."""
        tokens: list[str] = []
        for key, value in read_config(path).items():
            action = self._option_string_actions.get(f"--{key}")
            if action is None or key in ("help", "config", "debug"):
                raise UserError(f"config {path}: unknown key {key!r}{self._suggest(f'--{key}', strip=True)}")
            switch = isinstance(action, argparse.BooleanOptionalAction)
            if switch != isinstance(value, bool):
                wanted = "true or false" if switch else "a value"
                raise UserError(f"config {path}: {key} is {value!r}, it must be {wanted}")
            if switch:
                tokens.append(f"--{key}" if value else f"--no-{key}")
            elif isinstance(value, list):
                tokens += [f"--{key}", *map(str, value)]
            else:
                tokens.append(f"--{key}={value}")
        return tokens

    def _suggest(self, word: str, strip: bool = False) -> str:
        near = difflib.get_close_matches(word, self._option_string_actions, n=1)
        return f"; did you mean {near[0].lstrip('-') if strip else near[0]}?" if near else ""


def read_config(path: Path) -> dict[str, object]:
    """A flat YAML file as a dictionary; UserError if it is missing, damaged or not flat."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config {path}: cannot be read ({_reason(error)})") from error
    except yaml.YAMLError as error:
        raise UserError(f"config {path}: not YAML ({' '.join(str(error).split())})") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"config {path}: it must be a flat list of `option: value` lines")
    for key, value in content.items():
        if value is None or isinstance(value, dict):
            raise UserError(f"config {path}: {key} has no plain value; write `{key}: value`")
    return content


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def at_least(low: int) -> Callable[[str], int]:
    """A parser of integers >= low."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is too small: give {low} or more")
        return value

    return integer


def within(low: float, high: float, open_low: bool = False) -> Callable[[str], float]:
    """A parser of numbers in [low, high], or (low, high]; NaN never passes."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not (low < value if open_low else low <= value) or not value <= high:
            bracket = "(" if open_low else "["
            raise argparse.ArgumentTypeError(f"{text} is outside {bracket}{low:g}, {high:g}]")
        return value

    return number
