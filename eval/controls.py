"""What bounds a measurement: verdicts that accept nothing or all, and reading the weights once."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from adt_tree.noise import Noise
from adt_tree.tree import DraftTree
from adt_tree.verify import Coupled, Verdict, children, verdict_from_hits
from eval.session import synchronise
from models.model import Model
from models.tools.memory import count
from models.transformer import Block

CONTROLS = ("floor", "ceiling")
PROBE_BYTES = 2**28
PROBES = 5


class Control:
    """A rule that does not look at the law: floor accepts no draft, ceiling the first child of every node.

    What it draws is no image of the model; it says what the cycles cost and what perfect drafts would give.
    """

    def __init__(self, noise: Noise, accept: bool) -> None:
        self.noise, self.accept = noise, accept
        self._exact = Coupled(noise)

    def choose(self, log_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """See Rule."""
        return self._exact.choose(log_p, seeds, positions)

    def __call__(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, seeds: Tensor, positions: Tensor
    ) -> Verdict:
        """See Rule."""
        hit = torch.zeros_like(tree.valid)
        hit[:, 0] = True
        if self.accept and tree.width:
            child, exists = next(iter(children(tree)))
            hit |= torch.zeros_like(hit).scatter(1, child, exists)
            hit[:, 0] = True
        return verdict_from_hits(tree, hit, perturbed.argmax(dim=-1))


def roofline(model: Model) -> dict[str, float]:
    """Milliseconds to read the target's weights once at the measured copy bandwidth.

    No step can be faster unless the weights stay in a cache. Embedding and unused head rows are not read.
    """
    device = model.decoder.embed.weight.device
    config, per_value = model.decoder.config, model.decoder.embed.weight.element_size()
    values = config.num_layers * count(lambda: Block(config)) + model.num_codes * config.hidden_size
    weights = values * per_value
    source = torch.ones(PROBE_BYTES // 4, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(PROBES):
        synchronise(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        seconds.append(time.perf_counter() - started)
    bandwidth = 2 * PROBE_BYTES / min(seconds)  # read and written
    return {
        "weights_mb": round(weights / 1e6, 2),
        "copy_gb_per_s": round(bandwidth / 1e9, 2),
        "read_ms": round(1e3 * weights / bandwidth, 3),
    }
