"""Images in flight with different settings, clients who leave, and logits that are not numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from adt_tree.batch import SlotSampling
from adt_tree.method import Method
from adt_tree.roles import Request
from adt_tree.sampling import PassSampling, log_probs
from adt_tree.settings import Lantern, Sampling
from adt_tree.static_trees import StaticTree
from models.target import ARTarget, Prompt
from tests.adt_tree.test_engine import ADAPT, FIXED, IMAGES, TREE, decoder, new_engine, reference
from tests.support.decoding import CPU, codes_of
from tests.support.tape import Machine

COMMON = Sampling(top_k=7)
MIXED = [
    COMMON,
    Sampling(temperature=0.0, top_k=7),
    Sampling(temperature=0.7, top_k=7, guidance=1.0),
    Sampling(top_k=7, top_p=0.8, guidance=5.5),
    Sampling(temperature=0.0, top_k=7, top_p=0.5, guidance=1.0),
]
METHODS = [Method("ar", COMMON), Method("eagle-2", COMMON, FIXED), Method("self-draft", COMMON, TREE)]
METHODS += [Method("eagle-1", COMMON, StaticTree("mc_sim_7b_63")), Method("adt-tree", COMMON, ADAPT)]


def settings(samplings: Sequence[Sampling], common: Sampling = COMMON) -> PassSampling:
    """Returns the sampling of a pass over slots, whose images have these samplings."""
    slots = SlotSampling(common, len(samplings), CPU)
    for slot, sampling in enumerate(samplings):
        slots.begin(slot, sampling)
    return slots.for_pass


@pytest.mark.parametrize("top_p_first", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 65), (2, 5, 1, 17), (2, 5, 9, 1025)])
def test_a_row_has_what_its_sampling_gives(shape: tuple[int, ...], top_p_first: bool) -> None:
    """Rows are equal to the bit, for any number of codes and with the filters in both orders."""
    logits = 6 * torch.randn(shape, generator=torch.Generator().manual_seed(3))
    samplings = [replace(sampling, top_p_first=top_p_first) for sampling in MIXED]
    together = log_probs(logits, settings(samplings, replace(COMMON, top_p_first=top_p_first)))
    for slot, sampling in enumerate(samplings):
        alone = logits[:, slot : slot + 1]
        assert torch.equal(
            together[slot], log_probs(alone, PassSampling.uniform(sampling, alone.device))[0]
        ), sampling
    assert not torch.equal(together[0], together[3])


def test_no_filter_runs_that_no_image_needs() -> None:
    greedy = Sampling(temperature=0.0, top_k=7, top_p=0.5)
    assert (settings([COMMON, greedy]).top_k, settings([COMMON, greedy]).has_top_p) == (7, False)
    assert settings([greedy], greedy).all_greedy and not settings([COMMON, greedy]).all_greedy
    assert settings([COMMON, replace(COMMON, top_p=0.5)]).has_top_p


UNFIT = [(Sampling(top_k=3), COMMON, "top_k"), (Sampling(top_k=7, top_p_first=True), COMMON, "top_k")]
UNFIT += [(COMMON, replace(COMMON, **less), "engine") for less in ({"guidance": 1.0}, {"temperature": 0.0})]


@pytest.mark.parametrize(("image", "common", "named"), UNFIT)
def test_an_engine_refuses_what_it_was_not_built_for(image: Sampling, common: Sampling, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        settings([image], common)


MIXES = [*((method, False) for method in METHODS), *((method, True) for method in METHODS[:3])]


@pytest.mark.parametrize(("method", "graphs"), MIXES, ids=str)
def test_a_batch_of_different_samplings(
    method: Method, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every image is that of the AR baseline under the image's sampling, decoded alone. Recordings read the
    settings from tensors, which are changed in place or are inputs."""
    monkeypatch.setattr("models.model.CudaRecorder", lambda device: Machine())
    engine = new_engine(method, 3, graphs)
    requests = [replace(image, sampling=sampling) for image, sampling in zip(IMAGES, MIXED, strict=True)]
    done = codes_of(engine.decode(requests))
    for request, sampling in zip(requests, MIXED, strict=True):
        assert done[request.name] == reference(sampling)[request.name], sampling
    assert done != reference(COMMON)


