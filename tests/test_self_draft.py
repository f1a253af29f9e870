"""Self-drafting and the hybrid: the AR baseline's images, drafts worth having, and what is remembered."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from adt_tree.decode import finished
from adt_tree.grid import Grid
from adt_tree.method import Method as Named
from adt_tree.noise import Noise
from adt_tree.policy import SEED_CELLS, TreeShape
from adt_tree.proposers.candidates import BELOW, LATE, NEWEST, Candidates, grow_chains
from adt_tree.proposers.hybrid import HybridProposer
from adt_tree.proposers.self_draft import SelfDraftProposer
from adt_tree.relax import Relaxation, nearest_table
from adt_tree.sampling import Sampling
from adt_tree.tree import BatchShapes, DraftTree, ancestor_mask
from adt_tree.verify import Coupled, GreedyRelaxed, Rule, Verdict
from tests.decoding import CPU, tree_of
from tests.test_engine import CODES, IMAGES, SAMPLINGS, SHAPES, Method, coupled, make_target

NOTHING = torch.empty(0)  # the target's features, which self-drafting does not read


def self_drafter(grid: Grid, candidates: int = 2, seed_cells: str = "above") -> SelfDraftProposer:
    """A fresh proposer of one image."""
    return SelfDraftProposer(grid, 1, candidates, seed_cells, CODES, CPU)


@pytest.mark.parametrize("seed_cells", SEED_CELLS)
def test_stale_choices_are_accepted_more_often_than_chance(seed_cells: str) -> None:
    method = Method("tree", coupled(Sampling()), "self-draft", seed_cells)
    images = list(method.decode(Sampling(), 2))
    calls = sum(image.target_calls for image in images)
    assert sum(len(image.codes) - 1 for image in images) / calls > 1.25


def verdict(path: list[int], codes: list[int]) -> Verdict:
    count = torch.tensor([len(codes)])
    padding = [0] * (4 - len(codes))
    return Verdict(torch.tensor([path + [0] * (4 - len(path))]), count, torch.tensor([codes + padding]))


def shapes(*limits: int) -> BatchShapes:
    """Of one image: depth, width and budget."""
    return BatchShapes.of([TreeShape(*limits)], CPU)


def silent(levels: int) -> torch.Tensor:
    """No noise, as NoiseBelow."""
    return torch.zeros(1, levels, CODES)


def favour(codes: list[int]) -> torch.Tensor:
    """log p [1, N, 9] whose best code at node n is codes[n], and the next best the code after it."""
    log_p = torch.full((1, len(codes), 9), -9.0)
    for node, code in enumerate(codes):
        log_p[0, node, code], log_p[0, node, (code + 1) % 9] = 0.0, -1.0
    return log_p


def test_the_next_chain_is_the_latest_distribution_on_the_best_path() -> None:
    """Node 4 is an alternative to node 1 and goes on to node 5: accepted, its distribution replaces the
    chain's behind it."""
    proposer = self_drafter(Grid(3, 5))
    tree = tree_of(torch.tensor([[3, 1, 1, 1, 7, 6]]), torch.tensor([[0, 0, 1, 2, 0, 4]]))
    log_p = favour([7, 2, 4, 5, 8, 2])
    proposer.observe(tree, log_p, NOTHING, verdict([0, 4], [7, 8]))
    grown = proposer.propose(shapes(2, 1, 2), torch.tensor([8]), silent, [3])
    # Positions 1 and 2 are committed; 3 comes from node 5 (below the accepted node), 4 from node 3 of the
    # chain.
    assert grown.codes.tolist() == [[8, 2, 5]]
    wider = proposer.propose(shapes(2, 2, 3), torch.tensor([8]), silent, [3])
    assert wider.codes.tolist() == [[8, 2, 5, 4]]  # node 2 read position 3 as well, and said 4


