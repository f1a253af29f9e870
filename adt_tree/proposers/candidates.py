"""The history of the target's earlier distributions, and the chains that are drafted from it.

A target pass scores many positions ahead, most of them below drafts that are then rejected. Their
distributions still predict the image: the code at a position depends on the code before it, and little on
the earlier ones. So the history stores, for every position, the best codes of the last distributions that the
target computed there, each with the code before it. It stores K codes per distribution, never all V.

Dimensions: B images, P positions of an image, N nodes of a pass, H entries per position, L levels, K
candidates per entry, V codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adt_tree.tree import BatchShapes, DraftTree, leafy_chain_mask
from adt_tree.verify import Verdict, accepted_nodes

CHAIN_SCORE = 1e6  # above every confidence, so that the nodes of the main chain come first
HISTORY = 8  # H: about as many passes score a position before it is committed
EMPTY = -1  # value of `stamp` and `before` in an empty entry
SAME_CODE = 2**40  # greater than every stamp of a run; Entries.below() adds it to stamps that must win
# Factors by which the weight of an entry grows (docs/LOG.md): BELOW if it was scored below the code that now
# precedes the position, LATE if the newest pass over the position wrote it, NEWEST if it is the newest entry.
BELOW, LATE, NEWEST = 10.0, 2.0, 2.0


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidate codes of the next L positions, best first."""

    codes: Tensor  # [B, L, K] int64
    confidence: Tensor  # [B, L, K] log-confidence, -inf where there is no candidate


class History:
    """The last HISTORY distributions of every position.

    An entry holds K codes with their log-confidences, the code below which it was scored, and a stamp that
    grows from pass to pass. A row of the tensors is one position of one image. Every image has an extra row,
    P, into which entries to be dropped are written, so that writing needs no branch. Its stamps stay EMPTY,
    so that it reads as a row without entries.
    """

    def __init__(self, positions: int, slots: int, candidates: int, device: torch.device) -> None:
        """positions: P; candidates: K."""
        self._dropped, self.candidates = positions, candidates
        rows = slots * (positions + 1)  # one image after another
        self._starts = torch.arange(0, rows, positions + 1, device=device)[:, None]
        self._before = torch.full((rows, HISTORY), EMPTY, device=device)
        self._stamp = torch.full((rows, HISTORY), EMPTY, device=device)
        self._codes = torch.zeros(rows, HISTORY, candidates, dtype=torch.int64, device=device)
        self._confidence = torch.zeros(rows, HISTORY, candidates, dtype=torch.float32, device=device)
        self._next = torch.zeros(rows, dtype=torch.int64, device=device)
        self._passes = torch.zeros((), dtype=torch.int64, device=device)

    def clear(self, slot: int) -> None:
        """Removes all entries of a slot's image."""
        rows = slice(slot * (self._dropped + 1), (slot + 1) * (self._dropped + 1))
        self._before[rows] = self._stamp[rows] = EMPTY

    def write(self, at: Tensor, before: Tensor, codes: Tensor, confidence: Tensor, order: Tensor) -> None:
        """Stores the distributions of a pass: codes and log-confidences [B, N, K] for positions `at` [B, N].

        A node whose position is P is dropped. before [B, N]: the code below which each node was scored. order
        [B, N], all different: among the nodes at one position, the lowest order counts as the newest, and
        only the HISTORY nodes of lowest order are stored.
        """
        same = at.unsqueeze(2) == at.unsqueeze(1)
        rank = (same & (order.unsqueeze(1) < order.unsqueeze(2))).sum(dim=2)
        last_rank = same.sum(dim=2).clamp(max=HISTORY) - 1
        dropped = rank >= HISTORY
        row = self._starts + at.masked_fill(dropped, self._dropped)
        place = self._ring_slot(row, last_rank - rank).flatten()
        self._passes += 1
        stamp = (self._passes * HISTORY - 1 - rank).masked_fill(dropped | (at == self._dropped), EMPTY)
        self._stamp.view(-1).index_copy_(0, place, stamp.flatten())
        self._before.view(-1).index_copy_(0, place, before.flatten())
        self._codes.flatten(0, 1).index_copy_(0, place, codes.flatten(0, 1))
        self._confidence.flatten(0, 1).index_copy_(0, place, confidence.flatten(0, 1))
        self._next.index_add_(0, row.flatten(), torch.ones_like(place))

    def _ring_slot(self, row: Tensor, offset: Tensor) -> Tensor:
        """Returns the index of the entry `offset` after the oldest one of a row, in a flat view of all rows.

        The entries of a row are a ring: _next is the oldest one, which is overwritten next. A pass writes its
        best node (rank 0) last, so that it is overwritten last. Example with HISTORY = 4 and _next = 3:

            slot       0       1       2       3
            receives   rank 1  rank 0  --      rank 2      ranks 2, 1, 0 have offsets 0, 1, 2; then _next = 2
        """
        return row * HISTORY + (self._next[row] + offset) % HISTORY

    def entries(self, at: Tensor) -> Entries:
        """Returns the stored entries for positions `at` [B, L]."""
        rows = (self._starts + at).flatten()
        tables = (self._before, self._stamp, self._codes, self._confidence)
        return Entries(*(table.index_select(0, rows).unflatten(0, at.shape) for table in tables))


