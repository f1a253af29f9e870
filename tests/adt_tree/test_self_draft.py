"""Self-drafting: its drafts are accepted, and its history holds the right distributions."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from adt_tree.grid import Grid, Raster
from adt_tree.method import METHODS, Method
from adt_tree.noise import PositionNoise
from adt_tree.policy import TreeShape
from adt_tree.proposers.candidates import BELOW, HISTORY, LATE, NEWEST, Candidates, History, grow_chains
from adt_tree.proposers.neighbours import Neighbours
from adt_tree.proposers.self_draft import SelfDraftProposer
from adt_tree.roles import StepStart
from adt_tree.sampling import PassSampling
from adt_tree.settings import Sampling
from adt_tree.tree import BatchShapes, ancestor_mask
from adt_tree.verify import Verdict
from tests.adt_tree.test_engine import CODES, FILTERED, IMAGES, LONG, TREE, new_engine
from tests.support.decoding import CPU, target_of, tree_of

NOTHING = torch.empty(0)  # stands for the target's features and the noise, which self-drafting does not read
SEED_CELLS = METHODS["self-draft"].seed_cells
POSITIONS, WORDS = 3, 4  # positions and codes of the small histories
Tree = tuple[list[int], list[int]]  # codes and parents
SIBLINGS: Tree = ([3, 1, 7, 1, 1], [0, 0, 0, 1, 2])  # two children of the root, each with a child of its own


def self_drafter() -> SelfDraftProposer:
    """Returns a new proposer for one image, with two candidates per position."""
    target = target_of(Grid(3, 5), CODES)
    return SelfDraftProposer(target, 2, Neighbours(target, "above"))


def favour(codes: list[int]) -> Tensor:
    """Returns log p [1, N, 9]: the best code at node n is codes[n], the second best the code after it."""
    log_p = torch.full((1, len(codes), 9), -9.0)
    for node, code in enumerate(codes):
        log_p[0, node, code], log_p[0, node, (code + 1) % 9] = 0.0, -1.0
    return log_p


def observed(
    tree: Tree, best: list[int], path: list[int], codes: list[int], proposer: SelfDraftProposer | None = None
) -> SelfDraftProposer:
    """Returns a proposer after a pass over a tree: `proposer`, or a new one. `best` holds the best code after
    every node; the codes of `path` were accepted and `codes` committed."""
    proposer = proposer or self_drafter()
    padded = [torch.tensor([row + [0] * (4 - len(row))]) for row in (path, codes)]
    verdict = Verdict(padded[0], torch.tensor([len(codes)]), padded[1])
    drafts = tree_of(*(torch.tensor([row]) for row in tree))
    proposer.observe(drafts, favour(best), NOTHING, verdict, torch.tensor([1]))
    return proposer


def shapes(*limits: tuple[int, int, int]) -> BatchShapes:
    """Returns the shape of each image's tree: depth, width and budget."""
    return BatchShapes.of([TreeShape(*limit) for limit in limits], CPU)


def drafted(proposer: SelfDraftProposer, limits: tuple[int, int, int], root: int, position: int) -> list[int]:
    """Returns the codes of the tree that a proposer drafts. position: of the code below the root."""
    roots, positions = torch.tensor([root]), torch.tensor([position])
    settings = PassSampling.uniform(Sampling(), CPU)
    start = StepStart(
        shapes(limits), roots, positions, lambda levels: PositionNoise(NOTHING, None), 3, settings
    )
    tree = proposer.propose(start)
    return tree.codes[0].tolist()


@pytest.mark.parametrize("seed_cells", SEED_CELLS)
def test_stale_choices_are_accepted_more_often_than_chance(seed_cells: str) -> None:
    images = list(new_engine(Method("self-draft", Sampling(), TREE, seed_cells=seed_cells), 2).decode(IMAGES))
    calls = sum(image.target_calls for image in images)
    assert sum(len(image.codes) - 1 for image in images) / calls > 1.25


