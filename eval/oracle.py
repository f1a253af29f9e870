"""The least cost of an image, were the best tree shape at every cell known: a bound for every policy.

Drafts of the eagle network depend on the image's own path alone, so the accepted length of every shape at
every root can be read off a dump. Those of self-drafting depend on the drafts before them as well; their
bound takes the laws ahead that the recorded run saw. Dimensions: B images, P pool entries, D depths, S
shapes, n codes an image, V codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from adt_tree.decode import speculative
from adt_tree.grid import Grid
from adt_tree.jacobi import JacobiProposer
from adt_tree.noise import Noise
from adt_tree.policy import Fixed, TreeShape
from adt_tree.propose import EagleProposer, Stem, grow_pool
from adt_tree.records import Decoded, Step
from adt_tree.roles import Below, Drafter, Proposer
from adt_tree.sampling import Sampling
from adt_tree.stale import Candidates, StaleCodes, chain_scores
from adt_tree.tree import DraftTree, Pool, lone_roots, select
from adt_tree.verify import Coupled, Verdict
from eval.dumped import AS_RECORDED, DumpedImage, RecordedModel, RecordedTarget, requests
from eval.method import Method

NOTHING = TreeShape(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a cycle, in target passes over one node, the pass itself being 1."""

    level: float  # of a drafter pass
    node: float  # of a drafted node

    def of(self, target_calls: Any, drafter_calls: Any, nodes: Any) -> Any:
        """Cost of so many cycles, drafter passes and nodes; numbers or tensors."""
        return target_calls + self.level * drafter_calls + self.node * nodes


class Tally:
    """What a tree of every shape would have had accepted at each root of images that are played, and how many
    nodes it would have had."""

    def __init__(self, shapes: Sequence[TreeShape], target: RecordedTarget) -> None:
        self.shapes, self.target = list(shapes), target
        self.accepted: list[Tensor] = []  # [B, S] a root
        self.nodes: list[Tensor] = []  # [B, S]
        self._deepest = max(shape.depth for shape in shapes)
        self._depths, self._widths, self._budgets = torch.tensor(
            [(shape.depth, shape.width, shape.budget) for shape in shapes], device=target.device
        ).unbind(1)

    def note(self, pool_of_width: Callable[[int], Pool], fits: bool) -> None:
        """Count at one root an image. Trees of one width are cut from one pool, that of the greatest depth;
        fits: there is room for a tree at all."""
        accepted = torch.zeros(
            self.target.slots, len(self.shapes), dtype=torch.int64, device=self.target.device
        )
        nodes = torch.zeros_like(accepted)
        for width in {shape.width for shape in self.shapes if shape.depth and fits}:
            pool = pool_of_width(width)
            mine = self._widths == width
            found = outcome(pool, self._path(pool), self._depths[mine], self._budgets[mine])
            accepted[:, mine], nodes[:, mine] = found
        self.accepted.append(accepted)
        self.nodes.append(nodes)

    def taken(self) -> tuple[Tensor, Tensor]:
        """(accepted, nodes) [n - 1, B, S] of the images played since the last call."""
        found = torch.stack(self.accepted).cpu(), torch.stack(self.nodes).cpu()
        self.accepted, self.nodes = [], []
        return found

    def _path(self, pool: Pool) -> Tensor:
        """[B, L]: the pool entries of the image's own codes, level by level; P where the pool has none."""
        images, size = pool.codes.shape
        right = pool.codes == self.target.own_codes(pool.depths.expand(images, -1))
        entry, path = torch.full((images, 1), -1, device=pool.codes.device), []
        for depth in range(1, 1 + self._deepest):
            match = right & (pool.parents == entry) & (pool.depths == depth)
            entry = match.int().argmax(dim=1, keepdim=True).masked_fill(~match.any(dim=1, keepdim=True), size)
            path.append(entry)
        return torch.cat(path, dim=1)


