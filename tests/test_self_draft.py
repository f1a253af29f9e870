"""Self-drafting and the hybrid: the AR baseline's images, drafts worth having, and what is remembered."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from adt_tree.candidates import BELOW, LATE, NEWEST, SEED_CELLS, CandidateCache, Candidates, grow_chains
from adt_tree.decode import speculative
from adt_tree.grid import Grid
from adt_tree.hybrid import HybridProposer
from adt_tree.method import Method
from adt_tree.noise import Noise
from adt_tree.policy import AdjacencyAdaptive, Fixed, Policy, TreeShape
from adt_tree.records import Decoded
from adt_tree.relax import Relaxation, nearest_table
from adt_tree.roles import Proposer
from adt_tree.sampling import Sampling
from adt_tree.self_draft import SelfDraftProposer
from adt_tree.tree import BatchShapes, DraftTree, ancestor_mask
from adt_tree.verify import Coupled, GreedyRelaxed, Rule, Verdict
from models.drafter import EagleDrafter
from models.target import ARTarget
from tests.decoding import CPU, codes_of, tree_of
from tests.test_engine import ADAPT, CODES, GRID, IMAGES, SAMPLINGS, make_target, net, reference

SHAPES = {"chain": TreeShape(6, 1, 6), "tree": TreeShape(5, 3, 14), "longer than a row": TreeShape(11, 2, 20)}
KINDS, POLICIES = ("self-draft", "hybrid"), (*SHAPES, "adaptive")


def self_drafter(grid: Grid, slots: int, candidates: int, seed_cells: str) -> SelfDraftProposer:
    """A fresh proposer."""
    return SelfDraftProposer(CandidateCache(grid, slots, candidates, seed_cells, CODES, CPU))


def hybrid(target: ARTarget, sampling: Sampling, slots: int, candidates: int) -> HybridProposer:
    """A fresh proposer with the engine tests' drafter."""
    drafter = EagleDrafter(net(), target, max(s.depth for s in SHAPES.values()), candidates)
    cache = CandidateCache(GRID, slots, candidates, "above", CODES, CPU)
    return HybridProposer(drafter, sampling, cache, slots)


def proposer_of(
    kind: str, target: ARTarget, sampling: Sampling, slots: int, seed_cells: str = "above"
) -> Proposer:
    """A fresh one of five candidates."""
    if kind == "self-draft":
        return self_drafter(GRID, slots, 5, seed_cells)
    return hybrid(target, sampling, slots, 5)


def policy_of(shape: str, slots: int) -> Policy:
    """One of SHAPES, or adaptive."""
    return AdjacencyAdaptive(ADAPT, slots) if shape == "adaptive" else Fixed(SHAPES[shape])


