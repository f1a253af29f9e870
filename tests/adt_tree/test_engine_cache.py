"""Engines are built once, are never shared by two runs, and make room for one another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import pytest

from adt_tree import Method, Pipeline, Sampling, TreeShape, engine_cache
from adt_tree.errors import NoRoom, UserError
from adt_tree.grid import Grid
from tests.support.tape import Machine

METHOD = Method("self-draft", Sampling(), TreeShape(6, 3, 12))
LONG = "a very long text, which has many more tokens than the others have"


class Builds:
    """The engines that were built."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.targets, self.fits = 0, WeakSet[Any](), 100
        build = engine_cache.build

        def counted(*given: Any) -> Any:
            if len(self.targets) >= self.fits:
                raise NoRoom("no room")
            self.count, engine = self.count + 1, build(*given)
            self.targets.add(engine.target)
            return engine

        monkeypatch.setattr(engine_cache, "build", counted)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Builds:
    return Builds(monkeypatch)


@pytest.fixture
def fresh(pipe: Pipeline) -> Pipeline:
    """Returns a pipeline without engines."""
    return Pipeline(pipe.model)


def test_a_second_call_builds_nothing(fresh: Pipeline, builds: Builds) -> None:
    """It makes no difference that a prompt is a little longer, or that a stream ended early."""
    expected = fresh("sun", METHOD, seed=3).codes
    stream = fresh.stream("red moon", METHOD)
    next(stream)
    stream.close()
    assert fresh("red moon", METHOD).codes != expected == fresh("sun", METHOD, seed=3).codes
    assert builds.count == 1
    others = [{"batch_size": 2}, {"method": fresh.method("ar")}, {"prompts": [LONG] * 2}]
    for number, other in enumerate(others, start=2):
        fresh(**{"prompts": ["sun"] * 2, "method": METHOD, **other})
        assert builds.count == number, other


def test_another_grid_has_another_engine(fresh: Pipeline, builds: Builds) -> None:
    grid = Grid(2, 3)
    with fresh.engines.lease(METHOD, 1, 8) as engine:
        assert engine.target.grid == fresh.model.grid
    for _ in range(2):
        with fresh.engines.lease(METHOD, 1, 8, grid) as engine:
            assert engine.target.grid == grid
    assert builds.count == 2


def test_a_second_call_records_nothing(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr("models.model.CudaRecorder", lambda device: machine)
    graphs = Pipeline(replace(pipe.model, graphs=True))
    codes = graphs("sun", METHOD, seed=3).codes
    recorded = machine.recordings
    assert recorded > 1 and codes == pipe("sun", METHOD, seed=3).codes
    assert graphs("red moon", METHOD, seed=5).codes == pipe("red moon", METHOD, seed=5).codes
    assert graphs("sun", METHOD, seed=3).codes == codes and machine.recordings == recorded


def test_two_live_streams_do_not_share_an_engine(fresh: Pipeline, builds: Builds) -> None:
    expected = fresh(["sun", "red moon"], METHOD, seed=3).codes
    assert builds.count == 1
    streams = [fresh.stream(text, METHOD, seed=seed) for text, seed in (("sun", 3), ("red moon", 4))]
    codes: list[list[int]] = [[], []]
    for steps in zip(*streams, strict=False):
        for number, step in enumerate(steps):
            codes[number] += step.codes
    assert builds.count == 2
    for made, whole in zip(codes, expected, strict=True):
        assert len(made) > 4 and made == whole[1 : 1 + len(made)]


def test_threads_decode_side_by_side(fresh: Pipeline, pipe: Pipeline) -> None:
    texts = ["sun", "red moon", LONG, "sea"] * 2
    expected = [pipe(text, METHOD, seed=seed).codes for seed, text in enumerate(texts)]
    with ThreadPoolExecutor(3) as pool:
        made = pool.map(lambda pair: fresh(pair[1], METHOD, seed=pair[0]).codes, enumerate(texts))
        assert list(made) == expected


def test_an_engine_that_failed_is_dropped(fresh: Pipeline, builds: Builds) -> None:
    with pytest.raises(RuntimeError), fresh.engines.lease(METHOD, 1, 8):
        raise RuntimeError
    fresh("sun", METHOD)
    assert builds.count == 2


def test_few_engines_are_kept(pipe: Pipeline, builds: Builds) -> None:
    few, methods = (
        Pipeline(pipe.model, max_engines=2),
        [replace(METHOD, sampling=Sampling(t)) for t in (1, 2, 3)],
    )
    for method in (*methods, methods[2], methods[1]):
        few("sun", method)
    assert builds.count == 3
    few("sun", methods[0])
    assert builds.count == 4
    few.engines.clear()
    assert not builds.targets
    with pytest.raises(UserError, match="max_engines 0"):
        Pipeline(pipe.model, max_engines=0)


def test_idle_engines_make_room(fresh: Pipeline, builds: Builds) -> None:
    """An engine for which there is no room is built again without the idle ones. Those in use stay."""
    builds.fits = 1
    for method in (METHOD, fresh.method("ar"), METHOD):
        fresh("sun", method)
        assert len(builds.targets) == 1
    assert builds.count == 3
    with fresh.engines.lease(METHOD, 1, 8), pytest.raises(UserError, match="no room"):
        fresh("sun", "ar")


def test_a_prompt_that_just_fits_is_not_refused(fresh: Pipeline, builds: Builds) -> None:
    """The room for prompts is rounded up only if the model has so many positions."""
    config = fresh.model.decoder.config
    prompt = config.max_positions - fresh.model.grid.size - 1
    assert prompt % engine_cache.PROMPT_STEP, "rounding was not tested"
    for _ in range(2):
        with fresh.engines.lease(fresh.method("ar"), 1, prompt) as engine:
            assert engine.target.max_prompt == prompt
    assert builds.count == 1
    with pytest.raises(UserError, match="positions"):
        fresh.engines.take(fresh.method("ar"), 1, prompt + 1)