class EagleProbe:
    """A growth (see Growth) that drafts nothing, so that every code of an image is a root once."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally

    def __call__(self, drafter: Drafter, sampling: Sampling, stem: Stem) -> DraftTree:
        """See Growth; the stem's limits hold what remains of each image."""
        budget, depth, _ = stem.bounds
        deep, _, nodes = stem.limits.unbind(1)

        def pool(width: int) -> Pool:
            limits = torch.stack((deep, torch.full_like(deep, width), nodes), dim=1)
            return grow_pool(drafter, sampling, replace(stem, bounds=(budget, depth, width), limits=limits))

        self.tally.note(pool, stem.bounds[1] > 0)
        return lone_roots(stem.roots)


class StaleProbe(JacobiProposer):
    """Self-drafting whose drafts are wrong throughout, so that every code of an image is a root once. It
    remembers what the recorded cycles read, not its own."""

    def __init__(self, stale: StaleCodes, tally: Tally) -> None:
        super().__init__(stale)
        self.tally = tally

    def propose(
        self, shapes: Sequence[TreeShape], roots: Tensor, below: Below, committed: Sequence[int]
    ) -> DraftTree:
        """See Proposer: one chain as deep as the deepest shape, of codes that are not the image's."""
        depth = torch.tensor([shape.depth for shape in shapes], device=roots.device)
        deepest = int(depth.max())

        def pool(width: int) -> Pool:
            found = self.stale.candidates(deepest, width)
            return pool_of_chains(found, depth, torch.full_like(depth, width))

        self.tally.note(pool, deepest > 0)
        if deepest == 0:
            return lone_roots(roots)
        level = torch.arange(deepest, device=roots.device).expand(len(roots), -1)
        wrong = (self.tally.target.own_codes(level + 1) + 1) % self.tally.target.num_codes
        chain = Pool(wrong, -level.float(), level - 1, 1 + level[0])
        return select(chain, depth, roots, (deepest, deepest, 1))

    def observe(
        self, tree: DraftTree, log_p: Tensor, noisy: Tensor, features: Tensor, verdict: Verdict
    ) -> None:
        """See Proposer."""
        seen = self.stale.seen
        seen.write(*self.tally.target.read_before(seen.candidates))
        self.stale.advance(verdict)


def pool_of_chains(found: Candidates, depth: Tensor, width: Tensor) -> Pool:
    """What grow_chains() takes its trees from, by the candidates' own confidences: P = L * K. depth and width
    [B]."""
    images, length, ranks = found.codes.shape
    level = torch.arange(length, device=depth.device).repeat_interleave(ranks)
    scores = chain_scores(found.confidence, depth, width)
    # The level above is `ranks` entries back, and its chain's node the first of them.
    above = torch.where(level == 0, -1, (level - 1) * ranks)
    return Pool(found.codes.flatten(1), scores, above.expand(images, -1), 1 + level)


def outcome(pool: Pool, path: Tensor, depths: Tensor, budgets: Tensor) -> tuple[Tensor, Tensor]:
    """(accepted codes, drafted nodes) [B, S] int64 of the trees that `select` would cut from a pool.

    path [B, L]: the pool entries of the image's own codes, P where there is none. depths, budgets [S]. An
    entry is in a tree if fewer than its budget of the entries not below its depth come before it.
    """
    size = pool.codes.shape[1]
    usable = pool.scores.isfinite()
    there = path < size
    own = path.clamp(max=size - 1)
    there = there & usable.gather(1, own)
    score = pool.scores.gather(1, own)[..., None]
    earlier = torch.arange(size, device=own.device) < own[..., None]
    before = (pool.scores[:, None] > score) | ((pool.scores[:, None] == score) & earlier)  # [B, L, P]
    inside = (pool.depths[:, None] <= depths).float()  # [P, S]
    rank = before.float() @ inside
    level = torch.arange(1, path.shape[1] + 1, device=own.device)
    kept = there[..., None] & (level[:, None] <= depths) & (rank < budgets)
    return kept.sum(dim=1), (usable.float() @ inside).long().minimum(budgets)