def test_the_next_chain_is_the_latest_distribution_on_the_best_path() -> None:
    """Node 4 is accepted, so positions 1 and 2 are committed. Nodes 2 and 5 scored position 3: the chain
    takes the best code of node 5, which is below node 4, and a leaf takes that of node 2. Only node 3 scored
    position 4.

        nodes              0 +- 1 -- 2 -- 3       best codes    7 +- 2 -- 4 -- 5
                             +- 4 -- 5                            +- 8 -- 2
        score position     1    2    3    4
    """
    proposer = observed(([3, 1, 1, 1, 7, 6], [0, 0, 1, 2, 0, 4]), [7, 2, 4, 5, 8, 2], [0, 4], [7, 8])
    assert drafted(proposer, (2, 1, 2), 8, 3) == [8, 2, 5]
    assert drafted(proposer, (2, 2, 3), 8, 3) == [8, 2, 5, 4]


def test_where_all_siblings_failed_the_main_chains_distribution_is_kept() -> None:
    """Code 6 is committed, so the drafts 1 and 7 both failed. Position 2 was scored below 1, in the main
    chain, with best code 2, and below 7 with best code 4. The next chain begins with 2."""
    assert drafted(observed(SIBLINGS, [6, 2, 4, 5, 8], [0], [6]), (2, 1, 2), 6, 2) == [6, 2, 5]


def test_a_chain_comes_first_and_its_alternatives_by_their_paths() -> None:
    """There are two levels of three candidates; the last one of the second level is missing. The tree of the
    first image is the chain 5, 7 with the leaves 6, 1 of level 1 and 8 of level 2. The tree of the second
    image may have depth 1 and width 2."""
    gain = torch.tensor([[[0.5, 0.25, 0.1], [0.8, 0.1, 0.0]]]).log().expand(2, -1, -1)
    codes = torch.tensor([5, 6, 1, 7, 8, 2]).view(1, 2, 3).expand(2, -1, -1)
    candidates, roots = Candidates(codes, gain), torch.tensor([9, 4])
    whole = grow_chains(candidates, shapes((2, 3, 9), (1, 2, 9)), roots)
    assert whole.codes[0, :6].tolist() == [9, 5, 7, 6, 1, 8] and whole.codes[1, :3].tolist() == [4, 5, 6]
    assert whole.valid.sum(dim=1).tolist() == [6, 3]
    assert whole.parents[0].tolist() == [0, 0, 1, 0, 0, 1, 0]
    assert whole.depths[0, :6].tolist() == [0, 1, 2, 1, 1, 2]
    confidence = whole.confidence[0, :6].exp()  # of the path: the root, 0.5, 0.5 * 0.8, 0.25, 0.1, 0.5 * 0.1
    assert confidence.tolist() == pytest.approx([1, 0.5, 0.4, 0.25, 0.1, 0.05])
    small = grow_chains(candidates, shapes((2, 3, 3), (1, 2, 1)), roots)
    for tree in (whole, small):
        assert torch.equal(tree.ancestors, ancestor_mask(tree.parents, 2))
        assert tree.codes[0, :4].tolist() == [9, 5, 7, 6] and tree.codes[1, :2].tolist() == [4, 5]
    assert small.nodes == 4 and small.valid.sum(dim=1).tolist() == [4, 2]