@dataclass(frozen=True, slots=True)
class Entries:
    """The earlier distributions of some positions."""

    before: Tensor  # [B, L, H] the code below which each was scored
    stamp: Tensor  # [B, L, H] greater for newer entries; EMPTY for empty ones
    codes: Tensor  # [B, L, H, K]
    confidence: Tensor  # [B, L, H, K]

    def newest(self) -> Tensor:
        """Returns the best code [B, L] of each position's newest entry."""
        return self._best(self.stamp)

    def below(self, code: Tensor) -> Tensor:
        """Returns the best code [B, L] of the newest entry that was scored below `code` [B, L], or, where
        there is none, of the newest entry of all."""
        return self._best(self.stamp + SAME_CODE * (self.before == code[..., None]))

    def mixture(self, code: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Returns the best `width` of the stored codes and their log-confidences, both [B, L, width].

        They are the best of a weighted mixture of all entries, in which entries that were scored below `code`
        [B, L], and newer entries, weigh more. Where the entries hold fewer than `width` codes, the confidence
        of the rest is -inf, and their codes are arbitrary.
        """
        latest = self.stamp.amax(dim=2, keepdim=True)
        weight = (self.stamp >= 0).float()
        for factor, entries in (
            (BELOW, self.before == code[..., None]),
            (LATE, self.stamp > latest - HISTORY),  # stamps of one pass differ by less than HISTORY
            (NEWEST, self.stamp == latest),
        ):
            # The weights of these entries times the factor; so written, it is one operation fewer.
            weight = torch.add(weight, weight * entries, alpha=factor - 1)
        share = weight / weight.sum(dim=2, keepdim=True).clamp(min=1.0)
        parts = share[..., None] * self.confidence.exp()
        # The different codes of a position are numbered from 0, in ascending order.
        codes, order = self.codes.flatten(2).sort(dim=2)
        number = F.pad(codes.diff(dim=2) != 0, (1, 0)).cumsum(dim=2)
        numbers = torch.empty_like(order).scatter_(2, order, number).view_as(self.codes)
        mass = parts.new_zeros(number.shape)
        # On CUDA a single call would add the entries of a code in any order, so that drafts would differ from
        # run to run. The codes of one entry are all different, or its parts are 0.
        for entry, part in zip(numbers.unbind(2), parts.unbind(2), strict=True):
            mass.scatter_add_(2, entry, part)
        best_mass, best = mass.topk(width, dim=2)
        best_codes = torch.zeros_like(codes).scatter_(2, number, codes).gather(2, best)
        return best_codes, best_mass.clamp(max=1.0).log()

    def _best(self, stamp: Tensor) -> Tensor:
        which = stamp.argmax(dim=2, keepdim=True)
        return self.codes[..., 0].gather(2, which)[..., 0]


def newest_first(tree: DraftTree, verdict: Verdict) -> Tensor:
    """Returns an order [B, N] int64 of the nodes, all different, for History.write(): the lower the order of
    a node, the better its distribution predicts the code after it.

    The nodes with the most accepted ancestors come first, because the fewest codes of their prefix are wrong.
    Ties keep the order of the tree, which begins with the main chain.
    """
    shared = (tree.ancestors & accepted_nodes(tree, verdict)[:, None]).sum(dim=2)
    return torch.arange(tree.nodes, device=shared.device) - shared * tree.nodes


def grow_chains(candidates: Candidates, shapes: BatchShapes, last_codes: Tensor) -> DraftTree:
    """Returns trees of a main chain and leaves. The main chain, below the roots last_codes [B], holds the
    best code of every level; the leaves are the best of the other candidates.

        root -> a1 -> a2 -> a3      a: the best candidates of levels 1, 2, 3
          |      |      |
          b1     b2     b3          b: other candidates; b2, of level 2, hangs from a1

    The nodes of the chain come first in the tree. The leaves follow by the summed log-confidence of their
    path; ties keep the order of levels and ranks. `candidates` must be at least as long and as wide as the
    largest shape, and the best candidate of every level must have a finite confidence.
    """
    depth, width, budget = shapes.limits.unbind(1)
    level, rank = (torch.arange(size, device=last_codes.device) for size in candidates.codes.shape[1:])
    best = candidates.confidence[..., 0]
    path = (best.cumsum(dim=1) - best)[..., None] + candidates.confidence  # [B, L, K]
    scores = path.clone()
    scores[..., 0] = CHAIN_SCORE - level
    absent = (level[:, None] >= depth[:, None, None]) | (rank >= width[:, None, None])
    scores = scores.masked_fill_(absent, float("-inf")).flatten(1)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, : shapes.budget]
    # Node 0, the root, borrows candidate 0, whose parent is node 0; its code is set below.
    which = F.pad(order, (1, 0))
    count = budget.minimum(scores.isfinite().sum(dim=1))
    node = torch.arange(which.shape[1], device=last_codes.device)
    valid = node <= count[:, None]
    which.masked_fill_(~valid, 0)  # padding borrows candidate 0, too: it is a leaf of the root
    codes = candidates.codes.flatten(1).gather(1, which)
    codes[:, 0] = last_codes
    parents = which // len(rank)  # candidate l * K + k is of depth l + 1 and hangs from node l of the chain
    return DraftTree(
        codes=codes,
        parents=parents,
        depths=parents + (node > 0),
        ancestors=leafy_chain_mask(parents),
        valid=valid,
        depth=shapes.depth,
        width=shapes.width,
        confidence=path.flatten(1).gather(1, which).masked_fill(node == 0, 0.0),
        leafy_chain=True,
    )
