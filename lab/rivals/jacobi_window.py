"""Jacobi iterations over a window of the next L positions of the image, from which most rivals are made.

Every position of the window holds a draft code X and the distribution q that X was sampled from. A target
pass computes p at all of them. Drafts are accepted from front to back with probability min(1, p(X) / q(X));
the code after the last accepted one is sampled from the residual. Then the window moves on, and the p of this
pass is the q of the next. The methods differ in how they sample the positions after the accepted ones (Tail)
and in the number of candidates of the foremost positions.

A method is lossless if the tail samples every code from p given the codes in front of it: no position may
depend on the outcome at later ones. One object is proposer and rule, because the pass that judges the drafts
also samples the next ones. It shares no noise with the AR baseline, so the same seed gives another image.

Dimensions: B images, L positions, K candidates a position, N nodes of the tree, V codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adt_tree.method_on_model import MethodOnModel
from adt_tree.noise import ACCEPT, DRAFT, RESIDUAL, Noise, uniform
from adt_tree.policy import TreeShape
from adt_tree.proposers.neighbours import Neighbours
from adt_tree.roles import Prefix, StepStart
from adt_tree.static_trees import Paths, chain
from adt_tree.tree import BatchShapes, DraftTree, Topology, rows_at
from adt_tree.verify import Rejection, Rule, Verdict, verdict_from_hits

NONE = -1  # marks a missing candidate


@dataclass(frozen=True, slots=True)
class Judged:
    """The drafts of a pass. Each was judged by p after its parent, whether its parent was accepted or not."""

    tree: DraftTree
    p: Tensor  # [B, N, V] distribution of the code after each node
    hit: Tensor  # [B, N] bool: accepted by its parent's p; true for the root and at most one child per node
    recovered: Tensor  # [B, N] a code after each node, sampled from the residual that its children left
    chances: Tensor  # [B, N] the uniforms with which `recovered` was sampled


@dataclass(frozen=True, slots=True)
class WindowVerdict(Verdict):
    """A verdict, with what observe() moves the windows by."""

    tail: Tensor  # [B, N] the Tail's code after each node
    seeds: Tensor  # [B]


# Samples the code [B, N] after each node, distributed as p there. They become the drafts of the next pass at
# the positions after the committed codes.
Tail = Callable[[Judged], Tensor]
# Takes a tree, p [B, N, V] and a uniform per node [B, N]. Returns the accepted nodes [B, N], and the
# distribution [B, N, V] left at each node after its children were judged.
Judge = Callable[[DraftTree, Tensor, Tensor], tuple[Tensor, Tensor]]


def window_and_rule(
    setup: MethodOnModel, tail: Tail, judge: Judge | None = None, paths: Paths | None = None
) -> tuple[JacobiWindow, Rule]:
    """Returns the proposer of a method and its rule, which are one object.

    judge: None for recursive rejection, which is lossless. paths: the candidates of the window; None: one for
    each position.
    """
    judge = judge or Rejection(setup.batch.num_codes, static=True).judge
    window = JacobiWindow(setup, Topology(paths or chain(setup.shape.depth)), tail, judge)
    return window, window


def decided(judge: Judge, tree: DraftTree, p: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what an exact judge returns where another rule decides: the drafts accepted [B, N], and after
    every other draft the residual of its rejection. A uniform of 0 accepts every draft, and infinity none."""
    return judge(tree, p, torch.where(accepted, 0.0, float("inf")))


def sample(p: Tensor, chances: Tensor) -> Tensor:
    """Returns codes [B, N] sampled from p [B, N, V], which need not sum to 1, by inversion of its cumulative
    sum. chances [B, N]: one uniform for each."""
    mass = p.double().cumsum(dim=-1)
    place = torch.searchsorted(mass, chances[..., None] * mass[..., -1:], right=True)
    return place[..., 0].clamp(max=p.shape[-1] - 1)