def test_an_older_distribution_below_the_committed_code_comes_first() -> None:
    """An earlier pass scored position 2 below code 7, with best code 4, and position 3 below 4, with best
    code 5. The last pass scored them below other codes, and then 7 was committed. The chain follows the
    distributions below its codes; the others weigh less."""
    proposer = self_drafter()
    confidence = torch.tensor([[[-0.1, -2.4]]])
    at, above, order = (torch.tensor([pair]) for pair in ((2, 3), (7, 4), (0, 1)))
    proposer.history.write(at, above, torch.tensor([[[4, 5], [5, 4]]]), confidence.expand(1, 2, 2), order)
    observed(([3, 1, 2, 1, 1], SIBLINGS[1]), [7, 3, 5, 6, 8], [0], [7], proposer)
    candidates = proposer.candidates(torch.tensor([2]), 2, 2)
    assert candidates.codes[0, :, 0].tolist() == [4, 5]
    # The weights of three entries: one below 7, and two of the last pass, one of them the newest entry.
    mass, others = BELOW + LATE + LATE * NEWEST, favour([3, 5]).softmax(dim=-1)[0]
    four = BELOW * math.exp(-0.1) + LATE * NEWEST * float(others[0, 4])
    assert float(candidates.confidence[0, 0, 0].exp()) == pytest.approx(four / mass, abs=1e-4)


def copied(
    grid: Grid, committed: list[int], chain: list[int], scored: int, cells: str
) -> list[tuple[int, int]]:
    """Returns the pairs of Neighbours.fill(), computed cell by cell, for a chain behind committed codes. The
    first `scored` codes of the chain are known."""
    codes, pairs = list(committed), []
    for step in range(min(len(chain), grid.size - len(committed))):
        position, left = len(committed) + step, (committed + chain[:scored])[-1]
        cell = grid.cell(position)
        above = codes[position - grid.rasters[cell.raster].width] if cell.row else left
        first, second = (left, above) if cells == "left" else (above, left)
        codes.append(chain[step] if step < scored else first)
        pairs.append((codes[-1], second))
    return pairs


@pytest.mark.parametrize("grid", [Grid(4, 3), Grid(3, 4, before=(Raster(2, 3),))], ids=["one", "two"])
@pytest.mark.parametrize("seed_cells", SEED_CELLS)
def test_seeds_are_those_of_a_plain_loop(seed_cells: str, grid: Grid) -> None:
    rng = random.Random(5)
    for _ in range(200):
        neighbours = Neighbours(target_of(grid, CODES), seed_cells)
        length = rng.randrange(1, grid.size + 3)
        committed = [rng.randrange(CODES) for _ in range(rng.randrange(1, grid.size))]
        chain = [rng.randrange(CODES) for _ in range(length)]
        scored = rng.randrange(length + 1)
        count, zero = torch.tensor([len(committed)]), torch.zeros(1, dtype=torch.int64)
        neighbours.commit(zero, torch.tensor([committed]), count)
        at = neighbours.ahead(count, torch.arange(length))
        # No position outside the image is ever scored.
        fresh = (torch.arange(length)[None] >= scored) | (at == grid.size)
        first, second = neighbours.fill(at, torch.tensor([chain]), fresh)
        expected = copied(grid, committed, chain, scored, seed_cells)
        pairs = list(zip(first[0].tolist(), second[0].tolist(), strict=True))[: len(expected)]
        assert [code for code, _ in pairs] == [code for code, _ in expected]
        if seed_cells == "both":  # the only setting that drafts both codes
            assert pairs[scored:] == expected[scored:]


@pytest.mark.parametrize("sampling", [Sampling(), FILTERED])
def test_no_two_children_of_a_node_share_a_code(sampling: Sampling) -> None:
    """Otherwise the coupled rule would accept both, and a path continues with one child."""
    engine = new_engine(Method("self-draft", sampling, LONG, seed_cells="both"), 2)
    seen = [step.tree for step in engine.steps(IMAGES)]
    assert len(seen) > 10 and max(tree.nodes for tree in seen) > 12
    for grown in seen:
        for image in range(2):
            nodes = grown.valid[image].nonzero().flatten().tolist()[1:]
            children = [(int(grown.parents[image, n]), int(grown.codes[image, n])) for n in nodes]
            assert len(set(children)) == len(children)
            assert all(int(grown.parents[image, n]) < n for n in nodes)
            above = grown.depths[image][grown.parents[image, nodes]]
            assert torch.equal(above + 1, grown.depths[image, nodes])


