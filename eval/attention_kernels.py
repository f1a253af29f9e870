"""Times and checks the attention kernels on a GPU, at the shapes of published models.

    python -m eval.attention_kernels

A time is microseconds per layer of a CUDA graph over LAYERS layers with caches of their own, so that keys
and values come from memory. An error is the root mean square difference from fp64, as a multiple of that of
the memory-efficient kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from eval.tables import table
from models.decoder.attention import Attend, cudnn, memory_efficient, sdpa
from models.decoder.cache import aligned

LAYERS, REPLAYS = 8, 20
# Rows (guidance branches), query heads, key/value heads, head size, slots of the middle of an image.
SHAPES = {
    "anole": (2, 32, 32, 128, 1089),
    "lumina_mgpt": (2, 32, 32, 128, 2145),
    "emu3": (2, 32, 8, 128, 5185),
}
NODES = (1, 32, 64)


def microseconds(run: Callable[[], object]) -> float:
    """Returns the time of run() as a CUDA graph, by layer."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / REPLAYS / LAYERS


def inputs(name: str, nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Returns queries [L, R, Hkv, M, E], keys and values [L, R, Hkv, C, E], a mask that is causal over the
    last slots, and the scale."""
    rows, heads, kv_heads, size, slots = SHAPES[name]
    make = {"device": "cuda", "dtype": torch.bfloat16}
    store = torch.randn(LAYERS, rows, 2, kv_heads, slots, size, **make)
    query = torch.randn(LAYERS, rows, kv_heads, heads // kv_heads * nodes, size, **make)
    mask = torch.zeros(rows, 1, nodes, aligned(slots), **make)
    mask[..., slots - nodes : slots] = torch.full((nodes, nodes), -math.inf, **make).triu(1)
    mask = mask.repeat(1, 1, heads // kv_heads, 1)[..., :slots]
    return query, *store.unbind(2), mask, size**-0.5


def line(name: str, nodes: int) -> dict[str, str]:
    """Returns the times and errors of both kernels at a shape, by heading."""
    query, key, value, mask, scale = inputs(name, nodes)
    exact = sdpa(query[0].double(), key[0].double(), value[0].double(), mask.double(), scale)

    def layer(kernel: Attend, number: int) -> Tensor:
        return kernel(query[number], key[number], value[number], mask, scale)

    def error(kernel: Attend) -> float:
        return float((layer(kernel, 0) - exact).square().mean().sqrt())

    cells = {"model": name, "nodes": str(nodes)}
    for kernel in (memory_efficient, cudnn):
        run = partial(map, partial(layer, kernel), range(LAYERS))
        cells[f"{kernel.__name__}, us"] = f"{microseconds(lambda run=run: list(run())):.1f}"
        cells[f"{kernel.__name__}, error"] = f"{error(kernel) / error(memory_efficient):.2f}"
    return cells


def main() -> None:
    """Prints a table with a line for every shape."""
    torch.manual_seed(0)
    lines = table(line(name, nodes) for name in SHAPES for nodes in NODES)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n{lines}")


if __name__ == "__main__":
    main()
