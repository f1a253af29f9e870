"""Row separators: every method gives the images of a plain loop, and the drafter reads the separators."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from adt_tree.engine import Engine, build
from adt_tree.grid import Grid
from adt_tree.method import Method
from adt_tree.noise import Noise
from adt_tree.policy import TreeShape
from adt_tree.roles import Request
from adt_tree.sampling import Sampling, log_probs
from adt_tree.static_trees import StaticTree
from adt_tree.tree import DraftTree
from adt_tree.verify import Coupled
from models.model import Model
from models.separators import TokenTree, separate
from models.target import Prompt
from tests.decoding import accept, chain, codes_of, model_of
from tests.test_engine import CODEBOOK, CODES, FIRST, GRID, alone, decoder, net, tokens_of

ROW_END, MAX_PROMPT, MAX_NODES = 29, 8, 30
OPENING = [39, 31, 32]
IMAGES = [
    Request(str(n), Prompt([0, *[33 + n] * (n % 3 + 1), 38, *OPENING], OPENING), 77 + n) for n in range(4)
]
SAMPLINGS = {"sampled": Sampling(), "greedy": Sampling(temperature=0.0), "unguided": Sampling(guidance=1.0)}
TREES: dict[str, TreeShape | str | None] = {
    "ar": None, "eagle-2": TreeShape(5, 4, 14), "eagle-1": StaticTree("mc_sim_7b_63"),
    "self-draft": TreeShape(9, 3, 20)
}  # fmt: skip


def lined_model(grid: Grid, graphs: bool = False) -> Model:
    """Returns the random networks of the engine's tests as a model with row separators."""
    return model_of(decoder(), net(), grid, FIRST, CODEBOOK, ROW_END, graphs)


def new_engine(method: Method, slots: int, grid: Grid = GRID, graphs: bool = False) -> Engine:
    """Returns the engine of a method over them, with caches as commands allocate them."""
    return build(lined_model(grid, graphs), method, slots, MAX_PROMPT)


def with_ends(codes: Sequence[int], width: int) -> list[int]:
    """Returns the token ids of committed codes, with a separator behind every full row."""
    tokens = []
    for index, code in enumerate(codes):
        tokens.append(code + FIRST)
        if index % width == width - 1:
            tokens.append(ROW_END)
    return tokens


@cache
def reference(name: str, height: int, width: int) -> dict[str, list[int]]:
    """Returns the images of a plain loop: one token after another, without cache and trees."""
    sampling, images = SAMPLINGS[name], {}
    rule = Coupled(Noise(CODES, silent=sampling.greedy))
    for request in IMAGES:
        codes = images[request.name] = list[int]()
        for position in range(height * width):
            logits, _ = alone(request.prompt, with_ends(codes, width), sampling.branches)
            seed, at = torch.tensor([request.seed]), torch.tensor([position])
            codes.append(int(rule.choose(log_probs(logits[:, None], sampling.as_tensors(logits)), seed, at)))
    return images


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("sides", [(4, 4), (2, 6), (5, 1), (3, 2)])
def test_images_are_those_of_the_definition(sides: tuple[int, int], name: str, tree: str, slots: int) -> None:
    engine = new_engine(Method(tree, SAMPLINGS[name], TREES[tree]), slots, Grid(*sides))
    assert codes_of(engine.decode(IMAGES)) == reference(name, *sides)


@pytest.mark.parametrize("shape", [TreeShape(14, 1, 1), TreeShape(12, 3, 4), TreeShape(15, 2, 7)], ids=str)
@pytest.mark.parametrize("slots", [1, 2])
def test_trees_deeper_than_they_have_nodes(slots: int, shape: TreeShape) -> None:
    engine = new_engine(Method("self-draft", Sampling(), shape), slots)
    assert codes_of(engine.decode(IMAGES)) == reference("sampled", 4, 4)


