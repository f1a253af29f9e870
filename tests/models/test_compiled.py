"""Compiled layers and levels of drafting, as on CUDA: the codes stay the same, kernels are few, and each
layout is compiled once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code

from adt_tree.engine import Engine, build
from adt_tree.method import Method
from adt_tree.policy import TreeShape
from adt_tree.proposers.eagle import expand_level
from adt_tree.roles import run_directly
from adt_tree.settings import Sampling
from eval.profile import compile_seconds
from models.decoder.transformer import compiled, join
from tests.adt_tree import test_engine
from tests.support.decoding import codes_of

SLOTS = 2
KERNELS = 8  # most kernels of a layer, without its attention and the write to the cache, which are one each
LEVEL_KERNELS = 18  # most kernels of a level of drafting, with its attention, and with sorting, which is one
# The only kernels that the compiler does not generate.
PRODUCTS = {"extern_kernels.mm", "extern_kernels.addmm"}
KERNEL = re.compile(r"(cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(")


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers are not packed, and nothing is recorded."""
    monkeypatch.setattr("models.decoder.packed.packable", lambda weight: False)
    monkeypatch.setattr("models.model.CudaRecorder", lambda device: None)
    monkeypatch.setattr("models.model.GraphRunner", lambda recorder: run_directly)
    networks = (test_engine.decoder, test_engine.net)
    for network in networks:  # other tests have packed their layers
        network.cache_clear()
    yield
    for network in networks:
        network.cache_clear()


def sources_of(run: Callable[[], None]) -> list[str]:
    """Returns the code that the compiler generates while run() runs."""
    counters.clear()
    compiled.cache_clear()
    with inductor.patch(compile_threads=1):  # a pool of compilers takes longer to start
        return run_and_get_code(run)[1]


def kernels_of(source: str) -> list[str]:
    """Returns the names of the kernels that generated code calls, in their order."""
    return KERNEL.findall(source[source.index("def call(") :])


def new_engine(method: Method, compiled: bool) -> Engine:
    """Returns the engine of a method over the random networks of test_engine. Passes are padded to buckets of
    rows, as under graphs."""
    model = replace(test_engine.random_model(graphs=True), compiled=compiled)
    return build(model, method, SLOTS, test_engine.MAX_PROMPT)


@pytest.mark.timeout(300)
def test_whole_images() -> None:
    methods = [Method("ar", Sampling()), Method("self-draft", Sampling(), TreeShape(6, 3, 7))]
    rows, codes = set(), []

    def counted(*args: Any) -> tuple[Tensor, ...]:
        rows.add(len(args[2]))
        return compiled(join)(*args)

    def decode() -> None:
        for method in methods:
            engine = new_engine(method, compiled=True)
            assert engine.target.join is compiled(join)
            engine.target.join = counted
            codes.append(codes_of(engine.decode(test_engine.IMAGES)))

    sources = sources_of(decode)
    for method, compiled_codes in zip(methods, codes, strict=True):
        assert compiled_codes == codes_of(new_engine(method, compiled=False).decode(test_engine.IMAGES))
    assert compile_seconds() > 0
    assert rows == {2 * SLOTS, 2 * SLOTS * 8}, "guidance doubles rows; trees of 8 nodes are a bucket"
    assert counters["stats"]["unique_graphs"] == len(sources) == len(rows) and not counters["graph_break"]
    for source in sources:
        kernels = kernels_of(source)
        called = {kernel for kernel in kernels if not kernel.startswith("cpp_fused")}
        assert called <= PRODUCTS and len(kernels) <= KERNELS, kernels


@pytest.mark.timeout(300)
def test_a_level_of_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """One function serves all levels of all trees, shallow ones at the end of an image too."""
    monkeypatch.setattr("models.model.compiled", lambda f: compiled(f) if f is expand_level else f)
    method = Method("adt-tree", test_engine.GREEDY, test_engine.ADAPT)
    codes: list[dict[str, list[int]]] = []

    def decode() -> None:
        codes.append(codes_of(new_engine(method, compiled=True).decode(test_engine.IMAGES)))

    (source,) = sources_of(decode)
    assert codes == [codes_of(new_engine(method, compiled=False).decode(test_engine.IMAGES))]
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert len(kernels_of(source)) <= LEVEL_KERNELS, kernels_of(source)
