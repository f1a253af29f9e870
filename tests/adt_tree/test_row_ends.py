"""Row ends: every exact method gives the images of a plain loop, every lossless one their distribution, and
the target and the drafter read a row end as the model's token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from adt_tree.engine import Engine, build
from adt_tree.grid import Grid
from adt_tree.method import METHODS, Method
from adt_tree.noise import Noise
from adt_tree.policy import AdaptiveTree, TreeShape
from adt_tree.proposers.neighbours import Neighbours
from adt_tree.roles import Request
from adt_tree.sampling import PassSampling, log_probs
from adt_tree.settings import Sampling
from adt_tree.static_trees import StaticTree
from adt_tree.verify import Coupled
from models.model import Model
from models.target import Prompt
from tests.adt_tree.test_engine import CODEBOOK, CODES, FIRST, GRID, WINDOWS, alone, decoder, net
from tests.support.decoding import accept, chain, codes_of, model_of, target_of
from tests.support.tabular import CODES as TABULAR_CODES
from tests.support.tabular import TabularModel, append, deviation, requests, table

ROW_END, MAX_PROMPT, MAX_NODES = 29, 8, 30
OPENING = [39, 31, 32]
IMAGES = [
    Request(str(n), Prompt([0, *[33 + n] * (n % 3 + 1), 38, *OPENING], OPENING), 77 + n) for n in range(4)
]
SAMPLINGS = {"sampled": Sampling(), "greedy": Sampling(temperature=0.0), "unguided": Sampling(guidance=1.0)}
ADAPT = AdaptiveTree(depth_max=7, width_max=4, depth_start=3, width_start=3, budget=14)
TREES: dict[str, TreeShape | AdaptiveTree | StaticTree | None] = {
    "ar": None, "eagle-2": TreeShape(5, 4, 14), "eagle-1": StaticTree("mc_sim_7b_63"), "adt-tree": ADAPT,
    "self-draft": TreeShape(9, 3, 20), "adt-self-draft": ADAPT, "sjd-gumbel": TreeShape(5, 1, 5),
}  # fmt: skip


def lined_model(grid: Grid, graphs: bool = False) -> Model:
    """Returns the random networks of the engine's tests as a model with row ends."""
    return model_of(decoder(), net(), replace(grid, row_ends=True), FIRST, CODEBOOK, ROW_END, graphs)


def new_engine(method: Method, slots: int, grid: Grid = GRID, graphs: bool = False) -> Engine:
    """Returns the engine of a method over them, with caches as commands allocate them."""
    return build(lined_model(grid, graphs), method, slots, MAX_PROMPT)


def with_ends(codes: Sequence[int], width: int) -> list[int]:
    """Returns the token ids of codes, with a row end behind every full row."""
    tokens = []
    for index, code in enumerate(codes):
        tokens.append(code + FIRST)
        if index % width == width - 1:
            tokens.append(ROW_END)
    return tokens


@cache
def reference(name: str, height: int, width: int) -> dict[str, list[int]]:
    """Returns the images of a plain loop: one token after another, without cache and trees, with noise keyed
    by the number of the code."""
    sampling, images = SAMPLINGS[name], {}
    rule = Coupled(Noise(CODES, silent=sampling.greedy))
    for request in IMAGES:
        codes = images[request.name] = list[int]()
        for number in range(height * width):
            logits, _ = alone(request.prompt, with_ends(codes, width), sampling.branches)
            seed, at = torch.tensor([request.seed]), torch.tensor([number])
            log_p = log_probs(logits[:, None], PassSampling.uniform(sampling, logits.device))
            codes.append(int(rule.choose(log_p, seed, at)))
    return images


CASES = [(name, "sampled", (3, 2)) for name, spec in METHODS.items() if spec.exact]
CASES += [(name, "unguided", sides) for name in ("eagle-2", "self-draft") for sides in ((5, 1), (1, 5))]
CASES += [(name, "greedy", (2, 6)) for name in ("eagle-1", "eagle-2", "self-draft")]


