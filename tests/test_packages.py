"""The extras of pyproject.toml are the requirements files, with lower bounds in place of pins, and the pins
lie within the bounds of the dependencies."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.support.runs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FILES = {path.stem.removeprefix("requirements-"): path for path in sorted(ROOT.glob("requirements-*.txt"))}


def lines(name: str) -> list[str]:
    """Returns the requirements of a file, without comments."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def bounds(name: str) -> list[str]:
    """Returns the extra of a requirements file: files that it includes are extras too, except the first."""
    extra = []
    for line in lines(name):
        included = re.fullmatch(r"-r requirements-?(.*)\.txt", line)
        if included is None:
            extra.append(line.replace("==", ">="))
        elif included[1]:
            extra.append(f"adt-tree[{included[1]}]")
    return extra


@pytest.mark.parametrize("extra", FILES)
def test_extras_are_the_requirements_files(extra: str) -> None:
    assert PROJECT["optional-dependencies"].get(extra) == bounds(FILES[extra].name)


def test_pins_lie_within_the_bounds_of_the_dependencies() -> None:
    pins = {pin.name: pin for pin in map(Requirement, lines("requirements.txt"))}
    for dependency in map(Requirement, PROJECT["dependencies"]):
        (version, *_) = sorted(part.version for part in pins[dependency.name].specifier)
        assert dependency.specifier.contains(version), dependency.name
