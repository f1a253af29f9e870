"""The launches, reads and memory of a step on a GPU, as a fake device counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

import adt_tree.tree
from adt_tree.method import METHODS
from models.graphs import GraphRunner
from models.registry import PUBLISHED
from models.target import ARTarget
from tests.fake_device import SOUND, TOLERANCE, Case, case_of, count, recorded, stored_cases
from tests.fake_gpu import GPU, FakeRecorder, fake_gpu


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


@contextmanager
def after_commit(act: Callable[[Any, Any], object]) -> Iterator[None]:
    """Calls a function with the target and the verdict after the commit of every step."""
    commit = ARTarget.commit

    def committing(target: Any, tree: Any, verdict: Any) -> None:
        commit(target, tree, verdict)
        act(target, verdict)

    with patch.object(ARTarget, "commit", committing):
        yield


def launching(times: int) -> AbstractContextManager[None]:
    """Adds launches to every step."""
    return after_commit(lambda target, verdict: [verdict.count + 1 for _ in range(times)])


@contextmanager
def grouped() -> Iterator[None]:
    """Asks SDPA to share keys among heads."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def sharing(*arguments: Any, **settings: Any) -> Any:
        return attend(*arguments, **settings, enable_gqa=True)

    with patch("torch.nn.functional.scaled_dot_product_attention", sharing):
        yield


@contextmanager
def holding(size: int) -> Iterator[None]:
    """Makes the target allocate `size` bytes more."""
    held = []

    def keep(target: Any, verdict: Any) -> None:
        held[:] = [torch.empty(size, dtype=torch.uint8, device=target.device)]

    with after_commit(keep):
        yield


def test_two_more_launches_are_no_problem() -> None:
    case = case_of(SOUND)
    with launching(TOLERANCE):
        assert count(case).problems(recorded()[case.name]) == []


# By the name of a fault: a function from the expected bytes to a context with the fault, and the words of the
# problem that it causes.
SPOILT: dict[str, tuple[Callable[[int], AbstractContextManager[Any]], str]] = {
    "item": (lambda _: after_commit(lambda target, verdict: verdict.count.max().item()), "reads [2, 2,"),
    "cpu": (lambda _: after_commit(lambda target, verdict: torch.zeros(3)), "zeros on cpu"),
    "pageable": (
        lambda _: after_commit(lambda target, verdict: torch.tensor([1], device=target.device)),
        "copy from pageable memory",
    ),
    "stride": (lambda _: patch("models.cache.aligned", lambda size: size), "mask strides at SDPA"),
    "gqa": (lambda _: grouped(), "grouped heads at SDPA"),
    "launches": (lambda _: launching(TOLERANCE + 1), "launches "),
    "bytes": (holding, "bytes "),
}


@pytest.mark.parametrize("name", SPOILT)
def test_every_fault_is_seen(name: str) -> None:
    case, (spoil, words) = case_of(SOUND), SPOILT[name]
    with spoil(count(case).expected):
        assert words in "; ".join(count(case).problems(recorded()[case.name]))


def test_tensors_of_two_devices_do_not_mix() -> None:
    with fake_gpu(), pytest.raises(RuntimeError, match="add: all tensors must be on the same device"):
        torch.zeros(3, device=GPU) + torch.zeros(3)


def test_the_counter() -> None:
    """Counts the launches of ten calls. The first call of a recorded function runs it between two copies. A
    replay copies its input, unless that is the result of another replay."""
    launches = []
    with fake_gpu() as (device, _):
        x, run = torch.zeros(2, 4, device=GPU), GraphRunner(FakeRecorder(device))

        def double(z: torch.Tensor) -> torch.Tensor:
            return (2 * z).sort().values.masked_fill(z > 0, 1).view(-1)

        for call in (
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
            before = device.total
            call()
            launches.append(device.total - before)
    assert launches == [1, 0, 3, 1, 1, 2, 1 + 7 + 1, 2, 2 + 2, 2 + 1]
