"""pyproject.toml names the packages that our files import, and no others; its extras are the requirements
files, with lower bounds in place of pins; and modules of a user's project do not get in the way of ours."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.runs import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
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
    dependencies = {bound.name: bound for bound in map(Requirement, PROJECT["dependencies"])}
    assert pins.keys() == dependencies.keys()
    for name, pin in pins.items():
        (version, *_) = sorted(part.version for part in pin.specifier)
        assert dependencies[name].specifier.contains(version), name


# Extra -> the files that may import its packages, because only commands that need the extra import them.
USERS = {
    "demo": ("cli/demo.py", "demo/app.py"),
    "eval": ("eval/metrics/*.py", "cli/model_from_options.py"),
    "glm": ("models/codecs/glm_pixels.py",),
    "ray": ("serve/ray_app.py",),
    "serve": ("serve/*.py",),
    "train": ("recipes/emoji/*.py", "eval/metrics/networks.py"),
    "dev": ("serve/locustfile.py",),
}
UNIMPORTED = {"torchvision"}  # needed by packages of an extra, in a build that fits torch
OURS = {path.name.removesuffix(".py") for path in ROOT.glob("[a-z]*") if path.suffix in ("", ".py")}
DISTRIBUTIONS = packages_distributions()


def names(extra: str | None) -> set[str]:
    """Returns the packages of an extra, without the extras in it; None: the dependencies."""
    listed = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return {canonicalize_name(Requirement(line).name) for line in listed} - {"adt-tree"}


def imported(path: Path) -> set[str]:
    """Returns the packages of others that a file imports, lazily or by library("NAME"), by their names on the
    index."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import():
                modules |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module)):
                modules.add(module)
            case ast.Call(func=ast.Name(id="library"), args=[ast.Constant(value=str(module))]):
                modules.add(module)
    tops = {module.partition(".")[0] for module in modules} - OURS - sys.stdlib_module_names
    return {canonicalize_name(DISTRIBUTIONS.get(top, [top])[0]) for top in tops}


FOLDERS = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"]
IMPORTS = {
    path.relative_to(ROOT): imported(path)
    for path in [ROOT / "main.py", *(path for folder in FOLDERS for path in folder.rglob("*.py"))]
}


def test_every_import_is_in_the_dependencies_or_in_the_extra_of_its_command() -> None:
    for path, packages in IMPORTS.items():
        extras = [extra for extra, patterns in USERS.items() if any(map(path.match, patterns))]
        known = set().union(*map(names, (None, *extras)))
        assert packages <= known, f"{path} imports {packages - known}"


@pytest.mark.parametrize("extra", [None, *(extra for extra in USERS if extra != "dev")])
def test_every_package_is_imported_by_the_files_that_need_it(extra: str | None) -> None:
    patterns = USERS.get(extra or "", ("*.py",))
    users = [packages for path, packages in IMPORTS.items() if any(map(path.match, patterns))]
    assert names(extra) - UNIMPORTED <= set().union(*users)


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder of the user."""
    options = {"cwd": folder, "env": {**os.environ, **variables}, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *words], timeout=100, **options)


@pytest.mark.parametrize(
    ("words", "variables"), [("-I", {}), ("", {"PYTHONSAFEPATH": "1"}), ("", {"PYTHONPATH": "."})]
)
def test_commands_find_our_packages_first(words: str, variables: dict[str, str], tmp_path: Path) -> None:
    for name in ("models.py", "cli.py", "adt_tree.py"):
        (tmp_path / name).write_text("")
    done = run(tmp_path, *words.split(), str(ROOT / "main.py"), "memory", "--help", **variables)
    assert done.returncode == 0 and done.stdout.startswith("usage"), done.stderr


def test_a_module_that_hides_ours_is_named(tmp_path: Path) -> None:
    file = tmp_path / "models.py"
    file.touch()
    done = run(tmp_path, "-c", "from adt_tree import Pipeline", PYTHONPATH=str(ROOT))
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and str(file) in line and "rename" in line


def test_a_wheel_has_our_package_and_none_whose_name_others_use() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {path.parent for path in ROOT.glob("*/__init__.py")}
    folders |= {path.parent for path in (ROOT / "adt_tree").rglob("*.py")}  # all of which it must have
    names = {".".join(folder.relative_to(ROOT).parts): folder for folder in folders}
    found = {name for name in names if any(fnmatch(name, pattern) for pattern in patterns)}
    assert found == {name for name in names if name.partition(".")[0] == "adt_tree"}
    assert all((names[name] / "__init__.py").exists() for name in found)


def test_an_installed_wheel_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "adt_tree").symlink_to(ROOT / "adt_tree")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from adt_tree import Pipeline"
    done = run(tmp_path, "-P", "-c", code)
    assert done.returncode == 1 and "pip install -e" in done.stderr.splitlines()[-1]
