"""The page on the released code's bugs names code and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "REFERENCE_BUGS.md").read_text(encoding="utf-8")


def test_named_tests_exist() -> None:
    named = re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", TEXT)
    assert len(named) > 12
    for file, function in named:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert not function or f"def {function}(" in source, f"{file}::{function}"


def test_named_places_exist() -> None:
    places = re.findall(r"`((?:models|eval)/\w+\.py|[a-z_]+\.py)`", TEXT)
    for place in places:
        candidates = [ROOT / place, ROOT / "adt_tree" / place, ROOT / "tests" / place]
        assert any(path.is_file() for path in candidates), place
    for module, name in re.findall(r"`(verify|tree|sampling|decode|noise|transformer)\.(\w+)", TEXT):
        folder = "models" if module == "transformer" else "adt_tree"
        if name != "py":
            assert re.search(
                rf"(def|class) {name}\b", (ROOT / folder / f"{module}.py").read_text(encoding="utf-8")
            )
