"""Images that wait: a policy may leave images out of a step without trees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle

import pytest
import torch

from adt_tree.batch import StepOutput
from adt_tree.budget.candidates import AutoTree
from adt_tree.decode import speculative
from adt_tree.pipeline import Pipeline
from adt_tree.policy import PLAIN, TreeShape
from adt_tree.proposers.eagle import joined
from adt_tree.proposers.self_draft import SelfDraftProposer
from adt_tree.records import Step
from adt_tree.roles import Proposer
from adt_tree.sampling import Sampling
from tests.checkpoints import Checkpoints
from tests.decoding import codes_of
from tests.tape import Operators

TREE = TreeShape(2, 3, 4)
SLOTS = 3


class Waiting:
    """A policy that cycles through a schedule: T is a step with trees, p one without, and in w the image that
    is furthest waits, if there is another one."""

    bounds = TREE

    def __init__(self, schedule: str) -> None:
        self._steps = cycle(schedule)
        self.waited = 0

    def reset(self, slot: int, seed: int) -> None: ...

    def shapes(self, roots: Mapping[int, int]) -> dict[int, TreeShape]:
        kind = next(self._steps)
        taking_part = set(roots)
        if kind == "w" and len(roots) > 1:
            taking_part.remove(max(roots, key=lambda slot: roots[slot]))
            self.waited += 1
        return dict.fromkeys(taking_part, TREE if kind == "T" else PLAIN)

    def observe(self, steps: Mapping[int, Step]) -> None: ...


def decoded(pipe: Pipeline, method: str, policy: Waiting) -> Iterator[tuple[Proposer, StepOutput]]:
    """Yields the steps of five images under a policy, with the proposer."""
    chosen = pipe.method(method, sampling=Sampling(1.0, guidance=3.0), tree=TREE)
    requests = pipe.requests(["red heart", "sun", "rocket", "pizza", "moon"], seed=5)
    engine = pipe.engine(chosen, requests, SLOTS)
    assert engine.drafting is not None
    proposer, _, rule = engine.drafting
    for output in speculative(engine.target, proposer, policy, rule, requests, chosen.sampling):
        yield proposer, output


@pytest.mark.parametrize("family", ["emoji", "lumina_mgpt"])
@pytest.mark.parametrize("method", ["self-draft", "eagle-2"])
def test_an_image_that_waits_commits_nothing(checkpoints: Checkpoints, family: str, method: str) -> None:
    """The codes are those of the AR baseline, and every step of an image is recorded once."""
    pipe = Pipeline(checkpoints[family].load())
    requests = pipe.requests(["red heart", "sun", "rocket", "pizza", "moon"], seed=5)
    ar = pipe.engine(pipe.method("ar", sampling=Sampling(1.0, guidance=3.0)), requests, SLOTS)
    expected = codes_of(ar.decode(requests))
    policy, images = Waiting("TwwpTppwp"), []
    for _, output in decoded(pipe, method, policy):
        images += output.finished
    assert policy.waited > 5
    assert codes_of(images) == expected
    for image in images:
        assert [step.position for step in image.steps[1:]] == [
            step.position + step.accepted + 1 for step in image.steps[:-1]
        ]


@pytest.mark.parametrize("family", ["emoji", "lumina_mgpt"])
def test_a_drafter_skips_the_steps_in_which_its_image_waited(checkpoints: Checkpoints, family: str) -> None:
    """At the same position of an image it drafts the same tree, whether images waited before or not."""

    def drafts(schedule: str) -> dict[tuple[str, int], list[int]]:
        """Returns the trees that an image drafts after it has waited, or all if none waits."""
        trees, waited = {}, set[str]()
        in_flight = dict[int, str]()
        for _, output in decoded(Pipeline(checkpoints[family].load()), "eagle-2", Waiting(schedule)):
            moved = {slot: image.name for slot, image in output.images}
            waited |= {name for slot, name in in_flight.items() if slot not in moved}
            for slot, image in output.images:
                if image.steps[-1].depth == TREE.depth and (image.name in waited or "w" not in schedule):
                    trees[image.name, image.steps[-1].position] = output.tree.codes[slot].tolist()
            finished = {image.name for image in output.finished}
            in_flight = {slot: name for slot, name in {**in_flight, **moved}.items() if name not in finished}
        return trees

    always, sometimes = drafts("T"), drafts("TwwpTpwwp")
    shared = always.keys() & sometimes.keys()
    assert len(shared) >= 2
    assert {place: always[place] for place in shared} == {place: sometimes[place] for place in shared}


class Late(Waiting):
    """A policy without trees until an image has followed another one in its slot."""

    begun = 0

    def reset(self, slot: int, seed: int) -> None:
        self.begun += 1

    def shapes(self, roots: Mapping[int, int]) -> dict[int, TreeShape]:
        return dict.fromkeys(roots, TREE if self.begun > SLOTS else PLAIN)


@pytest.mark.parametrize("family", ["emoji", "lumina_mgpt"])
def test_a_drafter_does_not_read_the_steps_of_the_image_before(checkpoints: Checkpoints, family: str) -> None:
    """An image that follows another one, all of whose steps had no trees, drafts what it always drafts."""

    def drafts(policy: Waiting) -> dict[tuple[str, int], list[int]]:
        trees = {}
        for _, output in decoded(Pipeline(checkpoints[family].load()), "eagle-2", policy):
            for slot, image in output.images:
                if image.name in ("3", "4") and image.steps[-1].depth == TREE.depth:
                    trees[image.name, image.steps[-1].position] = output.tree.codes[slot].tolist()
        return trees

    always, late = drafts(Waiting("T")), drafts(Late("T"))
    shared = always.keys() & late.keys()
    assert ("3", 1) in shared
    assert {place: always[place] for place in shared} == {place: late[place] for place in shared}


def test_the_end_of_an_image_takes_no_longer_after_many_steps_without_trees(pipe: Pipeline) -> None:
    """The drafter has not read these steps yet, and forgets the image's share of them."""
    operations, seen = list[int](), list[str]()
    for number, (proposer, _) in enumerate(decoded(pipe, "eagle-2", Waiting("p"))):
        if number in (2, 10):
            seen.clear()
            with torch.inference_mode(), Operators(lambda operator, *_: seen.append(str(operator))):
                proposer.release(0)
            operations.append(len(seen))
        if number == 10:
            break
    assert operations[0] == operations[1] > 0