def cheapest_way(accepted: Tensor, costs: Tensor) -> list[tuple[int, int]]:
    """(root, shape) of every cycle of the cheapest way through an image, by dynamic programming from its end.

    accepted [n - 1, S] int64 and costs [n - 1, S] of a cycle at root r with shape s; the next root is then
    r + 1 + accepted[r, s]. Ties take the first shape.
    """
    steps, prices = accepted.tolist(), costs.tolist()
    roots = len(steps)
    least, choice = [0.0] * (roots + 1), [0] * roots
    for root in reversed(range(roots)):
        totals = [c + least[root + 1 + a] for c, a in zip(prices[root], steps[root], strict=True)]
        choice[root] = totals.index(min(totals))
        least[root] = totals[choice[root]]
    way, root = [], 0
    while root < roots:
        way.append((root, choice[root]))
        root += 1 + steps[root][choice[root]]
    return way


def oracle(
    model: RecordedModel,
    dumps: Sequence[DumpedImage],
    method: Method,
    shapes: Sequence[TreeShape],
    costs: Costs,
    slots: int,
) -> Iterator[Decoded]:
    """The recorded images in their cheapest cycles with the method's drafter, eagle or jacobi: trees of
    `shapes` or none."""
    shapes = [NOTHING, *shapes]
    deepest, widest = max(s.depth for s in shapes), max(s.width for s in shapes)
    sampling = Sampling(method.temperature, method.top_k, method.top_p, method.cfg)
    target = model.target(slots, sampling, deepest + 1, max(dump.length for dump in dumps))
    tally = Tally(shapes, target)
    if method.drafter == "eagle":
        drafter = model.drafter(target, deepest, widest)
        proposer: Proposer = EagleProposer(drafter, sampling, EagleProbe(tally), slots)
    else:
        stale = StaleCodes(model.grid, slots, widest, method.seed_cells, model.num_codes, target.device)
        proposer = StaleProbe(stale, tally)
    policy = Fixed(TreeShape(deepest, 1, deepest))
    rule = Coupled(Noise(model.num_codes, silent=sampling.greedy))
    for start in range(0, len(dumps), slots):
        chunk = dumps[start : start + slots]
        list(speculative(target, proposer, policy, rule, requests(chunk), AS_RECORDED))
        accepted, nodes = tally.taken()
        for slot, dump in enumerate(chunk):
            yield _image(dump, model.grid, shapes, costs, method.drafter, accepted[:, slot], nodes[:, slot])


def _image(
    dump: DumpedImage,
    grid: Grid,
    shapes: Sequence[TreeShape],
    costs: Costs,
    drafter: str,
    accepted: Tensor,
    nodes: Tensor,
) -> Decoded:
    """One image in its cheapest cycles; accepted and nodes [n - 1, S]."""
    levels = torch.tensor([shape.depth for shape in shapes])
    left = torch.arange(grid.size - 2, -1, -1)[:, None]  # levels that still fit below each root
    passes = levels.minimum(left)
    passes = passes.clamp(min=1) if drafter == "eagle" else torch.zeros_like(passes)  # as Proposer.calls
    price = costs.of(1.0, passes.double(), nodes.double())
    steps, calls = [], 0
    for root, index in cheapest_way(accepted, price):
        shape, position = shapes[index].cut(int(left[root])), root + 1
        row, column = grid.cell(position)
        taken, drafted = int(accepted[root, index]), int(nodes[root, index])
        steps.append(Step(position, row, column, shape.depth, shape.width, drafted, taken, 0.0))
        calls += int(passes[root, index])
    codes = dump.codes.tolist()
    return Decoded(dump.name, dump.seed, codes, steps, 0.0, len(steps), calls)