@pytest.mark.parametrize(("name", "sampling", "sides"), CASES, ids=str)
def test_images_are_those_of_the_definition(name: str, sampling: str, sides: tuple[int, int]) -> None:
    """Steps count cells: together they commit all codes and the row ends between rows."""
    method = Method(name, SAMPLINGS[sampling], TREES.get(name, METHODS[name].tree))
    images = [*new_engine(method, 3, Grid(*sides)).decode(IMAGES)]
    assert codes_of(images) == reference(sampling, *sides)
    grid = Grid(*sides, row_ends=True)
    for image in images:
        last = image.steps[-1]
        assert last.position + last.accepted + 1 == grid.length == grid.size + grid.height - 1
        assert all((step.row, step.column) == grid.cell(step.position)[:2] for step in image.steps)


def test_cells_of_a_grid_with_row_ends() -> None:
    grid = Grid(3, 2, row_ends=True)
    cells = [grid.cell(position)[:2] for position in range(grid.length)]
    assert cells == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert [*map(grid.is_row_end, range(8))] == [column == 2 for _, column in cells]
    assert [*map(grid.number, range(8))] == [0, 1, 2, 2, 3, 4, 4, 5]
    with pytest.raises(ValueError, match="position 8 is outside a grid of 8 cells"):
        grid.cell(8)


def test_a_forced_code_has_all_the_mass_under_guidance_filters_and_any_temperature() -> None:
    logits, forced = torch.randn(2, 3, 5, 7), torch.rand(3, 5) < 0.5
    images = [Sampling(0.0, top_k=2), Sampling(0.7, top_k=2, top_p=0.4), Sampling(guidance=1.0, top_k=2)]
    rows = torch.tensor([image.row for image in images])
    for sampling in (
        *(PassSampling.uniform(image, logits.device) for image in images),
        PassSampling.of(rows, images),
    ):
        log_p = log_probs(logits, sampling, forced)
        assert torch.equal(log_p[~forced], log_probs(logits, sampling)[~forced])
        assert torch.equal(log_p[forced].exp(), torch.eye(7)[0].expand(int(forced.sum()), 7))


def test_neighbours_draft_row_ends_and_never_copy_one() -> None:
    """The cells of rows 0 and 1 are known as far as shown; the positions ahead are not.

    5 6 7 |      positions  0  1  2  3
    8 . . |                 4  5  6  7
    . . .                   8  9 10
    """
    grid, expected = Grid(3, 3, row_ends=True), {
        "above": [6, 7, 0, 8, 6, 7], "left": [8, 8, 0, 8, 8, 8], "both": [6, 7, 0, 8, 6, 7],
    }  # fmt: skip
    known, at = torch.tensor([[6, 7, 0, 8]]), torch.arange(5, 11)[None]
    for cells, drafts in expected.items():
        neighbours = Neighbours(target_of(grid, 9), cells)
        neighbours.begin(0, torch.tensor(5))
        neighbours.commit(torch.tensor([1]), known, torch.tensor([4]))
        fresh = torch.ones_like(at, dtype=torch.bool)
        first, second = neighbours.fill(at, torch.zeros_like(at), fresh)
        assert first.tolist() == [drafts] and second[0, 2] == 0
    neighbours = Neighbours(target_of(grid, 9), "left")
    neighbours.begin(0, torch.tensor(5))
    neighbours.commit(torch.tensor([1]), known, torch.tensor([3]))
    after = torch.tensor([[4]])  # the last known cell is a row end
    assert neighbours.fill(after, after, after > 0)[0].tolist() == [[7]]


def naive_features(tokens: list[int], drafted: list[int]) -> list[Tensor]:
    """Returns the drafter's features behind `tokens`, and behind each drafted token. The drafter reads the
    target's features before the root, the last of `tokens`, and its own from there on, each beside the token
    after it."""
    hidden, features = decoder().causal(torch.tensor([tokens]))[0, :-1], []
    for number in range(len(drafted) + 1):
        features.append(net().causal(torch.tensor([tokens[1:]]), hidden[None])[0, -1])
        tokens, hidden = [*tokens, *drafted[number : number + 1]], torch.cat((hidden, features[-1][None]))
    return features


