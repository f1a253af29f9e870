"""The rules of the repository that neither ruff nor import-linter checks (pyproject.toml): how long files and
functions are, how large folders are, what no file may contain, and that tests named in a document exist."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from tests.runs import ROOT

LAYERS = ("main", "cli", "demo", "eval", "training", "serve", "custom_generate", "models", "adt_tree")
# The function that transformers' generate calls with all its arguments.
CONTRACT = ("adt_tree/generation/generate.py", "generate")
MAX_FILE, MAX_FUNCTION, MAX_FOLDER = 400, 60, 20  # lines, and files of a folder
ABSOLUTE = re.compile(
    r"(?:^|[\s\"'=:(])(/(?:home|root|work|tmp|mnt|data|opt|usr|Users|workspace)/|[A-Z]:\\\\)"
)


def sources(*layers: str) -> dict[str, ast.Module]:
    """Returns the syntax trees of the Python files of all layers by their paths from the root."""
    paths = (
        p for layer in layers for p in [*ROOT.glob(f"{layer}.py"), *sorted((ROOT / layer).rglob("*.py"))]
    )
    return {p.relative_to(ROOT).as_posix(): ast.parse(p.read_text(encoding="utf-8")) for p in paths}


OURS = sources(*LAYERS)
EVERYTHING = OURS | sources("tests")


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Returns all functions, methods and nested functions."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns the number of lines of a function."""
    return (function.end_lineno or 0) - function.lineno + 1


def test_lengths() -> None:
    lines = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in EVERYTHING}
    assert not {file: count for file, count in lines.items() if count > MAX_FILE}
    long = [(file, f.name) for file, tree in EVERYTHING.items() for f in functions(tree)
            if length(f) > MAX_FUNCTION]  # fmt: skip
    assert not long
    folders = Counter(file.rpartition("/")[0] for file in OURS)
    assert not {folder: count for folder, count in folders.items() if count > MAX_FOLDER}


def test_no_function_swallows_options() -> None:
    swallowing = {(file, f.name) for file, tree in OURS.items() for f in functions(tree) if f.args.kwarg}
    assert swallowing <= {CONTRACT}


def test_no_string_is_a_path_of_one_machine() -> None:
    strings = [(file, node.value) for file, tree in EVERYTHING.items() for node in ast.walk(tree)
               if isinstance(node, ast.Constant) and isinstance(node.value, str)]  # fmt: skip
    found = [(file, text) for file, text in strings if ABSOLUTE.search(text)]
    assert {file for file, _ in found} == {"tests/test_layout.py"}, found  # the pattern finds its own control
    assert ("tests/test_layout.py", "/home/somebody/x") in found


def test_the_tests_that_reference_bugs_names_exist() -> None:
    text = (ROOT / "docs" / "REFERENCE_BUGS.md").read_text(encoding="utf-8")
    for file, name in re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", text):
        named = {function.name for function in functions(EVERYTHING[f"tests/{file}"])}
        assert not name or name in named, f"{file}::{name}"
