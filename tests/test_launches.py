"""How much a step launches on a GPU, and how many graphs a family needs, counted on a fake device. It belongs
to its process, so each case runs in one of its own."""

from __future__ import annotations

import pytest

from tests.runs import python

# At most: launches of a step by who drafts, and graphs of two images.
LAUNCHES = {"ar": 13, "self-draft": 19, "adt-self-draft": 19, "eagle-1": 25, "eagle-2": 25, "adt-tree": 25}
GRAPHS = 48
# Every family, method and rule occurs. Rows of lumina_mgpt and emu3 end in separators.
CASES = {
    "anole": "ar,eagle-1,eagle-1-lantern rejection",
    "lumina_mgpt": "ar,adt-tree",
    "llamagen": "eagle-1 rejection,eagle-2-lantern rejection",
    "llamagen2": "eagle-2,adt-tree rejection",
    "janus_pro": "eagle-2-lantern,adt-self-draft-lantern",
    "emu3": "adt-self-draft",
}
COUNTER = """
import torch
from tests.fake_device import GPU, adt_tree, fake_gpu, FakeRecorder
from models.graphs import GraphRunner

with fake_gpu() as launches:
    x = torch.zeros(2, 4, device=GPU)
    run = GraphRunner(FakeRecorder(launches))
    double = lambda z: (2 * z).sort().values.masked_fill(z > 0, 1).view(-1)
    for made in (
        lambda: x + 1,
        lambda: x.view(-1)[1:],
        lambda: x.masked_fill(x > 0, 1),
        lambda: adt_tree.tree.to_device([1, 2], GPU),
        lambda: torch.tensor([1, 2], device=GPU),
        lambda: x.sum().item(),
        lambda: run(double, x),
        lambda: run(double, x),
        lambda: run(torch.neg, run(double, x)),
        lambda: run(torch.neg, run(double, x)),
    ):
        before = launches.total
        made()
        print(launches.total - before, end=" ")
"""


@pytest.mark.parametrize("family", CASES)
def test_launches_and_graphs(family: str) -> None:
    done = python("-m", "tests.fake_device", "--families", family, "--methods", CASES[family], timeout=300)
    rows = done.stdout.splitlines()[1:]
    assert len(rows) == len(CASES[family].split(",")), done.stderr
    for row in rows:
        method, (launches, graphs) = row.split()[1], map(int, row.split()[-2:])
        limit = LAUNCHES[method.removesuffix("-lantern")]
        assert limit - 8 <= launches <= limit and 0 < graphs <= GRAPHS, row


def test_the_counter() -> None:
    """What is a launch, what is none, and what several. A function's first call runs it between two copies; a
    replay copies its input, unless that is the result of another."""
    done = python("-c", COUNTER)
    assert [*map(int, done.stdout.split())] == [1, 0, 3, 1, 1, 2, 1 + 7 + 1, 2, 2 + 2, 2 + 1], done.stderr
