"""Tests that need a CUDA device; scripts/gpu_check.sh runs them."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adt_tree import METHODS, Pipeline, Sampling
from adt_tree.engine import Engine, build
from adt_tree.method import Method
from adt_tree.roles import Request
from adt_tree.tree import to_device
from models.decoder.attention import Attend, cudnn, memory_efficient, sdpa
from models.graphs import CudaRecorder, GraphRunner
from models.published import CKPTS
from tests.adt_tree import test_distribution as distribution
from tests.models.test_graphs import check_results, graphs_of
from tests.support.tabular import TabularModel, requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
PROMPTS = ["sun", "red heart", "pizza"]
MAX_IMAGES = 5  # of a warm-up
EXACT = [name for name, spec in METHODS.items() if spec.exact]  # the AR baseline's images


def opened(folder: Path, device: str, graphs: bool = False) -> Pipeline:
    """Returns a model in fp32."""
    pipe = Pipeline.from_pretrained(str(folder), device=device, precision="fp32")
    return Pipeline(replace(pipe.model, graphs=graphs))


@pytest.mark.parametrize(
    ("name", "prompts", "seed"), [("tiny", PROMPTS, 1), ("emoji", ["noto emoji of red heart"], 11)]
)
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_the_cpus(
    temperature: float, graphs: bool, name: str, prompts: list[str], seed: int, tiny_checkpoint: Path
) -> None:
    """The random model makes three images in two slots, the embedded one a single image."""
    folder = tiny_checkpoint if name == "tiny" else CKPTS / name
    options = {"sampling": Sampling(temperature=temperature, guidance=3.0), "seed": seed, "batch_size": 2}
    expected, pipe = opened(folder, "cpu")(prompts, "ar", **options), opened(folder, "cuda", graphs)
    for method in EXACT:
        assert pipe(prompts, method, **options).codes == expected.codes, method


def warm_up(engine: Engine, request: Request) -> None:
    """Generates images until one of them records no graph, at most MAX_IMAGES."""
    captured = -1
    for _ in range(MAX_IMAGES):
        list(engine.decode([request]))
        graphs = graphs_of(engine.target)
        before, captured = captured, graphs.captured if graphs else -1
        if captured == before:
            return


def waits(engine: Engine, request: Request) -> float:
    """Returns how often per step the host waits for the device, from the second target pass on."""
    forward, passes = engine.target.forward, 0

    def watched(*arguments: Any) -> Any:
        nonlocal passes
        if passes == 1:
            torch.cuda.set_sync_debug_mode("warn")
        passes += 1
        return forward(*arguments)

    engine.target.forward = watched
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            list(engine.decode([request]))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in seen) / (passes - 1)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_a_step_waits_once(name: str, graphs: bool, tiny_checkpoint: Path) -> None:
    pipe = opened(tiny_checkpoint, "cuda", graphs)
    (request,) = pipe.requests(["sun"], 0)
    engine = pipe.engine(pipe.method(name), [request])
    warm_up(engine, request)
    assert waits(engine, request) <= 1


def test_captured_results_are_the_callers() -> None:
    check_results(GraphRunner(CudaRecorder(torch.device("cuda"))), torch.device("cuda"))


@pytest.mark.parametrize("kernel", [memory_efficient, cudnn])
def test_attention(kernel: Attend) -> None:
    """Both kernels are as near to fp64 as 16 bits allow, with slots that no node may read; a mask that is not
    applied is not near."""
    query, key, value = (torch.randn(4, 2, n, 64, device="cuda", dtype=torch.bfloat16) for n in (6, 40, 40))
    mask = torch.zeros(4, 1, 6, 40, device="cuda", dtype=torch.bfloat16)
    mask[..., 30:] = float("-inf")
    exact = sdpa(query.double(), key.double(), value.double(), mask.double(), 0.125)
    assert (kernel(query, key, value, mask, 0.125) - exact).abs().max() < 0.02
    assert (kernel(query, key, value, torch.zeros_like(mask), 0.125) - exact).abs().max() > 0.1


def test_to_device() -> None:
    moved = [to_device([n, n + 1], torch.device("cuda")) for n in range(50)]
    assert [x.tolist() for x in moved] == [[n, n + 1] for n in range(50)]


def distance(method: Method, sampling: Sampling) -> float:
    """Returns how far images made on the GPU are from the distribution of a sampling, in standard scores."""
    tables = (distribution.LOGITS.cuda(), distribution.DRAFTS.cuda())
    model = TabularModel(*tables, distribution.GRIDS["row"])
    images = build(model, method, distribution.SLOTS, 0).decode(requests(distribution.IMAGES))
    return distribution.score(images, sampling)


CASES = [Method("ar", distribution.GUIDED)]
CASES += distribution.methods(distribution.SELF_DRAFTED, distribution.GUIDED)
CASES += distribution.methods(distribution.DYNAMIC + distribution.STATIC, distribution.GUIDED)
CASES += distribution.REJECTION


@pytest.mark.parametrize("method", CASES, ids=str)
def test_distribution(method: Method) -> None:
    """Repeats a check of tests/adt_tree/test_distribution.py on the GPU."""
    assert distance(method, method.sampling) < distribution.LIMIT


def test_control_other_distribution() -> None:
    assert distance(CASES[0], Sampling(guidance=1.7)) > distribution.LIMIT
