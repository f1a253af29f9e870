"""Self-drafting: drafts worth having, and what is remembered."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from adt_tree.grid import Grid, Raster
from adt_tree.method import METHODS, Lantern, Method
from adt_tree.policy import TreeShape
from adt_tree.proposers.candidates import BELOW, HISTORY, LATE, NEWEST, Candidates, History, grow_chains
from adt_tree.proposers.self_draft import SelfDraftProposer
from adt_tree.sampling import Sampling
from adt_tree.tree import BatchShapes, ancestor_mask
from adt_tree.verify import Verdict
from tests.decoding import CPU, tree_of
from tests.test_engine import CODES, FILTERED, GREEDY, IMAGES, LONG, TREE, made, reference

NOTHING = torch.empty(0)  # the target's features and the noise, which self-drafting does not read
SEED_CELLS = METHODS["self-draft"].seed_cells
RASTER = Grid(3, 5)
POSITIONS, WORDS = 3, 4  # of the small histories
Tree = tuple[list[int], list[int]]  # codes and parents
SIBLINGS: Tree = ([3, 1, 7, 1, 1], [0, 0, 0, 1, 2])  # two children of the root, each with a child of its own


def self_drafter(grid: Grid = RASTER, seed_cells: str = "above") -> SelfDraftProposer:
    """A fresh proposer of one image, with two candidates a position."""
    return SelfDraftProposer(grid, 1, 2, seed_cells, CODES, CPU)


def favour(codes: list[int]) -> Tensor:
    """log p [1, N, 9] whose best code at node n is codes[n], and the next best the code after it."""
    log_p = torch.full((1, len(codes), 9), -9.0)
    for node, code in enumerate(codes):
        log_p[0, node, code], log_p[0, node, (code + 1) % 9] = 0.0, -1.0
    return log_p


def observed(
    tree: Tree, best: list[int], path: list[int], codes: list[int], own: SelfDraftProposer | None = None
) -> SelfDraftProposer:
    """A proposer, fresh or given, after a pass that said `best` behind the nodes of a tree, of which path was
    accepted and codes committed."""
    own = own or self_drafter()
    padded = [torch.tensor([row + [0] * (4 - len(row))]) for row in (path, codes)]
    verdict = Verdict(padded[0], torch.tensor([len(codes)]), padded[1])
    own.observe(tree_of(*(torch.tensor([row]) for row in tree)), favour(best), NOTHING, verdict)
    return own


def shapes(*limits: tuple[int, int, int]) -> BatchShapes:
    """Depth, width and budget of each image."""
    return BatchShapes.of([TreeShape(*own) for own in limits], CPU)


def drafted(own: SelfDraftProposer, limits: tuple[int, int, int], root: int) -> list[int]:
    """Codes of the tree that it proposes."""
    tree = own.propose(shapes(limits), torch.tensor([root]), lambda levels: NOTHING, [3])
    return tree.codes[0].tolist()


@pytest.mark.parametrize("seed_cells", SEED_CELLS)
def test_stale_choices_are_accepted_more_often_than_chance(seed_cells: str) -> None:
    images = list(made(Method("self-draft", Sampling(), TREE, seed_cells=seed_cells), 2).decode(IMAGES))
    calls = sum(image.target_calls for image in images)
    assert sum(len(image.codes) - 1 for image in images) / calls > 1.25


def test_the_next_chain_is_the_latest_distribution_on_the_best_path() -> None:
    """Node 4 is an alternative to node 1 and goes on to node 5: accepted, its distribution replaces the
    chain's behind it. Positions 1 and 2 are committed; 3 comes from node 5 (below the accepted node), 4 from
    node 3 of the chain. Node 2 read position 3 as well, and said 4."""
    own = observed(([3, 1, 1, 1, 7, 6], [0, 0, 1, 2, 0, 4]), [7, 2, 4, 5, 8, 2], [0, 4], [7, 8])
    assert drafted(own, (2, 1, 2), 8) == [8, 2, 5]
    assert drafted(own, (2, 2, 3), 8) == [8, 2, 5, 4]


def test_where_all_siblings_failed_the_main_chains_distribution_is_kept() -> None:
    """Code 6 is committed beside 1, behind which 2 is likeliest, and 7, behind which 4 is."""
    assert drafted(observed(SIBLINGS, [6, 2, 4, 5, 8], [0], [6]), (2, 1, 2), 6) == [6, 2, 5]


def test_a_chain_comes_first_and_its_alternatives_by_their_paths() -> None:
    """Two levels of three candidates, the last of the second level missing: the chain, then two and one; a
    second image whose tree may be one deep and two wide."""
    gain = torch.tensor([[[0.5, 0.25, 0.1], [0.8, 0.1, 0.0]]]).log().expand(2, -1, -1)
    codes = torch.tensor([5, 6, 1, 7, 8, 2]).view(1, 2, 3).expand(2, -1, -1)
    found, roots = Candidates(codes, gain), torch.tensor([9, 4])
    whole = grow_chains(found, shapes((2, 3, 9), (1, 2, 9)), roots)
    assert whole.codes[0, :6].tolist() == [9, 5, 7, 6, 1, 8] and whole.codes[1, :3].tolist() == [4, 5, 6]
    assert whole.valid.sum(dim=1).tolist() == [6, 3]
    assert whole.parents[0].tolist() == [0, 0, 1, 0, 0, 1, 0]
    assert whole.depths[0, :6].tolist() == [0, 1, 2, 1, 1, 2]
    said = whole.confidence[0, :6].exp()  # of the path: the root, 0.5, 0.5 * 0.8, 0.25, 0.1, 0.5 * 0.1
    assert said.tolist() == pytest.approx([1, 0.5, 0.4, 0.25, 0.1, 0.05])
    small = grow_chains(found, shapes((2, 3, 3), (1, 2, 1)), roots)
    for tree in (whole, small):
        assert torch.equal(tree.ancestors, ancestor_mask(tree.parents, 2))
        assert tree.codes[0, :4].tolist() == [9, 5, 7, 6] and tree.codes[1, :2].tolist() == [4, 5]
    assert small.nodes == 4 and small.valid.sum(dim=1).tolist() == [4, 2]


def test_an_older_distribution_below_the_committed_code_comes_first() -> None:
    """An earlier pass read position 2 below code 7 and said 4, and position 3 below 4 and said 5; the last
    one read them below other codes, and then 7 was committed. The chain follows what was said below its
    own codes, and what else was said there counts for less."""
    cache = self_drafter()
    said = torch.tensor([[[-0.1, -2.4]]])
    at, above, order = (torch.tensor([pair]) for pair in ((2, 3), (7, 4), (0, 1)))
    cache.history.write(at, above, torch.tensor([[[4, 5], [5, 4]]]), said.expand(1, 2, 2), order)
    observed(([3, 1, 2, 1, 1], SIBLINGS[1]), [7, 3, 5, 6, 8], [0], [7], cache)
    found = cache.candidates(2, 2)
    assert found.codes[0, :, 0].tolist() == [4, 5]
    # Below 7 once, beside two distributions of the last pass, one of them the newest.
    mass, others = BELOW + LATE + LATE * NEWEST, favour([3, 5]).softmax(dim=-1)[0]
    four = BELOW * math.exp(-0.1) + LATE * NEWEST * float(others[0, 4])
    assert float(found.confidence[0, 0, 0].exp()) == pytest.approx(four / mass, abs=1e-4)


@pytest.mark.parametrize("sampling", [Sampling(), GREEDY])
@pytest.mark.parametrize("name", ["self-draft", "eagle-2"])
def test_under_relaxation_what_was_committed_is_remembered(name: str, sampling: Sampling) -> None:
    """A relaxed rule commits a draft in its choice's place. The store, which later cells are copied from,
    holds that draft after every step, and so does what the network is shown."""
    engine = made(Method(name, sampling, TREE, Lantern(0.8, 7)), 1)
    proposer, codes = engine.drafting[0], {}
    for step in engine.steps(IMAGES):
        ((_, image),) = step.images
        codes[image.name] = image.codes
        if name == "self-draft":
            assert proposer._codes[0, 1 : len(image.codes)].tolist() == image.codes[1:]
        else:
            last = image.steps[-1]
            assert proposer._codes[0, : last.accepted + 1].tolist() == image.codes[last.position :]
    exact = reference(sampling)
    assert sum(codes[image] != exact[image] for image in exact) > 2  # drafts that were no choice


def test_positions_never_scored_copy_their_neighbours() -> None:
    chains = {}
    for seed_cells in SEED_CELLS:
        proposer = self_drafter(Grid(2, 3), seed_cells)
        proposer._codes[0, :4] = torch.tensor([5, 6, 7, 8])
        proposer._position[0] = 4
        chains[seed_cells] = drafted(proposer, (2, 2, 4), 8)
    assert chains["above"][:3] == [8, 6, 7] and chains["left"][:3] == [8, 8, 8]
    assert chains["both"][:3] == [8, 6, 7] and 8 in chains["both"][3:]


def copied(grid: Grid, done: list[int], chain: list[int], scored: int, cells: str) -> list[tuple[int, int]]:
    """What _neighbours says, cell by cell: of a chain behind the codes done, the first `scored` known."""
    codes, found, covering = list(done), [], grid.covering()
    for step in range(min(len(chain), grid.size - len(done))):
        position, left = len(done) + step, (done + chain[:scored])[-1]
        cell = grid.cell(position)
        above = codes[position - grid.rasters[cell.raster].width] if cell.row else left
        first, second = (left, above) if cells == "left" else (above, left)
        codes.append(chain[step] if step < scored else first)
        first = codes[-1]
        if cells == "preview" and step >= scored and 0 <= covering[position] < len(done) + scored:
            first = codes[covering[position]]
        found.append((first, second))
    return found


@pytest.mark.parametrize("grid", [Grid(4, 3), Grid(3, 4, before=(Raster(2, 3),))], ids=["one", "two"])
@pytest.mark.parametrize("seed_cells", SEED_CELLS)
def test_seeds_are_those_of_a_plain_loop(seed_cells: str, grid: Grid) -> None:
    draw = random.Random(5)
    for _ in range(200):
        cache = self_drafter(grid, seed_cells)
        length = draw.randrange(1, grid.size + 3)
        done = [draw.randrange(CODES) for _ in range(draw.randrange(1, grid.size))]
        chain = [draw.randrange(CODES) for _ in range(length)]
        scored = draw.randrange(length + 1)
        cache._codes[0, : len(done)], cache._position[0] = torch.tensor(done), len(done)
        at = cache._ahead(torch.arange(length))
        fresh = (torch.arange(length)[None] >= scored) | (at == grid.size)  # nothing outside is ever scored
        first, second = cache._neighbours(at, torch.tensor([chain]), fresh)
        expected = copied(grid, done, chain, scored, seed_cells)
        found = list(zip(first[0].tolist(), second[0].tolist(), strict=True))[: len(expected)]
        assert [own for own, _ in found] == [own for own, _ in expected]
        if seed_cells == "both":  # the only one that drafts both
            assert found[scored:] == expected[scored:]


@pytest.mark.parametrize("sampling", [Sampling(), GREEDY, FILTERED])
def test_no_two_children_of_a_node_share_a_code(sampling: Sampling) -> None:
    """Two would both be hits of the coupled rule, and the walk takes at most one child per node."""
    engine = made(Method("self-draft", sampling, LONG, seed_cells="both"), 2)
    seen = [step.tree for step in engine.steps(IMAGES)]
    assert len(seen) > 10 and max(tree.nodes for tree in seen) > 12
    for grown in seen:
        for image in range(2):
            nodes = grown.valid[image].nonzero().flatten().tolist()[1:]
            named = [(int(grown.parents[image, n]), int(grown.codes[image, n])) for n in nodes]
            assert len(set(named)) == len(named)
            assert all(int(grown.parents[image, n]) < n for n in nodes)
            above = grown.depths[image][grown.parents[image, nodes]]
            assert torch.equal(above + 1, grown.depths[image, nodes])


class Plain:
    """A store that forgets nothing but the oldest: an image's entries by position, the newest first, as
    (pass, above, codes, confidence)."""

    def __init__(self) -> None:
        self.entries: list[list[tuple[int, int, list[int], list[float]]]] = [[] for _ in range(POSITIONS + 1)]

    def write(self, turn: int, entries: list[tuple[int, int, int, list[int], list[float]]]) -> None:
        """(order, position, above, codes, confidence) of a pass."""
        for position, held in enumerate(self.entries[:-1]):
            mine = sorted(entry for entry in entries if entry[1] == position)
            held[:0] = [(turn, above, codes, said) for _, _, above, codes, said in mine]
            del held[HISTORY:]

    def best(self, position: int, above: int) -> int:
        """The best code of the newest entry read below a code, else of the newest."""
        held = self.entries[position]
        return next((entry for entry in held if entry[1] == above), held[0])[2][0]

    def mixture(self, position: int, above: int) -> list[float]:
        """Mass by code."""
        mass, total, held = [0.0] * WORDS, 0.0, self.entries[position]
        for number, (turn, below, codes, said) in enumerate(held):
            weight = BELOW if below == above else 1.0
            weight *= (LATE if turn == held[0][0] else 1.0) * (NEWEST if number == 0 else 1.0)
            total += weight
            for code, value in zip(codes, said, strict=True):
                mass[code] += weight * math.exp(value)
        return [part / total for part in mass]


def passes(slots: int, nodes: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Entries of one pass as History.write takes them, some at the position that is not kept."""
    rng = torch.Generator().manual_seed(seed)
    at = torch.randint(0, POSITIONS + 1, (slots, nodes), generator=rng)
    above = torch.randint(0, WORDS, (slots, nodes), generator=rng)
    codes = torch.rand((slots, nodes, WORDS), generator=rng).topk(2).indices
    said = torch.rand((slots, nodes, 2), generator=rng) - 2.0
    order = torch.stack([torch.randperm(nodes, generator=rng) for _ in range(slots)])
    return at, above, codes, said, order


