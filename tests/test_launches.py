"""The launches, reads and memory of a step on a GPU, as a fake device counts them."""

from __future__ import annotations

import pytest

from adt_tree.method import METHODS
from models.registry import PUBLISHED
from tests.fake_device import Case, count, recorded, stored_cases


@pytest.mark.parametrize("case", stored_cases(), ids=str)
def test_a_step_launches_reads_and_holds_what_it_should(case: Case) -> None:
    launches = recorded().get(case.name)
    assert launches is not None, "it is not in launches.json: run `python -m tests.fake_device --record`"
    assert count(case).problems(launches) == []


def test_every_kind_of_case_occurs() -> None:
    names = [str(case) for case in stored_cases()]
    words = {word.removesuffix("-lantern") for name in names for word in name.split()}
    assert {name for name, row in METHODS.items() if not row.rival} < words
    assert {"eager", "graphs", "greedy", "sampled", "1", "4", "rejection", *PUBLISHED} < words
    assert any("-lantern" in name for name in names)
