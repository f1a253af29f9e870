"""What a run says of itself: records that add up to the image, and every step handed over as it is made."""

from __future__ import annotations

import pytest

from adt_tree.decode import autoregressive
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


def test_records() -> None:
    """Steps add up to the image and trees never reach beyond it."""
    for image in Method("fixed", coupled(Sampling())).decode(Sampling(), 2):
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
    greedy, found = Sampling(temperature=0.0), []
    drafted = Method("horizontal", coupled(greedy)).decode(greedy, 3)
    for images in (baseline(greedy, 1).values(), drafted):
        found.append({i.name: [p for step in i.steps for p in step.top1] for i in images})
    assert {name: pytest.approx(top1, abs=2e-4) for name, top1 in found[0].items()} == found[1]


@pytest.mark.parametrize("tree", ["horizontal", "mc_sim_7b_63", "self-draft", "ar"])
def test_every_step_can_be_followed(tree: str) -> None:
    """Codes, trees and accepted paths of each step add up to the images, and confidence falls along paths."""
    sampling, slots = SAMPLINGS["sampled"], 2
    target, rule = make_target(slots, sampling.branches), coupled(sampling)
    if tree == "ar":
        steps = autoregressive(target, IMAGES, sampling, rule.noise)
    elif tree == "self-draft":
        steps = Method("tree", rule, tree).steps(target, sampling)
    else:
        steps = Method(tree, rule).steps(target, sampling)
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
    assert codes == reference("sampled") and finished == set(codes)