@pytest.mark.parametrize("nodes", [2, 9, 5 * HISTORY])
def test_the_entries_around_a_position(nodes: int) -> None:
    """Passes of a few nodes, and of more for one position than are kept."""
    slots = 2
    seen, plain = History(POSITIONS, slots, 2, CPU), [Plain() for _ in range(slots)]
    at = torch.arange(POSITIONS + 1).expand(slots, -1)
    for turn in range(30):
        written = passes(slots, nodes, turn)
        seen.write(*written)
        for slot, own in enumerate(plain):
            where, above, codes, said, order = (part[slot].tolist() for part in written)
            own.write(turn, list(zip(order, where, above, codes, said, strict=True)))
        if turn == 20:
            seen.clear(1)
            plain[1] = Plain()
        around = seen.entries(at)
        newest = around.newest()
        for code in range(WORDS):
            above = torch.full_like(at, code)
            below, (mixed, said) = around.below(above), around.mixture(above, WORDS, WORDS)
            assert torch.equal(around.mixture(above, 1, WORDS)[1], said[..., :1])
            for slot, own in enumerate(plain):
                for position in range(POSITIONS + 1):
                    held, here = own.entries[position], (slot, position)
                    if not held:
                        assert not said[here].isfinite().any()
                        continue
                    assert newest[here] == held[0][2][0] and below[here] == own.best(position, code)
                    mass = torch.tensor(own.mixture(position, code))
                    torch.testing.assert_close(said[here].exp(), mass[mixed[here]])
                    torch.testing.assert_close(said[here].exp(), mass.sort(descending=True).values)