def separators_added(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Decodes the images. Returns a pair for each pass with separators: the number of separators in the tree
    that has most, and the number for which the pass has room."""
    counts: list[tuple[int, int]] = []

    def watched(tree: DraftTree, last: Tensor, most: int, separator: int) -> TokenTree:
        counts.append((int(last.sum(dim=1).max()), most))
        return separate(tree, last, most, separator)

    monkeypatch.setattr("models.separators.separate", watched)
    list(engine.decode(IMAGES))
    return counts


@pytest.mark.parametrize("tree", TREES)
def test_no_image_has_more_separators_than_its_pass_has_room_for(
    tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = separators_added(new_engine(Method(tree, Sampling(), TREES[tree]), 2), monkeypatch)
    assert counts and all(0 <= most_of_one <= bound for most_of_one, bound in counts)


@pytest.mark.parametrize(
    ("method", "shape", "bound"),
    [
        ("self-draft", TreeShape(3, 3, 11), 3),  # a level of the chain and its leaves
        ("eagle-2", TreeShape(1, 5, 5), 5),  # the root's children
        ("eagle-2", TreeShape(3, 4, 14), 13),  # of 15 nodes one is the root, and one above a grandchild
    ],
    ids=str,
)
def test_separators_cost_no_more_rows_than_a_level_has_nodes(
    method: str, shape: TreeShape, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is checked on a grid wider than the trees are deep."""
    counts = separators_added(new_engine(Method(method, Sampling(), shape), 1), monkeypatch)
    assert max(room for _, room in counts) == bound


def naive_features(tokens: list[int], drafted: list[int], width: int, codes: int) -> list[Tensor]:
    """Returns the drafter's features behind `tokens`, and behind each drafted code.

    `tokens` contains `codes` codes and ends in the root of the tree. The drafter reads the target's features
    before the root and its own features from there on. Where a row ends, it also reads a separator.
    """
    hidden, features = decoder().causal(torch.tensor([tokens]))[0, :-1], []
    for number in range(len(drafted) + 1):
        feature = net().causal(torch.tensor([tokens[1:]]), hidden[None])[0, -1]
        if (codes + number) % width == 0:
            tokens, hidden = [*tokens, ROW_END], torch.cat((hidden, feature[None]))
            feature = net().causal(torch.tensor([tokens[1:]]), hidden[None])[0, -1]
        features.append(feature)
        tokens, hidden = [*tokens, *drafted[number : number + 1]], torch.cat((hidden, feature[None]))
    return features


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_the_drafter_reads_and_drafts_separators(width: int, step: int) -> None:
    """The features of drafting are those of one pass over all pairs of a feature and the next token."""
    model = lined_model(Grid(12 // width, width))
    target = model.target(1, SAMPLINGS["unguided"], MAX_NODES, MAX_PROMPT)
    drafter = model.drafter(target, 4, 1)
    codes = [(7 * n + 3) % CODES for n in range(12)]
    prompt = IMAGES[0].prompt
    prefix = target.prefill(0, prompt)
    drafter.prefill(0, prompt, prefix)
    features, root = prefix.features[0][None, None, -1:], 0
    while root < 9:
        pairs = features.shape[2]
        new = torch.tensor([codes[root - pairs + 1 : root + 1]])
        _, feature = drafter.extend(features, new, torch.tensor([pairs]), drafter.context([root]))
        drafted_features = [feature[0, 0]]
        for depth, code in enumerate(codes[root + 1 : root + 4]):
            seen = torch.ones(1, 1, depth + 1, dtype=torch.bool)
            _, grown = drafter.expand(torch.tensor([[code]]), feature[:, :, None], seen, depth)
            feature = grown[:, :, 0]
            drafted_features.append(feature[0, 0])
        tokens = prompt.conditional + with_ends(codes[:root], width) + [codes[root] + FIRST]
        drafted = tokens_of(codes[root + 1 : root + 4])
        expected = naive_features(tokens, drafted, width, root + 1)
        torch.testing.assert_close(torch.stack(drafted_features), torch.stack(expected), atol=1e-5, rtol=1e-5)
        length = min(step, 10 - root)
        tree = chain(torch.tensor([codes[root : root + length]]))
        features = target.forward(tree, [root]).features
        target.commit(tree, accept([[*range(length)]]))
        root += length