def test_which_greedy_images_need_another_engine() -> None:
    relaxed = Method("self-draft", COMMON, TREE, Lantern(0.5, 4))
    assert [method.greedy_rule_differs for method in (*METHODS, relaxed)] == [False] * 5 + [True]


@dataclass
class Watcher:
    """A client who leaves when told to, and stores the errors that it is told of."""

    gone: bool = False
    faults: list[str] = field(default_factory=list)

    def fail(self, error: FloatingPointError) -> None:
        self.faults.append(str(error))


@pytest.mark.parametrize("method", METHODS[:3], ids=str)
def test_a_slot_may_idle_for_any_time(method: Method) -> None:
    """None means that no request has come yet. Images come one at a time, so two of three slots idle for more
    steps than their caches have room for."""

    def one_by_one() -> Iterator[Request | None]:
        for image in IMAGES:
            yield image
            yield from [None] * 20  # more than the steps of an image

    assert codes_of(new_engine(method, 3).decode(one_by_one())) == reference(COMMON)


@pytest.mark.parametrize("method", METHODS[:3], ids=str)
def test_a_client_who_leaves_frees_the_slot_at_the_next_step(method: Method) -> None:
    clients = [Watcher() for _ in IMAGES]
    requests = [replace(image, client=client) for image, client in zip(IMAGES, clients, strict=True)]
    done, in_flight = {}, []
    for number, output in enumerate(new_engine(method, 2).steps(requests)):
        in_flight.append({image.name for _, image in output.images})
        clients[1].gone = number >= 1
        done |= codes_of(output.finished)
    expected = reference(COMMON)
    assert done == {name: expected[name] for name in ("0", "2", "3", "4")}
    assert "1" in in_flight[1] and "1" not in in_flight[2] and "2" in in_flight[2]


@pytest.mark.parametrize("method", METHODS[:3], ids=str)
def test_logits_that_are_no_numbers_fail_one_image(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other images, and those that follow in its slot, are the same as without the fault."""
    poison = 37  # a token whose embedding is made NaN
    row = decoder(4, torch.float32).embed.weight[poison]
    before = row.clone()
    bad, client = Request("bad", Prompt([0, poison, 38, 39], [0, 39]), 5), Watcher()
    requests = [replace(image, client=Watcher()) for image in IMAGES]
    requests = [requests[0], replace(bad, client=client), *requests[1:]]
    engine = new_engine(method, 2)
    try:
        row.fill_(float("nan"))
        done = codes_of(engine.decode(requests))
        assert done == reference(COMMON) and len(client.faults) == 1 and "bad" in client.faults[0]
        with pytest.raises(FloatingPointError, match="image bad"):  # without a client the error ends the run
            list(engine.decode([IMAGES[0], bad]))
    finally:
        row.copy_(before)
    spoil_midway(monkeypatch, "1", requests)
    late_client = requests[2].client
    done = codes_of(engine.decode(requests[:1] + requests[2:]))
    assert done == {n: codes for n, codes in reference(COMMON).items() if n != "1"}
    assert isinstance(late_client, Watcher) and "image 1" in late_client.faults[0]


def spoil_midway(monkeypatch: pytest.MonkeyPatch, name: str, requests: Sequence[Request]) -> None:
    """Makes the third pass after the prefill of an image write NaN into its slot, so that its logits are not
    numbers from then on."""
    prompt = next(request.prompt for request in requests if request.name == name)
    prefill, forward, state = ARTarget.prefill, ARTarget.forward, {"slot": -1, "passes": 0}

    def prefilling(target: ARTarget, prompts: Mapping[int, Prompt]) -> object:
        state["slot"] = next((slot for slot in prompts if prompts[slot] is prompt), state["slot"])
        return prefill(target, prompts)

    def passing(target: ARTarget, tree: object, committed: Sequence[int]) -> object:
        state["passes"] += state["slot"] >= 0
        if state["passes"] == 3:
            target.cache.store[:, state["slot"] :: target.slots, :, :, :3] = float("nan")
        return forward(target, tree, committed)

    monkeypatch.setattr(ARTarget, "prefill", prefilling)
    monkeypatch.setattr(ARTarget, "forward", passing)
