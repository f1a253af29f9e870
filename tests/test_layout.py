"""The layout holds: who may import whom, how long things are, what no file may say."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("main", "cli", "demo", "eval", "training", "models", "adt_tree")
MAY_IMPORT = {  # main -> cli -> eval, training -> adt_tree.pipeline, models -> adt_tree
    "main": {"cli", "eval", "training", "models"},
    "cli": {"cli", "demo", "eval", "training", "models", "adt_tree"},
    "demo": {"demo", "eval", "adt_tree"},
    "eval": {"eval", "models", "adt_tree"},
    "training": {"training", "models", "adt_tree"},
    "models": {"models", "adt_tree"},
    "adt_tree": {"adt_tree"},
}
# What backbones take from the method: its protocols, value types, defaults and two helpers; no loop, policy
# or rule but one, which draws the codes along which a drafter's token shift is measured.
FOR_MODELS = {
    ("adt_tree.roles", None), ("adt_tree.tree", None), ("adt_tree.grid", None),
    ("adt_tree.verify", "Verdict"), ("adt_tree.sampling", "Sampling"), ("adt_tree.relax", "nearest_table"),
    ("adt_tree.policy", "TreeShape"), ("adt_tree.policy", "AdaptiveTree"),
    ("adt_tree.policy", "BUDGET"), ("adt_tree.policy", "SELF_DRAFTED"), ("adt_tree.policy", "self_drafted"),
    ("adt_tree.policy", "WINDOWS"), ("adt_tree.policy", "windowed"),
    ("adt_tree.noise", "Noise"), ("adt_tree.sampling", "log_probs"), ("adt_tree.verify", "Coupled"),
    ("adt_tree.ranges", "part"),
}  # fmt: skip
FRONT_DOOR = "adt_tree/pipeline.py"  # the one file of the method that knows models
NO_TORCH = tuple(f"adt_tree/{name}.py" for name in ("grid", "method", "policy", "records", "static_trees"))
LONGEST_FILE, LONGEST_FUNCTION, LONGEST_LOOP, LARGEST_FOLDER = 400, 60, 40, 20


def sources(*layers: str) -> list[Path]:
    """Python files of the layers, tests included under their own name."""
    found = [ROOT / "main.py"] if "main" in layers else []
    for layer in layers:
        found += sorted((ROOT / layer).rglob("*.py"))
    return found


def name_of(path: Path) -> str:
    """Path from the root, for messages."""
    return path.relative_to(ROOT).as_posix()


def layer_of(path: Path) -> str:
    """The layer a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def parse(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """(module, name) of every import, wherever it stands; name is None for whole modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from ((node.module or "", alias.name) for alias in node.names)


EVERYTHING = sources(*LAYERS, "tests")
OURS = sources(*LAYERS)


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_arrows(path: Path) -> None:
    allowed = MAY_IMPORT[layer_of(path)]
    for module, _ in imports(parse(path)):
        top = module.split(".")[0]
        if name_of(path) == FRONT_DOOR:
            allowed = allowed | {"models"}
        assert top not in LAYERS or top in allowed, f"{name_of(path)} imports {module}"
        assert top != "tests", f"{name_of(path)} imports {module}"


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def run_imports(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """The imports of a file that run some time: all but those for type checkers."""
    every = list(ast.walk(tree))
    typed = [n for n in every if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    hidden = {id(inner) for node in typed for part in node.body for inner in ast.walk(part)}
    for node in every:
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in hidden:
            yield from imports(node)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a ring; empty if there are none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph[module]):
            if found := visit(other, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := visit(module, []))), [])


def test_imports_have_no_circles() -> None:
    graph = {module_of(path): set[str]() for path in OURS}
    for path in OURS:
        for module, name in run_imports(parse(path)):
            target = f"{module}.{name}" if f"{module}.{name}" in graph else module
            if target in graph and target != module_of(path):
                graph[module_of(path)].add(target)
    assert not circle(graph), " -> ".join(circle(graph))
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_folders_are_small() -> None:
    for folder in sorted({path.parent for path in sources(*LAYERS[1:])}):
        count = len(list(folder.glob("*.py")))
        assert count <= LARGEST_FOLDER, f"{name_of(folder)}: {count} files beside each other"


@pytest.mark.parametrize("path", sources("models"), ids=name_of)
def test_models_take_types_only(path: Path) -> None:
    for module, name in imports(parse(path)):
        if module == "adt_tree" or module.startswith("adt_tree."):
            whole = module if module != "adt_tree" else f"adt_tree.{name}"
            assert {(whole, None), (whole, name)} & FOR_MODELS, f"{name_of(path)} takes {name} from {module}"


@pytest.mark.parametrize("path", sources("adt_tree"), ids=name_of)
def test_the_method_needs_torch_alone(path: Path) -> None:
    for module, _ in imports(parse(path)):
        top = module.split(".")[0]
        if name_of(path) in NO_TORCH:
            assert top != "torch", f"{name_of(path)} needs no torch"
        known = {"torch", "adt_tree", *(("PIL", "models") if name_of(path) == FRONT_DOOR else ())}
        assert top in known or top in sys.stdlib_module_names, f"{name_of(path)} imports {module}"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions, methods and nested ones."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("path", EVERYTHING, ids=name_of)
def test_lengths_and_signatures(path: Path) -> None:
    tree = parse(path)
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= LONGEST_FILE, f"{name_of(path)}: {lines} lines"
    for function in functions(tree):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= LONGEST_FUNCTION, f"{name_of(path)}: {function.name} has {length} lines"
        taken = function.args.kwarg
        assert path not in OURS or taken is None, f"{name_of(path)}: {function.name} takes **{taken.arg}"
    assert ast.get_docstring(tree), f"{name_of(path)} does not say what it is for"


def test_there_are_two_loops_and_they_are_short() -> None:
    path = ROOT / "adt_tree" / "decode.py"
    lines = path.read_text(encoding="utf-8").splitlines()
    loops = {function.name: function for function in functions(parse(path))}
    for name in ("autoregressive", "speculative"):
        body = loops[name].body[1:]  # without the docstring
        code = [line for line in lines[body[0].lineno - 1 : loops[name].end_lineno] if line.strip()]
        assert len(code) <= LONGEST_LOOP, f"{name} has {len(code)} lines"


MUTABLE_CALLS = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict"}


def constant(name: str) -> bool:
    """CAPITALS, with a leading underscore or without."""
    return bool(re.fullmatch(r"_?[A-Z][A-Z0-9_]*|__all__", name))


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_modules_hold_no_state(path: Path) -> None:
    """Containers at module level are constants by name, and nothing assigns to a global."""
    tree = parse(path)
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"{name_of(path)}: global {node}"
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        value = getattr(node, "value", None)
        called = (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Name)
            and value.func.id in MUTABLE_CALLS
        )
        if called or isinstance(value, ast.List | ast.Dict | ast.Set):
            for target in targets:
                assert isinstance(target, ast.Name) and constant(target.id), (
                    f"{name_of(path)}: {ast.unparse(target)}"
                )


def strings(tree: ast.Module) -> Iterator[str]:
    """Every string in a file, docstrings included."""
    return (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


ABSOLUTE = re.compile(
    r"(?:^|[\s\"'=:(])(/(?:home|root|work|tmp|mnt|data|opt|usr|Users|workspace)/|[A-Z]:\\\\)"
)


@pytest.mark.parametrize("path", EVERYTHING, ids=name_of)
def test_no_absolute_paths(path: Path) -> None:
    if path == Path(__file__).resolve():
        return
    for text in strings(parse(path)):
        assert not ABSOLUTE.search(text), f"{name_of(path)}: {text!r}"


def test_the_checks_see_something() -> None:
    assert len(sources("adt_tree")) >= 9
    assert ABSOLUTE.search("reads /home/somebody/x")
    assert not ABSOLUTE.search("a ratio of 3/4 and configs/one.yaml")
    assert not list(run_imports(ast.parse("if TYPE_CHECKING:\n    import a")))
    assert dict(imports(ast.parse("def f():\n    import a.b\n    from c.d import e"))) == {
        "a.b": None,
        "c.d": "e",
    }
    assert constant("_GOLDEN") and not constant("cache")
