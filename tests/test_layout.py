"""The rules of the repository that neither ruff nor import-linter checks (pyproject.toml): what no file may
contain, and that tests named in a document exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.support.runs import ROOT

# The function that transformers' generate calls with all its arguments.
CONTRACT = ("adt_tree/generation/generate.py", "generate")
ABSOLUTE = re.compile(
    r"(?:^|[\s\"'=:(])(/(?:home|root|work|tmp|mnt|data|opt|usr|Users|workspace)/|[A-Z]:\\\\)"
)


def sources() -> dict[str, ast.Module]:
    """Returns the syntax trees of all Python files but those in hidden folders, by their paths from the
    root."""
    paths = sorted((*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py")))
    return {p.relative_to(ROOT).as_posix(): ast.parse(p.read_text(encoding="utf-8")) for p in paths}


EVERYTHING = sources()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Returns all functions, methods and nested functions."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_no_function_swallows_options() -> None:
    swallowing = {(file, f.name) for file, tree in EVERYTHING.items() for f in functions(tree)
                  if f.args.kwarg and not file.startswith("tests/")}  # fmt: skip
    assert swallowing == {CONTRACT}


def test_no_string_is_a_path_of_one_machine() -> None:
    strings = [(file, node.value) for file, tree in EVERYTHING.items() for node in ast.walk(tree)
               if isinstance(node, ast.Constant) and isinstance(node.value, str)]  # fmt: skip
    found = [(file, text) for file, text in strings if ABSOLUTE.search(text)]
    assert {file for file, _ in found} == {"tests/test_layout.py"}, found  # the pattern finds its own control
    assert ("tests/test_layout.py", "/home/somebody/x") in found


def test_the_tests_that_reference_bugs_names_exist() -> None:
    text = (ROOT / "docs" / "REFERENCE_BUGS.md").read_text(encoding="utf-8")
    for file, name in re.findall(r"`((?:\w+/)*test_\w+\.py)(?:::(test_\w+))?`", text):
        trees = [tree for path, tree in EVERYTHING.items() if path.endswith(f"/{file}")]
        named = {f.name for tree in trees for f in functions(tree)}
        assert trees and (not name or name in named), f"{file}::{name}"