class ListHistory:
    """A history of one image as lists: for each position its entries, the newest first, as (pass, code above,
    codes, confidence)."""

    def __init__(self) -> None:
        self.entries: list[list[tuple[int, int, list[int], list[float]]]] = [[] for _ in range(POSITIONS + 1)]

    def write(self, turn: int, entries: list[tuple[int, int, int, list[int], list[float]]]) -> None:
        """Stores the (order, position, above, codes, confidence) of a pass."""
        for position, stored in enumerate(self.entries[:-1]):
            latest = sorted(entry for entry in entries if entry[1] == position)
            stored[:0] = [(turn, above, codes, confidence) for _, _, above, codes, confidence in latest]
            del stored[HISTORY:]

    def best(self, position: int, above: int) -> int:
        """Returns the best code of the newest entry that was scored below a code, or else of the newest
        entry."""
        held = self.entries[position]
        return next((entry for entry in held if entry[1] == above), held[0])[2][0]

    def mixture(self, position: int, above: int) -> list[float]:
        """Returns the mass of every code."""
        mass, total, held = [0.0] * WORDS, 0.0, self.entries[position]
        for number, (turn, stored_above, codes, confidence) in enumerate(held):
            weight = BELOW if stored_above == above else 1.0
            weight *= (LATE if turn == held[0][0] else 1.0) * (NEWEST if number == 0 else 1.0)
            total += weight
            for code, value in zip(codes, confidence, strict=True):
                mass[code] += weight * math.exp(value)
        return [part / total for part in mass]


def passes(slots: int, nodes: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Returns the entries of a pass as History.write takes them. Some are at position P, and so are
    dropped."""
    rng = torch.Generator().manual_seed(seed)
    at = torch.randint(0, POSITIONS + 1, (slots, nodes), generator=rng)
    above = torch.randint(0, WORDS, (slots, nodes), generator=rng)
    codes = torch.rand((slots, nodes, WORDS), generator=rng).topk(2).indices
    confidence = torch.rand((slots, nodes, 2), generator=rng) - 2.0
    order = torch.stack([torch.randperm(nodes, generator=rng) for _ in range(slots)])
    return at, above, codes, confidence, order


@pytest.mark.parametrize("nodes", [2, 9, 5 * HISTORY])
def test_the_entries_of_a_position(nodes: int) -> None:
    """The history equals lists after every pass. Passes have few nodes, or more nodes for a position than the
    history stores."""
    slots = 2
    history, expected = History(POSITIONS, slots, 2, CPU), [ListHistory() for _ in range(slots)]
    at = torch.arange(POSITIONS + 1).expand(slots, -1)
    for turn in range(30):
        written = passes(slots, nodes, turn)
        history.write(*written)
        for slot, store in enumerate(expected):
            where, above, codes, confidence, order = (part[slot].tolist() for part in written)
            store.write(turn, list(zip(order, where, above, codes, confidence, strict=True)))
        if turn == 20:
            history.clear(1)
            expected[1] = ListHistory()
        entries = history.entries(at)
        newest = entries.newest()
        for code in range(WORDS):
            above = torch.full_like(at, code)
            below, (mixed, confidence) = entries.below(above), entries.mixture(above, WORDS)
            assert torch.equal(entries.mixture(above, 1)[1], confidence[..., :1])
            for slot, store in enumerate(expected):
                for position in range(POSITIONS + 1):
                    held, here = store.entries[position], (slot, position)
                    if not held:
                        assert not confidence[here].isfinite().any()
                        continue
                    assert newest[here] == held[0][2][0] and below[here] == store.best(position, code)
                    mass = torch.tensor(store.mixture(position, code))
                    held_mass = mass[mixed[here]].masked_fill(~confidence[here].isfinite(), 0.0)
                    torch.testing.assert_close(confidence[here].exp(), held_mass)
                    torch.testing.assert_close(confidence[here].exp(), mass.sort(descending=True).values)
