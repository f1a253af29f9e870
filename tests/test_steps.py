"""What a run says of itself: records that add up to the image, and every step handed over as it is made."""

from __future__ import annotations

import pytest

from adt_tree.method import Method
from adt_tree.sampling import Sampling
from tests.test_engine import ADAPT, CODES, FIXED, GREEDY, GRID, IMAGES, TREE, made, reference


def test_records() -> None:
    """Steps add up to the image and trees never reach beyond it."""
    for image in made(Method("eagle-2", Sampling(), FIXED), 2).decode(IMAGES):
        assert len(image.codes) == GRID.size
        position = 1
        for step in image.steps:
            assert (step.position, (step.row, step.column)) == (position, GRID.cell(position))
            assert step.depth <= GRID.size - position - 1 or step.depth == 0
            assert step.accepted <= step.depth
            assert step.nodes <= 12
            assert len(step.top1) == step.accepted + 1 and 1 / CODES <= min(step.top1) <= max(step.top1) <= 1
            position += step.accepted + 1
        assert position == GRID.size
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
    ("name", "tree"),
    [("adt-tree", ADAPT), ("eagle-1", "mc_sim_7b_63"), ("self-draft", TREE), ("ar", None)],
)
def test_every_step_can_be_followed(name: str, tree: object) -> None:
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
        finished |= {image.name for image in step.finished}
    assert codes == reference(Sampling()) and finished == set(codes)