def test_a_chain_comes_first_and_its_alternatives_by_their_paths() -> None:
    """Two levels of three candidates, the last of the second level missing: the chain, then two and one; a
    second image whose tree may be one deep and two wide."""
    gain = torch.tensor([[[0.5, 0.25, 0.1], [0.8, 0.1, 0.0]]]).log().expand(2, -1, -1)
    codes = torch.tensor([5, 6, 1, 7, 8, 2]).view(1, 2, 3).expand(2, -1, -1)
    found, roots = Candidates(codes, gain), torch.tensor([9, 4])
    whole = grow_chains(found, BatchShapes.of([TreeShape(2, 3, 9), TreeShape(1, 2, 9)], CPU), roots)
    assert whole.codes[0, :6].tolist() == [9, 5, 7, 6, 1, 8] and whole.codes[1, :3].tolist() == [4, 5, 6]
    assert whole.valid.sum(dim=1).tolist() == [6, 3]
    assert whole.parents[0].tolist() == [0, 0, 1, 0, 0, 1, 0]
    assert whole.depths[0, :6].tolist() == [0, 1, 2, 1, 1, 2]
    said = whole.confidence[0, :6].exp()  # of the path: the root, 0.5, 0.5 * 0.8, 0.25, 0.1, 0.5 * 0.1
    assert said.tolist() == pytest.approx([1, 0.5, 0.4, 0.25, 0.1, 0.05])
    small = grow_chains(found, BatchShapes.of([TreeShape(2, 3, 3), TreeShape(1, 2, 1)], CPU), roots)
    for tree in (whole, small):
        assert torch.equal(tree.ancestors, ancestor_mask(tree.parents, 2))
        assert tree.codes[0, :4].tolist() == [9, 5, 7, 6] and tree.codes[1, :2].tolist() == [4, 5]
    assert small.nodes == 4 and small.valid.sum(dim=1).tolist() == [4, 2]


def lone_siblings() -> DraftTree:
    """A root with code 3 and two children, codes 1 and 7, each with a child of its own."""
    return tree_of(torch.tensor([[3, 1, 7, 1, 1]]), torch.tensor([[0, 0, 0, 1, 2]]))


def test_where_all_siblings_failed_the_main_chains_distribution_is_kept() -> None:
    """Code 6 is committed beside 1, behind which 2 is likeliest, and 7, behind which 4 is."""
    proposer = self_drafter(Grid(3, 5))
    proposer.observe(lone_siblings(), favour([6, 2, 4, 5, 8]), NOTHING, verdict([0], [6]))
    grown = proposer.propose(shapes(2, 1, 2), torch.tensor([6]), silent, [3])
    assert grown.codes.tolist() == [[6, 2, 5]]


def test_an_older_distribution_below_the_committed_code_comes_first() -> None:
    """An earlier pass read position 2 below code 7 and said 4, and position 3 below 4 and said 5; the last
    one read them below other codes, and then 7 was committed. The chain follows what was said below its
    own codes, and what else was said there counts for less."""
    cache = self_drafter(Grid(3, 5))
    said = torch.tensor([[[-0.1, -2.4]]])
    at, above, order = (torch.tensor([pair]) for pair in ((2, 3), (7, 4), (0, 1)))
    cache.history.write(at, above, torch.tensor([[[4, 5], [5, 4]]]), said.expand(1, 2, 2), order)
    tree = replace(lone_siblings(), codes=torch.tensor([[3, 1, 2, 1, 1]]))
    cache.observe(tree, favour([7, 3, 5, 6, 8]), NOTHING, verdict([0], [7]))
    found = cache.candidates(2, 2)
    assert found.codes[0, :, 0].tolist() == [4, 5]
    # Below 7 once, beside two distributions of the last pass, one of them the newest.
    mass, others = BELOW + LATE + LATE * NEWEST, favour([3, 5]).softmax(dim=-1)[0]
    four = BELOW * math.exp(-0.1) + LATE * NEWEST * float(others[0, 4])
    assert float(found.confidence[0, 0, 0].exp()) == pytest.approx(four / mass, abs=1e-4)