def test_nan_of_an_earlier_image_does_not_reach_the_drafter() -> None:
    """Of two pairs the first belongs to an earlier image and is NaN, the second to the present one."""
    features = torch.tensor([float("nan"), 1.0])[:, None, None, None]  # of one image and branch, in two steps
    codes, counts = torch.tensor([[[5]], [[6]]]), torch.tensor([[0], [1]])
    read, read_codes, count = joined(
        [(x[None], y, n) for x, y, n in zip(features, codes, counts, strict=True)]
    )
    assert read[0, 0, 0] == 1.0 and read_codes[0, 0] == 6 and count.tolist() == [1]
    assert read.isfinite().all()


def test_self_drafting_skips_the_steps_in_which_its_image_waited(pipe: Pipeline) -> None:
    """After every tree it knows the position of each image, and the codes before it."""
    policy, compared = Waiting("TwwpTppwp"), 0
    for proposer, output in decoded(pipe, "self-draft", policy):
        assert isinstance(proposer, SelfDraftProposer)
        if output.tree.nodes > 1:
            for slot, image in output.images:
                position = int(proposer._position[slot])
                if image not in output.finished:
                    assert position == len(image.codes)
                    assert proposer._neighbours._codes[slot, :position].tolist() == image.codes
                    compared += 1
    assert compared > 5


def test_auto_lets_images_wait(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first trial of a tree puts four tiny images out of step. Then plain decoding is chosen, because it
    counts as 20 times as fast as it is."""
    monkeypatch.setattr("adt_tree.budget.policy.PERIOD", 2)
    sampling = Sampling(1.0, guidance=3.0)
    requests = pipe.requests(["red heart", "sun", "rocket", "pizza"] * 4, seed=5)
    expected = codes_of(pipe.engine(pipe.method("ar", sampling=sampling), requests, 4).decode(requests))
    chosen = pipe.method("eagle-2", sampling=sampling, tree=AutoTree())
    finished, waited = [], 0
    for output in pipe.engine(chosen, requests, 4).steps(requests):
        finished += output.finished
        waited += len(output.images) < 4
        if output.tree.nodes > 1:
            monkeypatch.setattr("adt_tree.budget.policy.NETWORK_STEP_LOSS", 19.0)
            monkeypatch.setattr("adt_tree.budget.policy.MOST_STEP_LOSS", 19.0)
    assert codes_of(finished) == expected and waited