def drafted(
    sampling: Sampling, slots: int, shape: str, seed_cells: str = "above", kind: str = "self-draft"
) -> dict[str, Decoded]:
    """Images drafted without or with a network, by name."""
    rule, target = Coupled(Noise(CODES, silent=sampling.greedy)), make_target(slots, sampling.branches)
    proposer = proposer_of(kind, target, sampling, slots, seed_cells)
    images = speculative(target, proposer, policy_of(shape, slots), rule, IMAGES, sampling)
    return {image.name: image for image in images}


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("shape", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_images_are_those_of_the_ar_baseline(kind: str, shape: str, name: str, slots: int) -> None:
    images = drafted(SAMPLINGS[name], slots, shape, kind=kind).values()
    assert codes_of(images) == reference(name)
    assert all((image.drafter_calls == 0) == (kind == "self-draft") for image in images)


@pytest.mark.parametrize("seed_cells", SEED_CELLS)
def test_stale_choices_are_accepted_more_often_than_chance(seed_cells: str) -> None:
    images = drafted(SAMPLINGS["sampled"], 2, "tree", seed_cells).values()
    calls = sum(image.target_calls for image in images)
    assert sum(len(image.codes) - 1 for image in images) / calls > 1.25


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_does_not_depend_on_the_last_one_in_its_slot(kind: str) -> None:
    alone, queued = (
        {
            name: [(s.position, s.accepted, s.nodes) for s in image.steps]
            for name, image in drafted(SAMPLINGS["sampled"], slots, "tree", kind=kind).items()
        }
        for slots in (5, 1)
    )
    assert alone == queued


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
    proposer = self_drafter(Grid(3, 5), 1, 2, "above")
    tree = tree_of(torch.tensor([[3, 1, 1, 1, 7, 6]]), torch.tensor([[0, 0, 1, 2, 0, 4]]))
    log_p = favour([7, 2, 4, 5, 8, 2])
    proposer.observe(tree, log_p, torch.empty(0), verdict([0, 4], [7, 8]))
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
    proposer = self_drafter(Grid(3, 5), 1, 2, "above")
    proposer.observe(lone_siblings(), favour([6, 2, 4, 5, 8]), torch.empty(0), verdict([0], [6]))
    grown = proposer.propose(shapes(2, 1, 2), torch.tensor([6]), silent, [3])
    assert grown.codes.tolist() == [[6, 2, 5]]


def test_an_older_distribution_below_the_committed_code_comes_first() -> None:
    """An earlier pass read position 2 below code 7 and said 4, and position 3 below 4 and said 5; the last
    one read them below other codes, and then 7 was committed. The chain follows what was said below its
    own codes, and what else was said there counts for less."""
    cache = CandidateCache(Grid(3, 5), 1, 2, "above", CODES, CPU)
    said = torch.tensor([[[-0.1, -2.4]]])
    at, above, order = (torch.tensor([pair]) for pair in ((2, 3), (7, 4), (0, 1)))
    cache.history.write(at, above, torch.tensor([[[4, 5], [5, 4]]]), said.expand(1, 2, 2), order)
    tree = replace(lone_siblings(), codes=torch.tensor([[3, 1, 2, 1, 1]]))
    cache.observe(tree, favour([7, 3, 5, 6, 8]), verdict([0], [7]))
    found = cache.candidates(2, 2)
    assert found.codes[0, :, 0].tolist() == [4, 5]
    # Below 7 once, beside two distributions of the last pass, one of them the newest.
    mass, others = BELOW + LATE + LATE * NEWEST, favour([3, 5]).softmax(dim=-1)[0]
    four = BELOW * math.exp(-0.1) + LATE * NEWEST * float(others[0, 4])
    assert float(found.confidence[0, 0, 0].exp()) == pytest.approx(four / mass, abs=1e-4)


@pytest.mark.parametrize("name", ["sampled", "greedy"])
@pytest.mark.parametrize("kind", KINDS)
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
    take = CandidateCache.observe

    def observe(cache: CandidateCache, tree: DraftTree, perturbed: Tensor, of: Verdict) -> None:
        nonlocal borrowed
        choice = perturbed.argmax(dim=-1).gather(1, of.path)
        borrowed += int((choice != of.codes)[0, : of.count[0]].sum())
        take(cache, tree, perturbed, of)
        seen.append(cache._codes[0, 1 : cache._position[0]].tolist())

    monkeypatch.setattr(CandidateCache, "observe", observe)
    target = make_target(1, sampling.branches)
    drafter = proposer_of(kind, target, sampling, 1)
    for request in IMAGES:
        seen.clear()
        (image,) = speculative(target, drafter, Fixed(SHAPES["tree"]), rule, [request], sampling)
        assert seen == [image.codes[1 : step.position + step.accepted + 1] for step in image.steps]
        if isinstance(drafter, HybridProposer):
            last = image.steps[-1]
            shown = drafter.eagle._codes[0, : last.accepted + 1].tolist()
            assert shown == image.codes[last.position :]
    assert borrowed > 2  # codes committed that were no choice of the target


def test_positions_never_scored_copy_their_neighbours() -> None:
    chains = {}
    for seed_cells in SEED_CELLS:
        proposer = self_drafter(Grid(2, 3), 1, 2, seed_cells)
        proposer.cache._codes[0, :4] = torch.tensor([5, 6, 7, 8])
        proposer.cache._position[0] = 4
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
        cache = CandidateCache(grid, 1, 2, seed_cells, CODES, CPU)
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
        Method("self-draft", Sampling(), SHAPES["tree"], seed_cells="below")