@pytest.mark.parametrize("name", ["sampled", "greedy"])
@pytest.mark.parametrize("kind", ["self-draft", "hybrid"])
def test_under_relaxation_what_was_committed_is_remembered(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relaxed rule commits a draft in its choice's place. The store, which later cells are copied from,
    holds that draft after every step, and so does what the network is shown."""
    sampling, borrowed, seen = SAMPLINGS[name], 0, []
    codebook = torch.randn(CODES, 3, generator=torch.Generator().manual_seed(3))
    relaxation = Relaxation(nearest_table(codebook, 8), 7, 0.8)
    rule: Rule = Coupled(Noise(CODES, False), relaxation)
    if sampling.greedy:
        rule = GreedyRelaxed(CODES, relaxation)
    take = SelfDraftProposer.observe

    def observe(
        own: SelfDraftProposer, tree: DraftTree, perturbed: Tensor, features: Tensor, of: Verdict
    ) -> None:
        nonlocal borrowed
        choice = perturbed.argmax(dim=-1).gather(1, of.path)
        borrowed += int((choice != of.codes)[0, : of.count[0]].sum())
        take(own, tree, perturbed, features, of)
        seen.append(own._codes[0, 1 : own._position[0]].tolist())

    monkeypatch.setattr(SelfDraftProposer, "observe", observe)
    method, target = Method("tree", rule, kind), make_target(1, sampling.branches)
    drafter = method.proposer(target, sampling)
    monkeypatch.setattr(Method, "proposer", lambda *given: drafter)
    for request in IMAGES:
        seen.clear()
        (image,) = finished(method.steps(target, sampling, [request]))
        assert seen == [image.codes[1 : step.position + step.accepted + 1] for step in image.steps]
        if isinstance(drafter, HybridProposer):
            last = image.steps[-1]
            shown = drafter.eagle._codes[0, : last.accepted + 1].tolist()
            assert shown == image.codes[last.position :]
    assert borrowed > 2  # codes committed that were no choice of the target


def test_positions_never_scored_copy_their_neighbours() -> None:
    chains = {}
    for seed_cells in SEED_CELLS:
        proposer = self_drafter(Grid(2, 3), 2, seed_cells)
        proposer._codes[0, :4] = torch.tensor([5, 6, 7, 8])
        proposer._position[0] = 4
        tree = proposer.propose(shapes(2, 2, 4), torch.tensor([8]), silent, [3])
        chains[seed_cells] = tree.codes[0].tolist()
    assert chains["above"][:3] == [8, 6, 7] and chains["left"][:3] == [8, 8, 8]
    assert chains["both"][:3] == [8, 6, 7] and 8 in chains["both"][3:]


def copied(
    grid: Grid, done: list[int], chain: list[int], scored: int, seed_cells: str
) -> list[tuple[int, int]]:
    """What _neighbours says, cell by cell: of a chain behind the codes done, the first `scored` known."""
    codes, found = list(done), []
    for step in range(min(len(chain), grid.size - len(done))):
        position, left = len(done) + step, (done + chain[:scored])[-1]
        above = codes[position - grid.width] if position >= grid.width else left
        first, second = (left, above) if seed_cells == "left" else (above, left)
        codes.append(chain[step] if step < scored else first)
        found.append((codes[-1], second))
    return found


@pytest.mark.parametrize("seed_cells", SEED_CELLS)
def test_seeds_are_those_of_a_plain_loop(seed_cells: str) -> None:
    draw, grid = random.Random(5), Grid(4, 3)
    for _ in range(200):
        cache = self_drafter(grid, 2, seed_cells)
        length = draw.randrange(1, grid.size + 3)
        done = [draw.randrange(CODES) for _ in range(draw.randrange(1, grid.size))]
        chain = [draw.randrange(CODES) for _ in range(length)]
        scored = draw.randrange(length + 1)
        cache._codes[0, : len(done)], cache._position[0] = torch.tensor(done), len(done)
        at, fresh = cache._ahead(torch.arange(length)), torch.arange(length)[None] >= scored
        first, second = cache._neighbours(at, torch.tensor([chain]), fresh)
        expected = copied(grid, done, chain, scored, seed_cells)
        pairs = list(zip(first[0].tolist(), second[0].tolist(), strict=True))
        inside = range(len(expected))
        assert [pairs[n][0] for n in inside] == [expected[n][0] for n in inside]
        assert [pairs[n] for n in inside if fresh[0, n]] == [expected[n] for n in inside if fresh[0, n]]


def test_unknown_seed_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="below"):
        Named("self-draft", Sampling(), SHAPES["tree"], seed_cells="below")
