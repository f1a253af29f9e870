"""What an image leaves for replay: the target's laws and features along its codes, and what was drafted.

Dimensions: G guidance branches, B images in flight, A path slots, N nodes, I inner nodes of a static tree,
T prompt tokens, n codes an image, E laws ahead, K candidates, C cycles, V codes, D features.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor

from adt_tree.passes import DIRECT
from adt_tree.policy import TreeShape
from adt_tree.roles import Below, Prefix, Proposer
from adt_tree.sampling import Sampling, log_probs
from adt_tree.stale import best_codes, order_of_laws
from adt_tree.tree import DraftTree, rows_at
from adt_tree.verify import Verdict

CANDIDATES = 16  # codes kept of every law ahead: the widest self-drafted tree that can be replayed


@dataclass(frozen=True, slots=True)
class _Cycle:
    """One cycle of one image, still padded to the batch's tree; count says how much of a path is meant."""

    count: Tensor  # []
    codes: Tensor  # [A]
    log_p: Tensor  # [A, V]
    features: Tensor  # [G, A, D]
    ahead: tuple[Tensor, Tensor, Tensor, Tensor]  # of every node's law, the best law of a position last:
    # codes, log-confidences [N, K], the node's depth (-1: padding) and the code it stands below [N]
    tree: tuple[Tensor, Tensor, Tensor, Tensor] | None  # codes, valid [N] and log p, q [I, V]


@dataclass(slots=True)
class _Trace:
    """One image on its way."""

    prompt: Any
    first: Tensor  # [V] the law of the first code
    prompt_features: Sequence[Tensor]
    code: Tensor  # []
    cycles: list[_Cycle] = field(default_factory=list)

    def tensors(self) -> dict[str, Tensor]:
        """What is stored; see DumpedImage in eval/dumped.py."""
        counts = torch.stack([cycle.count for cycle in self.cycles]).tolist()
        taken = list(zip(self.cycles, counts, strict=True))
        found = {
            "codes": torch.cat([self.code[None], *(cycle.codes[:count] for cycle, count in taken)]),
            "log_p": torch.cat([self.first[None], *(cycle.log_p[:count] for cycle, count in taken)]),
            "features": torch.cat([cycle.features[:, :count] for cycle, count in taken], dim=1),
            "conditional": torch.tensor(self.prompt.tokens(0)),
            "unconditional": torch.tensor(self.prompt.tokens(1)),
        }
        found |= {f"prompt_features_{g}": branch for g, branch in enumerate(self.prompt_features)}
        found |= self._ahead(torch.tensor(counts))
        if self.cycles[0].tree is not None:
            found |= self._trees() | {"tree_accepted": torch.tensor(counts) - 1}
        return {name: tensor.contiguous().cpu() for name, tensor in found.items()}

    def _ahead(self, counts: Tensor) -> dict[str, Tensor]:
        """One entry a cycle and node, in the order of the cycles."""
        ends = 1 + counts.cumsum(0)  # the first open position after every cycle
        laws = [tuple(part[cycle.ahead[2] >= 0] for part in cycle.ahead) for cycle in self.cycles]
        sizes = torch.tensor([len(depth) for _, _, depth, _ in laws])
        codes, confidence, depth, above = (torch.cat(parts) for parts in zip(*laws, strict=True))
        return {
            "ahead_known": (ends - 1).repeat_interleave(sizes),
            "ahead_position": (ends - counts).repeat_interleave(sizes) + depth.cpu(),
            "ahead_above": above.int(),
            "ahead_codes": codes.int(),
            "ahead_confidence": confidence,
        }

    def _trees(self) -> dict[str, Tensor]:
        """The cycles' static trees; the last ones, which are cut, padded with invalid nodes."""
        names = ("tree_codes", "tree_valid", "tree_log_p", "tree_q")
        stacked = {}
        for name, parts in zip(names, zip(*(cycle.tree for cycle in self.cycles), strict=True), strict=True):
            most = max(len(part) for part in parts)
            padded = [F.pad(part, (0, 0) * (part.dim() - 1) + (0, most - len(part))) for part in parts]
            stacked[name] = torch.stack(padded)
        return stacked


class Recorder:
    """A proposer (see Proposer) that drafts as the one it wraps, and notes what passes.

    An image's tensors are complete when the loop releases its slot, which it does right before it hands out
    the image: `finished` then holds them. inner: the nodes of a static tree that have children, whose laws p
    and q are kept as well; None: trees are not kept.
    """

    passes = DIRECT  # what notes a cycle has to run in it

    def __init__(self, proposer: Proposer, sampling: Sampling, inner: Sequence[int] | None) -> None:
        self.proposer, self.sampling, self.inner = proposer, sampling, inner
        self.finished: dict[str, Tensor] = {}
        self._traces: dict[int, _Trace] = {}

    def calls(self, shape: TreeShape) -> int:
        """See Proposer."""
        return self.proposer.calls(shape)

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        """See Proposer."""
        first = log_probs(prefix.logits, self.sampling)
        self._traces[slot] = _Trace(prompt, first, prefix.features, code.clone())
        self.proposer.prefill(slot, prompt, prefix, code)

    def release(self, slot: int) -> None:
        """See Proposer."""
        trace = self._traces.pop(slot, None)
        if trace is not None and trace.cycles:
            self.finished = trace.tensors()
        self.proposer.release(slot)

    def propose(
        self, shapes: Sequence[TreeShape], roots: Tensor, below: Below, committed: Sequence[int]
    ) -> DraftTree:
        """See Proposer."""
        return self.proposer.propose(shapes, roots, below, committed)

    def observe(
        self, tree: DraftTree, log_p: Tensor, noisy: Tensor, features: Tensor, verdict: Verdict
    ) -> None:
        """See Proposer."""
        path = verdict.path[..., None]
        laws = rows_at(log_p, verdict.path)
        index = path[None].expand(features.shape[0], -1, -1, features.shape[-1])
        along = features.gather(2, index)
        ahead = self._ahead(tree, noisy, verdict)
        for slot, trace in self._traces.items():
            seen = tuple(part[slot] for part in ahead)
            drafted = None if self.inner is None else self._tree(tree, log_p, slot)
            count, codes = verdict.count[slot], verdict.codes[slot]
            trace.cycles.append(_Cycle(count, codes, laws[slot], along[:, slot], seen, drafted))
        self.proposer.observe(tree, log_p, noisy, features, verdict)

    def _ahead(self, tree: DraftTree, noisy: Tensor, verdict: Verdict) -> tuple[Tensor, ...]:
        """_Cycle.ahead of all images."""
        codes, value = best_codes(noisy, min(CANDIDATES, noisy.shape[-1]))
        depth = tree.depths.masked_fill(~tree.valid, -1)
        last = order_of_laws(tree, verdict).argsort(dim=1, descending=True)
        whole = last[..., None].expand_as(codes)
        return (
            codes.gather(1, whole),
            value.gather(1, whole),
            depth.gather(1, last),
            tree.codes.gather(1, last),
        )

    def _tree(self, tree: DraftTree, log_p: Tensor, slot: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inner = [node for node in self.inner if node < tree.nodes]
        return tree.codes[slot], tree.valid[slot], log_p[slot, inner], tree.q[slot, inner]


def dump_bytes(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> bytes:
    """An image's dump as a file. facts: the image's name, seed and number; stored as JSON values."""
    return save(dict(tensors), {name: json.dumps(value) for name, value in facts.items()})
