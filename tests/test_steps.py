"""What a run says of itself: records that add up to the image, and every step handed over as it is made."""

from __future__ import annotations

import pytest

from adt_tree.method import Method
from adt_tree.records import Decoded
from adt_tree.sampling import Sampling
from tests.test_engine import ADAPT, CODES, FIXED, GREEDY, GRID, IMAGES, TREE, made, reference


def check_records(image: Decoded, most: int) -> None:
    """Steps add up to the image; trees have at most so many drafted nodes and never reach beyond it."""
    position = 1
    for step in image.steps:
        assert (step.position, (step.row, step.column)) == (position, GRID.cell(position))
        assert step.accepted <= step.depth <= GRID.size - position - 1 and step.nodes <= most
        assert len(step.top1) == step.accepted + 1 and 1 / CODES <= min(step.top1) <= max(step.top1) <= 1
        position += step.accepted + 1
    assert position == GRID.size == len(image.codes)
    assert image.target_calls == len(image.steps)
    assert image.tau == pytest.approx((GRID.size - 1) / len(image.steps))


def test_the_likeliest_code_is_known_at_every_position() -> None:
    """At temperature 0 what is committed is the likeliest: its probability along the image is the AR
    baseline's, whoever drafts."""
    found = []
    for method in (Method("ar", GREEDY), Method("adt-tree", GREEDY, ADAPT)):
        images = made(method, 3).decode(IMAGES)
        found.append({i.name: [p for step in i.steps for p in step.top1] for i in images})
    assert {name: pytest.approx(top1, abs=2e-4) for name, top1 in found[0].items()} == found[1]


@pytest.mark.parametrize(
    ("name", "tree", "most"),
    [
        ("eagle-2", FIXED, 12),
        ("adt-tree", ADAPT, 14),
        ("eagle-1", "mc_sim_7b_63", 25),
        ("self-draft", TREE, 14),
        ("ar", None, 0),
    ],
)
def test_every_step_can_be_followed(name: str, tree: object, most: int) -> None:
    """Codes, trees and accepted paths of each step add up to the images, and confidence falls along paths."""
    steps = made(Method(name, Sampling(), tree), 2).steps(IMAGES)
    codes: dict[str, list[int]] = {}
    finished = set()
    for step in steps:
        for slot, image in step.images:
            done, drafts = image.steps[-1], step.tree
            drawn = codes.setdefault(image.name, image.codes[:1])
            path = step.verdict.path[slot, : done.accepted + 1]
            assert drafts.codes[slot, path].tolist() == [drawn[-1], *image.codes[done.position :][:-1]]
            drawn += step.verdict.codes[slot, : done.accepted + 1].tolist()
            assert drawn == image.codes and int(drafts.valid[slot].sum()) == done.nodes + 1
            if drafts.confidence is not None:
                own = drafts.confidence[slot]
                falls = own <= own[drafts.parents[slot]] + 1e-6
                assert own[0] == 0 and bool(falls[drafts.valid[slot]].all())
        for image in step.finished:
            check_records(image, most)
            finished.add(image.name)
    assert codes == reference(Sampling()) and finished == set(codes)
