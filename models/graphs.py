"""The networks' passes captured as CUDA graphs: one launch where there were hundreds.

A pass of the target or the drafter is a function of tensors that writes nothing but its result and scratch
behind the committed cache, so it may be recorded and repeated. Nothing else is captured: the loop, the trees
and the rules do not know of graphs. A graph repeats its kernels on the memory it was recorded with, so inputs
are copied into buffers before a replay and the result is copied out after, for all graphs share scratch.
Everything happens in the order of one stream, on one CUDA device; nothing here waits but a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adt_tree.grid import Grid
from models.drafter import EagleDrafter
from models.target import ARTarget
from models.transformer import Decoder

ROWS = (1, 8, 16, 32, 64)  # shape buckets of a target pass: its rows; above, multiples of the last
CONTEXT = 256  # step of the bounds on committed codes
MOST = 256  # graphs of one target; what is first seen after that runs as it is
WARM_UPS = 1  # runs before a recording: libraries start, tables by shape are made


# Who captures: (run, how often to run it first to warm up) -> what runs it again on the buffers it was
# captured with, and what run() returned in it: memory that every replay writes anew. Being recorded, run()
# has no effect yet.
Recorder = Callable[[Callable[[], Tensor], int], tuple[Callable[[], None], Tensor]]


class CudaRecorder:
    """torch.cuda.graph as recorder. All graphs share one pool of scratch memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor], warm_ups: int) -> tuple[Callable[[], None], Tensor]:
        """Warm up on a side stream, then capture, as torch asks for."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm_ups):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Another thread may use the device meanwhile: that is none of this capture's concern.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return graph.replay, result


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recording with its buffers."""

    buffers: list[Tensor]
    replay: Callable[[], None]
    result: Tensor


class GraphRunner:
    """Runs functions of tensors through recordings, one a function, bound and set of input shapes."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._graphs: dict[Hashable, _Graph] = {}

    @property
    def captured(self) -> int:
        """Graphs held."""
        return len(self._graphs)

    def __call__(self, function: Callable[..., Tensor], most_committed: int, *inputs: Tensor) -> Tensor:
        """function(*inputs, most_committed), in memory of its own. What it reads beside its inputs must stay
        in its place."""
        key = (function, most_committed, *((x.shape, x.dtype) for x in inputs))
        graph = self._graphs.get(key)
        if graph is None:
            if self.captured == MOST:
                return function(*inputs, most_committed)
            buffers = [x.clone(memory_format=torch.contiguous_format) for x in inputs]
            graph = _Graph(buffers, *self._record(lambda: function(*buffers, most_committed), WARM_UPS))
            self._graphs[key] = graph
        for buffer, x in zip(graph.buffers, inputs, strict=True):
            buffer.copy_(x)
        graph.replay()
        return graph.result.clone()


class GraphTarget(ARTarget):
    """A target whose passes over trees are graphs, rows and bounds rounded up: one serves many steps."""

    def __init__(
        self,
        decoder: Decoder,
        grid: Grid,
        first_code: int,
        num_codes: int,
        slots: int,
        branches: int,
        max_prompt: int,
        max_nodes: int,
        record: Recorder,
    ) -> None:
        """As ARTarget. record: who captures."""
        rows = row_bucket(max_nodes)
        super().__init__(decoder, grid, first_code, num_codes, slots, branches, max_prompt, rows)
        self.graphs = GraphRunner(record)

    def features(self, codes: Tensor, depths: Tensor, ancestors: Tensor, most_committed: int) -> Tensor:
        """Features [G, B, N, D] by a graph over as many rows or more, the added ones read by nobody."""
        nodes = codes.shape[1]
        more = row_bucket(nodes) - nodes
        if more:
            codes, depths = F.pad(codes, (0, more)), F.pad(depths, (0, more))
            own = torch.eye(nodes + more, dtype=torch.bool, device=self.device)
            ancestors = F.pad(ancestors, (0, more, 0, more)) | own
        bound = context_bucket(most_committed, self.grid.size)
        return self.graphs(super().features, bound, codes, depths, ancestors)[:, :, :nodes]


class GraphDrafter(EagleDrafter):
    """A drafter beside a GraphTarget whose passes are graphs too, in the shapes they have."""

    target: GraphTarget

    def run(
        self, codes: Tensor, features: Tensor, depths: Tensor, ancestors: Tensor, most_committed: int
    ) -> Tensor:
        """The network's features [G, B, W, D] by a graph."""
        bound = context_bucket(most_committed, self.target.grid.size)
        return self.target.graphs(super().run, bound, codes, features, depths, ancestors)


def row_bucket(count: int) -> int:
    """Rows of a captured target pass over `count` nodes."""
    return next((rows for rows in ROWS if rows >= count), -(-count // ROWS[-1]) * ROWS[-1])


def context_bucket(committed: int, size: int) -> int:
    """The next multiple of CONTEXT, or the whole image of `size` tokens."""
    return min(-(-committed // CONTEXT) * CONTEXT, size)