class JacobiWindow:
    """The proposer and rule of the rivals, with one window per slot.

    The candidates of a position are its code X, then samples from its q without replacement and without X. At
    temperature 0, p is one-hot, and the other candidates are the best codes by q. Randomness: two uniforms
    per node, and a Gumbel vector per position with several candidates. They are keyed by the first position
    of the pass, so that no two passes share any.

    State: the codes [B, L, K] of the window, and q [B, L + 1, V]. The last row of q, for the leaves of the
    deepest level, stays zero.
    """

    def __init__(self, setup: MethodOnModel, tree: Topology, tail: Tail, judge: Judge) -> None:
        batch, greedy, self._neighbours = setup.batch, setup.method.greedy, Neighbours.of(setup)
        device, num_codes, self._run = batch.device, batch.num_codes, batch.run
        self.noise = Noise(num_codes, silent=True)  # none is added to log p: this object samples the drafts
        self._tree, self._tail, self.judge, self._greedy = tree, tail, judge, greedy
        self._sibling_noise = Noise(num_codes, silent=greedy, stream=DRAFT)
        # Number of positions with several candidates.
        self._branching = max((d for d, r in zip(tree.depths, tree.ranks, strict=True) if r), default=0)
        self._parents = torch.tensor(tree.parents, device=device)
        self._depths = torch.tensor(tree.depths, device=device)
        # Index of each node's candidate in a window [L, K] seen as a vector; the root's is not used.
        self._candidate = (self._depths - 1) * tree.width + torch.tensor(tree.ranks, device=device)
        self._ancestors = tree.ancestors().to(device)
        self._readers = torch.tensor(readers(tree), device=device)
        self._offsets = torch.arange(tree.depth, device=device)
        self.codes = torch.full((batch.slots, tree.depth, tree.width), NONE, device=device)
        self.q = torch.zeros(batch.slots, tree.depth + 1, num_codes, device=device)

    def calls(self, shape: TreeShape) -> int:
        return 0

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        self._neighbours.begin(slot, code)
        self.begin(slot, 1)

    def begin(self, slot: int, position: int) -> None:
        rows, first = slice(slot, slot + 1), torch.full_like(self._offsets[:1], position)
        at = self._neighbours.ahead(first, self._offsets)
        fresh = torch.ones_like(at, dtype=torch.bool)
        codes = self._neighbours.fill(at, torch.zeros_like(at), fresh, rows)[0]
        self._fill(rows, codes, self.q[rows, :-1], ~fresh)

    def know(self, codes: Tensor) -> None:
        self._neighbours.codes.copy_(codes)

    def release(self, slot: int) -> None: ...

    def choose(self, log_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        # No pass uses the uniform of position 0, because the first one begins at position 1.
        chances = uniform(seeds, positions[:, None], 1, RESIDUAL)[:, 0]
        return sample(self._probabilities(log_p)[:, None], chances)[:, 0]

    def propose(self, start: StepStart) -> DraftTree:
        return self._run(self._window_tree, start.shapes.all_levels, start.last_codes)

    def _window_tree(self, shapes: BatchShapes, last_codes: Tensor) -> DraftTree:
        nodes = sum(depth <= shapes.depth for depth in self._tree.depths)
        parents, depths = (x[:nodes].expand(len(last_codes), -1) for x in (self._parents, self._depths))
        ancestors = self._ancestors[:nodes, :nodes].expand(len(last_codes), -1, -1)
        drafts = self.codes.flatten(1).index_select(1, self._candidate[1:nodes])
        codes = torch.cat((last_codes[:, None], drafts), dim=1)
        absent = (codes == NONE) | (depths > shapes.limits[:, :1])
        return DraftTree(
            codes.clamp(min=0),
            parents,
            depths,
            ancestors,
            valid=~(ancestors & absent[:, None]).any(dim=2),
            depth=shapes.depth,
            width=self._tree.width,
            q=None if self._greedy else self.q.index_select(1, self._depths[:nodes]),
            leafy_chain=self._tree.width == 1,
        )

    def __call__(
        self, tree: DraftTree, log_p: Tensor, perturbed: Tensor, seeds: Tensor, positions: Tensor
    ) -> Verdict:
        p, root = self._probabilities(log_p), positions[:, None]
        accept, chances = (uniform(seeds, root, tree.nodes, stream)[:, 0] for stream in (ACCEPT, RESIDUAL))
        hit, left = self.judge(tree, p, accept.float())
        judged = Judged(tree, p, hit, sample(left, chances), chances)
        verdict = verdict_from_hits(tree, hit, judged.recovered)
        return WindowVerdict(verdict.path, verdict.count, verdict.codes, self._tail(judged), seeds)

    def observe(
        self, tree: DraftTree, perturbed: Tensor, features: Tensor, verdict: Verdict, positions: Tensor
    ) -> None:
        assert isinstance(verdict, WindowVerdict)
        self._run(self._move, tree, perturbed, verdict, positions)

    def _move(self, tree: DraftTree, log_p: Tensor, verdict: WindowVerdict, positions: Tensor) -> None:
        first = positions + verdict.count
        self._neighbours.commit(positions, verdict.codes, verdict.count)
        self._advance(tree, verdict, verdict.tail, log_p.exp(), first)
        self._add_candidates(verdict.seeds, first)

    def _probabilities(self, log_p: Tensor) -> Tensor:
        """Returns p [..., V] from log p; one-hot at temperature 0."""
        if not self._greedy:
            return log_p.exp()
        return torch.zeros_like(log_p).scatter_(-1, log_p.argmax(dim=-1, keepdim=True), 1.0)

    def _advance(self, tree: DraftTree, verdict: Verdict, codes: Tensor, q: Tensor, first: Tensor) -> None:
        """Moves the windows on, so that they begin at the positions first [B].

        codes [B, N] and q [B, N, V] belong to the position after each node of the tree just judged.
        """
        end = verdict.path.gather(1, (verdict.count - 1)[:, None])
        # The node whose output scored each position of the moved window, if this pass scored it.
        level = verdict.count[:, None] + self._offsets
        node = self._readers[end[:, 0]].gather(1, level.clamp(max=self._tree.depth))
        inside = (level <= self._tree.depth) & (node < tree.nodes)
        node = node.masked_fill(~inside, 0)
        scored = inside & tree.valid.gather(1, node)
        at = self._neighbours.ahead(first, self._offsets)
        codes = self._neighbours.fill(at, codes.gather(1, node), ~scored)[0]
        self._fill(slice(None), codes, rows_at(q, node), scored)

    def _fill(self, slots: slice, codes: Tensor, q: Tensor, scored: Tensor) -> None:
        """Sets the windows of the slots to codes [B, L] and q [B, L, V]. Where a position is not scored
        [B, L], its q becomes one-hot at its code."""
        self.codes[slots] = NONE
        self.codes[slots, :, 0] = codes
        window = self.q[slots, :-1]
        window.copy_(q.masked_fill(~scored[..., None], 0.0))
        window.scatter_add_(2, codes[..., None], (~scored)[..., None].float())

    def _add_candidates(self, seeds: Tensor, first: Tensor) -> None:
        """Samples the other candidates of the foremost positions, which begin at first [B], without
        replacement: those of greatest log q + G, best first."""
        if not self._branching:
            return
        codes, q = self.codes[:, : self._branching], self.q[:, : self._branching]
        key = first[:, None] * len(self._offsets) + self._offsets[: self._branching]
        perturbed = q.log() + self._sibling_noise.gumbel(seeds, key)
        others = perturbed.scatter(2, codes[..., :1], float("-inf")).topk(self._tree.width - 1, dim=-1)
        codes[..., 1:] = others.indices.masked_fill(~others.values.isfinite(), NONE)


def readers(tree: Topology) -> list[list[int]]:
    """Returns reader[n][l], [N][L + 1]: if the accepted path ends at node n, the node of depth l whose output
    becomes the window's distribution at depth l + 1. Entries up to the depth of n are not used.

    Below n these are its first child, the first child of that, and so on; where no child is left, the nodes
    of the main chain. Example: a main chain 0 1 3 7, and two positions with two candidates each.

        0 -- 1 -- 3 -- 7      reader[1] = _ _ 3 7
        |    |
        |    +--- 4           reader[2] = _ _ 5 7    5 is the first child of 2, and has no children itself
        |
        +--- 2 -- 5
             |
             +--- 6
    """
    first = {parent: node for node, parent in reversed(list(enumerate(tree.parents))) if node}

    def below(node: int, row: list[int]) -> list[int]:
        while node in first:
            node = first[node]
            row[tree.depths[node]] = node
        return row

    main = below(0, [0] * (tree.depth + 1))
    return [below(node, main.copy()) for node in range(len(tree.parents))]
