"""The tests that docs/REFERENCE_BUGS.md names exist."""

from __future__ import annotations

import re

from tests.runs import ROOT

TEXT = (ROOT / "docs" / "REFERENCE_BUGS.md").read_text(encoding="utf-8")


def test_named_tests_exist() -> None:
    named = re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", TEXT)
    assert len(named) > 12
    for file, function in named:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert not function or f"def {function}(" in source, f"{file}::{function}"
