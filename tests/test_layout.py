"""The rules of the repository: who may import whom, how long files and functions are, which words no file may
contain."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter

import pytest

from tests.runs import ROOT

LAYERS = ("main", "cli", "demo", "eval", "training", "serve", "custom_generate", "models", "adt_tree")
MAY_IMPORT = {  # main -> cli -> demo, eval, training, serve -> adt_tree.pipeline, models -> adt_tree
    "main": {"cli", "adt_tree"},
    "cli": {"cli", "demo", "eval", "training", "serve", "models", "adt_tree"},
    "demo": {"demo", "eval", "models", "adt_tree"},
    "eval": {"eval", "models", "adt_tree"},
    "serve": {"serve", "eval", "models", "adt_tree"},
    "training": {"training", "models", "adt_tree"},
    "custom_generate": {"adt_tree"},
    "models": {"models", "adt_tree"},
    "adt_tree": {"adt_tree"},
}
DECLARATION = (
    "cli.parser"  # imports no other file of cli/; the stages of training/emoji declare options by it
)
# What models/ may import from adt_tree: the method's protocols, value types and defaults, some helpers, and
# the loop of the AR baseline with its noise, which generates the image on which alignments are compared.
FOR_MODELS = {
    ("adt_tree.roles", None), ("adt_tree.tree", None), ("adt_tree.grid", None),
    ("adt_tree.verify", "Verdict"), ("adt_tree.sampling", "Sampling"), ("adt_tree.relax", "nearest_table"),
    ("adt_tree.policy", "TreeShape"), ("adt_tree.policy", "AdaptiveTree"),
    ("adt_tree.method", "Tree"), ("adt_tree.method", "method_spec"),
    ("adt_tree.method", "Demand"), ("adt_tree.noise", "Noise"), ("adt_tree.noise", "ROWS"),
    ("adt_tree.sampling", "log_probs"),
    ("adt_tree.decode", "autoregressive"), ("adt_tree.decode", "finished"),
    ("adt_tree.budget.candidates", "AutoTree"), ("adt_tree.ranges", "part"), ("adt_tree.errors", None),
}  # fmt: skip
MODELS_BELOW = {  # folders of models that stand below the rest -> the parts of models that they may import
    "models/checkpoint": ("models.checkpoint",),
    "models/codecs": ("models.checkpoint", "models.codecs"),
}
# The files of the method that know models, and what else they may import.
FRONT_DOORS = {
    "adt_tree/pipeline.py": {"models", "PIL"},
    "adt_tree/generation/contract.py": {"models", "transformers"},
    "adt_tree/generation/call_settings.py": {"transformers"},
    "adt_tree/generation/adopted.py": {"models"},
}
CONTRACTS = {("adt_tree/generation/contract.py", "generate")}  # functions that may take **arguments
WITHOUT_TORCH = ("budget", "errors", "grid", "method", "policy", "records", "static_trees")
NO_TORCH = tuple(f"adt_tree/{name}.py" for name in WITHOUT_TORCH)
LONGEST_FILE, LONGEST_FUNCTION, LONGEST_LOOP, LARGEST_FOLDER = 400, 60, 40, 20


def sources(*layers: str) -> dict[str, ast.Module]:
    """Returns the syntax trees of the Python files of all layers by their paths from the root."""
    paths = (
        p for layer in layers for p in [*ROOT.glob(f"{layer}.py"), *sorted((ROOT / layer).rglob("*.py"))]
    )
    return {p.relative_to(ROOT).as_posix(): ast.parse(p.read_text(encoding="utf-8")) for p in paths}


OURS = sources(*LAYERS)
EVERYTHING = OURS | sources("tests")


def imports(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Yields the (module, name) of every import, wherever it stands; name is None for whole modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from ((node.module or "", alias.name) for alias in node.names)


@pytest.mark.parametrize("file", OURS)
def test_imports(file: str) -> None:
    """Layers import downwards only, models/ imports FOR_MODELS alone from adt_tree, and adt_tree imports no
    package but torch. FRONT_DOORS are the exceptions."""
    layer, more = file.split("/")[0].removesuffix(".py"), FRONT_DOORS.get(file, set())
    allowed = MAY_IMPORT[layer] | more
    below = MODELS_BELOW.get(file.rpartition("/")[0], ("models",))
    known = {"torch", "adt_tree", *more, *sys.stdlib_module_names}
    for module, name in imports(OURS[file]):
        top = module.split(".")[0]
        declares = module == DECLARATION and file.startswith("training/emoji/")
        assert top not in (*LAYERS, "tests") or top in allowed or declares, module
        if layer == "models" and top == "adt_tree":
            assert {(module, None), (module, name)} & FOR_MODELS, f"{name} from {module}"
        assert layer != "models" or top != "models" or module.startswith(below), module
        assert layer != "adt_tree" or top in known, module
        assert file not in NO_TORCH or top != "torch"


def run_imports(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """Yields the imports of a file that run at some time: all but those for type checkers."""
    every = list(ast.walk(tree))
    typed = [n for n in every if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    hidden = {id(inner) for node in typed for part in node.body for inner in ast.walk(part)}
    for node in every:
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in hidden:
            yield from imports(node)


def test_imports_have_no_circles() -> None:
    modules = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in OURS}
    graph = {module: set[str]() for module in modules}
    for importer, file in modules.items():
        for module, name in run_imports(OURS[file]):
            target = f"{module}.{name}" if f"{module}.{name}" in graph else module
            if target in graph and target != importer:
                graph[importer].add(target)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names a circle


def test_folders_are_small() -> None:
    counts = Counter(file.rpartition("/")[0] for file in OURS)
    assert not {folder: count for folder, count in counts.items() if count > LARGEST_FOLDER}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Returns all functions, methods and nested functions."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


ABSOLUTE = re.compile(
    r"(?:^|[\s\"'=:(])(/(?:home|root|work|tmp|mnt|data|opt|usr|Users|workspace)/|[A-Z]:\\\\)"
)


@pytest.mark.parametrize("file", EVERYTHING)
def test_lengths_signatures_and_strings(file: str) -> None:
    tree = EVERYTHING[file]
    assert len((ROOT / file).read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE
    assert ast.get_docstring(tree), "it does not say what it is for"
    for function in functions(tree):
        assert (function.end_lineno or 0) - function.lineno < LONGEST_FUNCTION, function.name
        free = function.args.kwarg is None or (file, function.name) in CONTRACTS
        assert file not in OURS or free, f"{function.name} takes **"
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and file != "tests/test_layout.py":
            assert not ABSOLUTE.search(node.value), repr(node.value)


def test_there_are_two_loops_and_they_are_short() -> None:
    lines = (ROOT / "adt_tree" / "decode.py").read_text(encoding="utf-8").splitlines()
    loops = {function.name: function for function in functions(OURS["adt_tree/decode.py"])}
    for name in ("autoregressive", "speculative"):
        body = loops[name].body[1:]  # without the docstring
        code = [line for line in lines[body[0].lineno - 1 : loops[name].end_lineno] if line.strip()]
        assert len(code) <= LONGEST_LOOP, f"{name} has {len(code)} lines"


MUTABLE_CALLS = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict"}


def constant(name: str) -> bool:
    """Tells whether a name is in CAPITALS, with or without a leading underscore."""
    return bool(re.fullmatch(r"_?[A-Z][A-Z0-9_]*|__all__", name))


@pytest.mark.parametrize("file", OURS)
def test_modules_hold_no_state(file: str) -> None:
    """Containers at module level are named as constants, and nothing assigns to a global."""
    assert not any(isinstance(node, ast.Global) for node in ast.walk(OURS[file]))
    for node in OURS[file].body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            called = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in MUTABLE_CALLS
            if called or isinstance(node.value, ast.List | ast.Dict | ast.Set):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    assert isinstance(target, ast.Name) and constant(target.id), ast.unparse(target)


def test_the_checks_see_something() -> None:
    assert len([file for file in OURS if file.startswith("adt_tree/")]) >= 9
    assert ABSOLUTE.search("reads /home/somebody/x")
    assert not ABSOLUTE.search("a ratio of 3/4 and configs/one.yaml")
    assert not list(run_imports(ast.parse("if TYPE_CHECKING:\n    import a")))
    nested = ast.parse("def f():\n    import a.b\n    from c.d import e")
    assert dict(imports(nested)) == {"a.b": None, "c.d": "e"}
    assert constant("_GOLDEN") and not constant("cache")
