"""What a run says of itself: records that add up to the image, and every step handed over as it is made."""

from __future__ import annotations

import pytest

from adt_tree.decode import autoregressive
from adt_tree.records import Decoded
from adt_tree.sampling import Sampling
from tests.test_engine import (
    CODES,
    GRID,
    IMAGES,
    SAMPLINGS,
    Method,
    baseline,
    coupled,
    make_target,
    reference,
)


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
    greedy, found = Sampling(temperature=0.0), []
    drafted = Method("horizontal", coupled(greedy)).decode(greedy, 3)
    for images in (baseline(greedy, 1).values(), drafted):
        found.append({i.name: [p for step in i.steps for p in step.top1] for i in images})
    assert {name: pytest.approx(top1, abs=2e-4) for name, top1 in found[0].items()} == found[1]


@pytest.mark.parametrize(
    ("tree", "most"), [("fixed", 12), ("horizontal", 14), ("mc_sim_7b_63", 25), ("self-draft", 14), ("ar", 0)]
)
def test_every_step_can_be_followed(tree: str, most: int) -> None:
    """Codes, trees and accepted paths of each step add up to the images, and confidence falls along paths."""
    sampling = SAMPLINGS["sampled"]
    target, rule = make_target(2, sampling.branches), coupled(sampling)
    drafter, shape = ("self-draft", "tree") if tree == "self-draft" else ("network", tree)
    if tree == "ar":
        steps = autoregressive(target, IMAGES, sampling, rule.noise)
    else:
        steps = Method(shape, rule, drafter).steps(target, sampling)
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
    assert codes == reference("sampled") and finished == set(codes)
