"""The published training-free rivals: Jacobi iterations over a window of the next L positions of the image.

Every position holds a code X and the distribution q that X was drawn from. A pass reads the target's p at all
of them; drafts are judged front to back by min(1, p(X) / q(X)), and the code after the last accepted one is
drawn from the residual. The methods differ in what becomes of the positions behind it (Tail) and in how many
candidates the foremost ones have. Then the window moves on, and q is what this pass read there.

Lossless if the tail draws each code from p given all positions in front of it, whatever those hold: what
becomes of a position must not depend on what became of the ones behind. One object is proposer and rule, for
the pass that judges the drafts also draws the next ones. It shares no noise with the AR baseline, so that a
seed gives another image. With Gumbel noise fixed per position as the coupling (2510.24211's second one) a
window is what adt_tree.proposers.self_draft drafts by its main chain; it does not stand here again.

Dimensions: B images, L positions, K candidates a position, N nodes of the tree, V codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adt_tree.noise import ACCEPT, DRAFT, RESIDUAL, Noise, uniform
from adt_tree.policy import TreeShape, num_sibling_nodes
from adt_tree.roles import NoiseBelow, Prefix, Setup, Target
from adt_tree.static_trees import Paths, chain
from adt_tree.tree import BatchShapes, DraftTree, StaticTree, root_only_tree, rows_at
from adt_tree.verify import Rejection, Verdict, verdict_from_hits

NONE = -1  # in place of a candidate


@dataclass(frozen=True, slots=True)
class Judged:
    """The drafts of a pass, each judged by p after its parent, whatever became of those in front."""

    tree: DraftTree
    p: Tensor  # [B, N, V] of the code after each node
    hit: Tensor  # [B, N] bool: accepted; at most one child of a node, and the root
    drawn: Tensor  # [B, N] a code after each node, from what its rejected children left of p
    chances: Tensor  # [B, N] the uniforms by which it was drawn


# What becomes of the positions behind the committed codes: a code [B, N] after each node, drawn as p there.
Tail = Callable[[Judged], Tensor]


def redraw(judged: Judged) -> Tensor:
    """SJD (speculative Jacobi decoding, 2410.01699): X' ~ p after every node [B, N], whatever X was.

    The uniform of a node draws either this or what follows the last accepted draft, never both.
    """
    return draw(judged.p, judged.chances)


def couple(judged: Judged) -> Tensor:
    """Coupled SJD (2510.24211): behind the first rejected draft every code stays that can.

    Codes drawn anew are nearly always others, and whatever was read behind them is lost. The maximal coupling
    keeps X with the greatest probability that leaves X' ~ p: it is min(1, p / q) with the residual, the rule
    of verification, at every position without a break. So Pr[X' = X] = 1 - TV(p, q). X' follows this pass's
    p, which is its q in the next pass even where X was kept.
    """
    tree = judged.tree
    parents = tree.parents[:, 1:].masked_fill(~judged.hit[:, 1:], tree.nodes)
    return F.pad(judged.drawn, (0, 1)).scatter(1, parents, tree.codes[:, 1:])[:, :-1]


TAILS: dict[str, Tail] = {"sjd": redraw, "sjd-coupled": couple, "sjd-pac": couple}  # by method


def make(setup: Setup) -> JacobiWindow:
    """Returns the proposer, which is the verification rule as well, of sjd, sjd-coupled and sjd-pac."""
    tree, method = StaticTree(product_tree(setup.shape)), setup.method
    return JacobiWindow(tree, TAILS[method.name], setup.target, method.greedy, method.seeds)


def product_tree(shape: TreeShape) -> Paths:
    """A main chain of shape.depth codes, of which the first have shape.width candidates: as many positions as
    the budget allows. Width 1: the chain alone.

    SJD-PAC (2603.18599): where drafts are rejected most, at the first open positions, the window is a K-ary
    tree: K candidates, the code X of the position and draws from its q without replacement, below every
    candidate of the position in front. Recursive rejection tries them in turn. Behind the first candidates
    the window goes on as a chain. As published K is 4 and two positions branch (the root counts as a level:
    depth 3), in 64 nodes.
    """
    length = min(shape.depth, shape.budget)
    spare, width = shape.budget - length, shape.width
    positions = max(n for n in range(length + 1) if num_sibling_nodes(width, n) <= spare)
    branches = [path for n in range(1, positions + 1) for path in product(range(width), repeat=n)]
    return (*branches, *chain(length)[positions:])


def draw(p: Tensor, chances: Tensor) -> Tensor:
    """Codes [B, N] from p [B, N, V], which need not sum to 1, by inversion: one uniform [B, N] each."""
    mass = p.double().cumsum(dim=-1)
    place = torch.searchsorted(mass, chances[..., None] * mass[..., -1:], right=True)
    return place[..., 0].clamp(max=p.shape[-1] - 1)


class JacobiWindow:
    """Proposer and rule over one window per slot.

    tree: of the candidates, node by node; those of a position are its code X and draws from q without
    replacement and without X. Temperature 0: p is one-hot, candidates are the best codes by q. Randomness:
    two uniforms per node and a Gumbel vector per position with several candidates, keyed by the first
    position of the pass, so that no two passes share any.
    State: codes [B, L, K], and q [B, L + 1, V], whose last row is of leaves and stays empty.
    """

    def __init__(self, tree: StaticTree, tail: Tail, target: Target, greedy: bool, seed_cells: str) -> None:
        """seed_cells: what positions hold that no pass has read, "random" or "left"."""
        device, size, num_codes = target.device, target.grid.size, target.num_codes
        self._run = target.run
        self.noise = Noise(num_codes, silent=True)  # of the loop: drafts are drawn here
        self.rejection = Rejection(num_codes, static=True)
        self._tree, self._tail, self._greedy = tree, tail, greedy
        self._sibling_noise = Noise(num_codes, silent=greedy, stream=DRAFT)
        # Positions with several candidates.
        self._levels = max((d for d, r in zip(tree.depths, tree.ranks, strict=True) if r), default=0)
        self._parents = torch.tensor(tree.parents, device=device)
        self._depths = torch.tensor(tree.depths, device=device)
        self._entry = (self._depths - 1) * tree.width + torch.tensor(tree.ranks, device=device)
        self._ancestors = tree.ancestors().to(device)
        self._readers = torch.tensor(readers(tree), device=device)
        self._steps = torch.arange(tree.depth, device=device)
        self._random: Tensor | None = None  # [positions]: where q is one-hot, one draw serves all images
        if seed_cells == "random":
            seed, places = torch.zeros(1, dtype=torch.int64), torch.arange(size)
            self._random = (num_codes * uniform(seed, places[None], 1, DRAFT)).long().flatten().to(device)
        self.codes = torch.full((target.slots, tree.depth, tree.width), NONE, device=device)
        self.q = torch.zeros(target.slots, tree.depth + 1, num_codes, device=device)

    def calls(self, shape: TreeShape) -> int:
        """No drafter passes."""
        return 0

    def prefill(self, slot: int, prompt: Any, prefix: Prefix, code: Tensor) -> None:
        """Nothing is known of a new image but its first code."""
        codes = self._unread(self._steps[None] + 1, code.view(1, 1))
        one, unread = slice(slot, slot + 1), torch.zeros_like(codes, dtype=torch.bool)
        self._fill(one, codes, self.q[one, :-1], unread)

    def release(self, slot: int) -> None:
        """What an idle slot holds is not read."""

    def choose(self, log_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """A draw [B] from p; no pass begins at the first position of an image, whose uniform it takes."""
        chances = uniform(seeds, positions[:, None], 1, RESIDUAL)[:, 0]
        return draw(self._target(log_p)[:, None], chances)[:, 0]

    def propose(
        self, shapes: BatchShapes, last_codes: Tensor, noise_below: NoiseBelow, committed: Sequence[int]
    ) -> DraftTree:
        """The window's candidates as a tree, cut to the deepest shape."""
        return self._run(self._window_tree, shapes.all_levels, last_codes)

    def _window_tree(self, shapes: BatchShapes, last_codes: Tensor) -> DraftTree:
        if shapes.empty:
            return root_only_tree(last_codes)
        nodes = sum(depth <= shapes.depth for depth in self._tree.depths)
        parents, depths = (x[:nodes].expand(len(last_codes), -1) for x in (self._parents, self._depths))
        ancestors = self._ancestors[:nodes, :nodes].expand(len(last_codes), -1, -1)
        drafts = self.codes.flatten(1).index_select(1, self._entry[1:nodes])
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
        """Judge the drafts and draw those of the next pass."""
        p, root = self._target(log_p), positions[:, None]
        accept, chances = (uniform(seeds, root, tree.nodes, stream)[:, 0] for stream in (ACCEPT, RESIDUAL))
        hit, left = self.rejection.judge(tree, p, accept.float())
        judged = Judged(tree, p, hit, draw(left, chances), chances)
        verdict = verdict_from_hits(tree, hit, judged.drawn)
        self._advance(tree, verdict, self._tail(judged), log_p.exp(), positions + verdict.count)
        self._add_candidates(seeds, positions + verdict.count)
        return verdict

    def observe(self, tree: DraftTree, perturbed: Tensor, features: Tensor, verdict: Verdict) -> None:
        """The window moved on when the pass was judged."""

    def _target(self, log_p: Tensor) -> Tensor:
        """p [..., V]: one-hot at temperature 0."""
        if not self._greedy:
            return log_p.exp()
        return torch.zeros_like(log_p).scatter_(-1, log_p.argmax(dim=-1, keepdim=True), 1.0)

    def _advance(self, tree: DraftTree, verdict: Verdict, codes: Tensor, q: Tensor, first: Tensor) -> None:
        """Move to positions from first [B] on: codes [B, N] and q [B, N, V] after the node that read each."""
        last = (verdict.count - 1)[:, None]
        end, newest = verdict.path.gather(1, last), verdict.codes.gather(1, last)
        level = verdict.count[:, None] + self._steps
        node = self._readers[end[:, 0]].gather(1, level.clamp(max=self._tree.depth))
        inside = (level <= self._tree.depth) & (node < tree.nodes)
        node = node.masked_fill(~inside, 0)
        read = inside & tree.valid.gather(1, node)
        after = codes.gather(1, node)
        before = torch.cat((newest, after), dim=1).gather(1, read.sum(dim=1, keepdim=True))
        unread = self._unread(first[:, None] + self._steps, before)
        self._fill(slice(None), torch.where(read, after, unread), rows_at(q, node), read)

    def _fill(self, slots: slice, codes: Tensor, q: Tensor, read: Tensor) -> None:
        """Hold codes [B, L] and q [B, L, V], which is one-hot where nothing was read [B, L]."""
        self.codes[slots] = NONE
        self.codes[slots, :, 0] = codes
        held = self.q[slots, :-1]
        held.copy_(q.masked_fill(~read[..., None], 0.0))
        held.scatter_add_(2, codes[..., None], (~read)[..., None].float())

    def _unread(self, positions: Tensor, before: Tensor) -> Tensor:
        """Codes [B, L] of positions [B, L] that no pass has read; before [B, 1] is the last that is known."""
        if self._random is None:
            return before.expand_as(positions)
        return self._random[positions.clamp(max=len(self._random) - 1)]

    def _add_candidates(self, seeds: Tensor, first: Tensor) -> None:
        """The other candidates of the foremost positions, first [B] on, in the order of their draws."""
        if not self._levels:
            return
        codes, q = self.codes[:, : self._levels], self.q[:, : self._levels]
        key = first[:, None] * len(self._steps) + self._steps[: self._levels]
        perturbed = q.log() + self._sibling_noise.gumbel(seeds, key)
        others = perturbed.scatter(2, codes[..., :1], float("-inf")).topk(self._tree.width - 1, dim=-1)
        codes[..., 1:] = others.indices.masked_fill(~others.values.isfinite(), NONE)


def readers(tree: StaticTree) -> list[list[int]]:
    """[N][L + 1]: the node that reads the position so many levels below the root, where node n ends the path:
    the first child of n, the first child of that, and so on; where there is none, the main chain."""
    first = {parent: node for node, parent in reversed(list(enumerate(tree.parents))) if node}

    def below(node: int, row: list[int]) -> list[int]:
        while node in first:
            node = first[node]
            row[tree.depths[node]] = node
        return row

    main = below(0, [0] * (tree.depth + 1))
    return [below(node, main.copy()) for node in range(len(tree.parents))]
