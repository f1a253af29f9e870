"""The rules of the repository that neither ruff nor import-linter checks (pyproject.toml): how long files,
functions and the two loops are, how large folders are, and what no file may contain."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from tests.runs import ROOT

LAYERS = ("main", "cli", "demo", "eval", "training", "serve", "custom_generate", "models", "adt_tree")
# The function that transformers' generate calls with all its arguments.
CONTRACT = ("adt_tree/generation/generate.py", "generate")
MAX_FILE, MAX_FUNCTION, MAX_LOOP, MAX_FOLDER = 400, 60, 40, 20  # lines, and files of a folder
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


def test_there_are_two_loops_and_they_are_short() -> None:
    lines = (ROOT / "adt_tree" / "decode.py").read_text(encoding="utf-8").splitlines()
    loops = {function.name: function for function in functions(OURS["adt_tree/decode.py"])}
    for name in ("autoregressive", "speculative"):
        body = loops[name].body[1:]  # without the docstring
        code = [line for line in lines[body[0].lineno - 1 : loops[name].end_lineno] if line.strip()]
        assert len(code) <= MAX_LOOP, f"{name} has {len(code)} lines"


MUTABLE_CALLS = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict"}


def mutable(value: ast.expr | None) -> bool:
    """Tells whether an expression makes a container."""
    called = isinstance(value, ast.Call) and ast.unparse(value.func) in MUTABLE_CALLS
    return called or isinstance(value, ast.List | ast.Dict | ast.Set)


def test_containers_of_modules_are_constants() -> None:
    names = []
    for file, tree in OURS.items():
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and mutable(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names += [(file, ast.unparse(target)) for target in targets]
    assert len(names) > 20
    assert not [name for name in names if not re.fullmatch(r"_?[A-Z][A-Z0-9_]*|__all__", name[1])]
