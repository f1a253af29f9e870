"""Self-drafting: the target's own stale choices as draft trees (coupled Jacobi trees); no drafter network.

With position-keyed noise the choice at a position is a deterministic function of its prefix, so what the
target chose behind a rejected node is a good draft for the next cycle: its prefix has changed at one place,
and for images that decays within a few cells. Sources: SJD 2410.01699, SCD 2510.24211 (the coupling),
SJD-PAC 2603.18599 (trees). Only the coupled rule may verify such trees; it is exact whatever they hold.

Dimensions: B images, L chain levels, K candidates a position, N nodes, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adt_tree.grid import Grid
from adt_tree.policy import TreeShape
from adt_tree.roles import Prefix
from adt_tree.tree import DraftTree, lone_roots, select
from adt_tree.verify import Verdict

SEED_CELLS = ("above", "left", "both")
SEED_CONFIDENCE = -1.0  # log-probability given to a code copied from a neighbouring cell
KEPT = 1e6  # a score no confidence reaches: the main chain stays whatever the budget leaves out
CONTINUED = 6  # levels an alternative is continued along the main chain's candidates


class JacobiProposer:
    """Keeps, for every position ahead, the K best codes and confidences of the latest law seen there.

    A shape's depth is the length of the main chain, its width the candidates a position, its budget all
    drafted nodes. State: K codes and confidences a position, nothing of the vocabulary's size.
    """

    def __init__(
        self, grid: Grid, slots: int, candidates: int, seed_cells: str, device: torch.device
    ) -> None:
        """candidates: K, the largest width; seed_cells: what a position not seen yet is copied from."""
        if seed_cells not in SEED_CELLS:
            raise ValueError(f"seed_cells {seed_cells!r}: choose one of {', '.join(SEED_CELLS)}")
        self.grid, self.seed_cells = grid, seed_cells
        size = grid.size + 1  # the last column takes what falls outside an image
        self._codes = torch.zeros(slots, size, dtype=torch.int64, device=device)
        self._stale = torch.zeros(slots, size, candidates, dtype=torch.int64, device=device)
        self._confidence = torch.full((slots, size, candidates), float("-inf"), device=device)
        self._position = torch.ones(slots, dtype=torch.int64, device=device)

    def calls(self, shape: TreeShape) -> int:
        """No drafter passes."""
        return 0

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        """See Proposer."""
        self._confidence[slot] = float("-inf")
        self._codes[slot, 0] = code
        self._position[slot] = 1

    def release(self, slot: int) -> None:
        """See Proposer."""
        self._position[slot] = 1

    def propose(self, shapes: Sequence[TreeShape], roots: Tensor, gumbel: Tensor, reach: int) -> DraftTree:
        """See Proposer."""
        length, width = max(s.depth for s in shapes), max(s.width for s in shapes)
        if min(length, width) == 0:
            return lone_roots(roots)
        limits = torch.tensor([(s.depth, s.width, s.budget) for s in shapes], device=roots.device)
        depth, widths, budget = limits.unbind(1)
        codes, confidence = self._candidates(length, width)
        level = torch.arange(length, device=roots.device)
        confidence = confidence.masked_fill((level >= depth[:, None])[..., None], float("-inf"))
        rank = torch.arange(width, device=roots.device)
        confidence = confidence.masked_fill((rank >= widths[:, None])[:, None], float("-inf"))
        pool = _pool(codes, confidence)
        return select(*pool, budget, roots, (max(s.budget for s in shapes), length, width))

    def observe(
        self, tree: DraftTree, log_p: Tensor, gumbel: Tensor, features: Tensor, verdict: Verdict
    ) -> None:
        """See Proposer: keep the best codes of the law at one node a level; write down what was committed."""
        images, nodes = tree.codes.shape
        levels = tree.depth + 1
        number = torch.arange(nodes, device=tree.codes.device)
        end = verdict.path.gather(1, verdict.count[:, None] - 1)
        below = tree.ancestors.gather(2, end[..., None].expand(-1, nodes, -1))[..., 0]
        # Below the accepted path first: that prefix is right. Else the main chain: its node n lies at depth
        # n.
        key = torch.where(below, number, torch.where(tree.depths == number, nodes + number, 2 * nodes))
        key = key.masked_fill(~tree.valid, 2 * nodes)
        best = torch.full((images, levels), 2 * nodes, device=key.device).scatter_reduce(
            1, tree.depths, key, "amin"
        )
        law = log_p.gather(1, (best % nodes)[..., None].expand(-1, -1, log_p.shape[-1])) + gumbel[:, :levels]
        value, code = law.log_softmax(dim=-1).topk(self._stale.shape[-1], dim=-1)
        column = torch.arange(levels, device=key.device)
        at = (self._position[:, None] + column).clamp(max=self.grid.size)
        kept = at.masked_fill(best == 2 * nodes, self.grid.size)[..., None].expand_as(code)
        self._stale.scatter_(1, kept, code)
        self._confidence.scatter_(1, kept, value)
        done = at.masked_fill(column >= verdict.count[:, None], self.grid.size)
        self._codes.scatter_(1, done, verdict.codes)
        self._position += verdict.count

    def _candidates(self, length: int, width: int) -> tuple[Tensor, Tensor]:
        """Codes and confidences [B, L, K] of the next positions; those never scored copy a neighbour."""
        column = torch.arange(length, device=self._codes.device)
        at = (self._position[:, None] + column).clamp(max=self.grid.size)
        index = at[..., None].expand(-1, -1, width)
        codes, confidence = self._stale.gather(1, index), self._confidence.gather(1, index)
        known = confidence[..., 0].isfinite()
        self._codes.scatter_(1, at, codes[..., 0])  # candidates stand in for codes that do not exist yet
        left = self._last_known(at, codes[..., 0], known)
        for start in range(
            0, length, self.grid.width
        ):  # a row at a time: the copied row may itself be copied
            part = slice(start, start + self.grid.width)
            cells, fresh = at[:, part], ~known[:, part]
            row_above = self._codes.gather(1, (cells - self.grid.width).clamp(min=0))
            above = torch.where(cells >= self.grid.width, row_above, left[:, part])
            first, second = (left[:, part], above) if self.seed_cells == "left" else (above, left[:, part])
            codes[:, part, 0] = torch.where(fresh, first, codes[:, part, 0])
            confidence[:, part, 0] = torch.where(fresh, SEED_CONFIDENCE, confidence[:, part, 0])
            if self.seed_cells == "both" and width > 1:
                fresh = fresh & (first != second)
                codes[:, part, 1] = torch.where(fresh, second, codes[:, part, 1])
                confidence[:, part, 1] = torch.where(fresh, 2 * SEED_CONFIDENCE, confidence[:, part, 1])
            self._codes.scatter_(1, cells, codes[:, part, 0])
        return codes, confidence

    def _last_known(self, at: Tensor, codes: Tensor, known: Tensor) -> Tensor:
        """[B, L]: the nearest candidate before each position that was ever scored, else the root."""
        root = self._codes.gather(1, (at[:, :1] - 1).clamp(min=0))
        column = torch.arange(1, at.shape[1] + 1, device=at.device)
        latest = torch.where(known, column, 0).cummax(dim=1).values.roll(1, dims=1)
        latest[:, 0] = 0
        return torch.cat((root, codes), dim=1).gather(1, latest)


def _pool(codes: Tensor, confidence: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The main chain, then every alternative with its continuations, as select() takes them: codes, scores
    and parents [B, P], depths [P].

    codes, confidence [B, L, K]. An alternative at level l follows the chain's first l - 1 codes and goes on
    with the chain's later ones; its score is the sum of confidences on its path.
    """
    images, length, width = codes.shape
    device = codes.device
    level = torch.arange(length, device=device)
    main, sure = codes[..., 0], confidence[..., 0]
    blocks = [
        (main, (KEPT - level).masked_fill(~sure.isfinite(), float("-inf")), (level - 1).expand(images, -1))
    ]
    depths = [level + 1]
    before = torch.cat((torch.zeros_like(sure[:, :1]), sure[:, :-1]), dim=1).cumsum(dim=1)
    code = codes[..., 1:].flatten(1)
    score = (confidence[..., 1:] + before[..., None]).flatten(1)
    parent = (level - 1).repeat_interleave(width - 1).expand(images, -1)
    below = level.repeat_interleave(width - 1)
    offset = length
    for further in range(1 + min(CONTINUED, length - 1) if width > 1 else 0):
        if further:
            parent = offset - below.numel() + torch.arange(below.numel(), device=device).expand(images, -1)
            inside = below + further < length
            along = (below + further).clamp(max=length - 1).expand(images, -1)
            code = main.gather(1, along)
            score = (score + sure.gather(1, along)).masked_fill(~inside, float("-inf"))
        blocks.append((code, score, parent))
        depths.append(below + further + 1)
        offset += below.numel()
    pooled = [torch.cat(column, dim=1) for column in zip(*blocks, strict=True)]
    return pooled[0], pooled[1], pooled[2], torch.cat(depths)