@pytest.mark.parametrize(("width", "step"), [(1, 4), (3, 1), (3, 4)])
def test_the_drafter_reads_and_drafts_row_ends(width: int, step: int) -> None:
    """The features of drafting are those of one pass over all pairs, in a slot beside a shorter prompt."""
    model = lined_model(Grid(12 // width, width))
    target = model.target(2, SAMPLINGS["unguided"], MAX_NODES, MAX_PROMPT)
    drafter, grid = model.drafter(target, 4, 1), model.grid
    cells = [0 if grid.is_row_end(n) else (7 * n + 3) % CODES for n in range(grid.length)]
    tokens = [ROW_END if grid.is_row_end(n) else cells[n] + FIRST for n in range(grid.length)]
    prompt, prefixes = IMAGES[1].prompt, []
    for slot in range(2):
        prefixes.append(target.prefill({slot: IMAGES[slot].prompt})[slot])
        drafter.prefill(slot, IMAGES[slot].prompt, prefixes[-1])
    features, root = torch.stack([prefix.features[0][-1:] for prefix in prefixes])[None], 0
    while root < 9:
        pairs = features.shape[2]
        new = torch.tensor([cells[root - pairs + 1 : root + 1]]).expand(2, -1)
        _, feature = drafter.extend(features, new, torch.full((2,), pairs), root)
        drafted_features = [feature[0, 1]]
        places = drafter.places(torch.arange(3), [1] * 3)
        for depth, code in enumerate(cells[root + 1 : root + 4]):
            seen = (torch.arange(3) <= depth).expand(2, 1, -1)
            _, grown = drafter.expand(torch.full((2, 1), code), feature[:, :, None], seen, places[depth])
            feature = grown[:, :, 0]
            drafted_features.append(feature[0, 1])
        known = prompt.conditional + tokens[: root + 1]
        expected = naive_features(known, tokens[root + 1 : root + 4])
        torch.testing.assert_close(torch.stack(drafted_features), torch.stack(expected), atol=1e-5, rtol=1e-5)
        length = min(step, 10 - root)
        tree = chain(torch.tensor([cells[root : root + length]] * 2))
        features = target.forward(tree, [root, root]).features
        target.commit(tree, accept([[*range(length)]] * 2))
        root += length


# Images of 2 x 2 codes: their third cell is a row end, so that prefixes have up to four cells.
LINED, LIMIT = Grid(2, 2, row_ends=True), 4.0
LOGITS, DRAFTS, GUIDED = table(1, 5), table(2, 5), Sampling(guidance=1.5)
# The exact methods make the images of the definition, which is that of the AR baseline.
LOSSLESS = [Method("ar", GUIDED), Method("eagle-2", GUIDED, TreeShape(4, 2, 8), verify="rejection")]
LOSSLESS += [Method("eagle-1", GUIDED, TREES["eagle-1"], verify="rejection")]
LOSSLESS += [Method(name, GUIDED, shape, seed_cells="left") for name, shape in WINDOWS.items()]


def lined_distribution(row_ends: bool = True) -> Tensor:
    """Returns the exact distribution [V ** 4] of such an image. row_ends=False: the row end is left out of
    the prefixes, which is wrong."""
    p = log_probs(LOGITS, PassSampling.uniform(GUIDED, LOGITS.device)).double()
    total, state = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    for position in range(LINED.length):
        if not LINED.is_row_end(position):
            total = (total[:, None] + p[state]).flatten()
            state = append(state[:, None], torch.arange(TABULAR_CODES)).flatten()
        elif row_ends:
            state = append(state, torch.zeros_like(state))
    return total.exp()


@pytest.mark.parametrize("method", LOSSLESS, ids=str)
def test_distribution(method: Method) -> None:
    images = [*build(TabularModel(LOGITS, DRAFTS, LINED), method, 256, 0).decode(requests(2560))]
    assert abs(deviation(iter(images), lined_distribution())) < LIMIT
    assert abs(deviation(iter(images), lined_distribution(row_ends=False))) > LIMIT
    if method.tree is not None:
        assert sum(image.target_calls for image in images) < 0.95 * (LINED.length - 1) * len(images)
