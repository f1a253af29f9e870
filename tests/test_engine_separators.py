"""Row-separator tokens: the AR baseline's images whoever drafts, a cache that holds the token sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from adt_tree.decode import autoregressive, finished, speculative
from adt_tree.grid import Grid
from adt_tree.noise import Noise
from adt_tree.policy import Fixed, TreeShape
from adt_tree.proposers.eagle import EagleProposer, grow_dynamic
from adt_tree.proposers.self_draft import SelfDraftProposer
from adt_tree.roles import Proposer, Request
from adt_tree.sampling import Sampling, log_probs
from adt_tree.verify import Coupled
from models.drafter import DrafterNet, EagleDrafter
from models.separators import SeparatorDrafter, SeparatorTarget
from models.target import ARTarget, Prompt
from tests.decoding import accept, chain, commit_two_paths, path_to, random_tree, static_growth
from tests.test_engine import CODES, FIRST, alone, decoder, net, tokens_of

ROW_END, MAX_PROMPT, MAX_NODES = 29, 8, 30
OPENING = [39, 31, 32]
IMAGES = [
    Request(str(n), Prompt([0, *[33 + n] * (n % 3 + 1), 38, *OPENING], OPENING), 77 + n) for n in range(4)
]
SAMPLINGS = {"sampled": Sampling(), "greedy": Sampling(temperature=0.0), "unguided": Sampling(guidance=1.0)}


def make_target(slots: int, branches: int, grid: Grid, room: int = 2 * MAX_NODES) -> SeparatorTarget:
    """Over the random network of the engine's tests; room: for the tokens of a tree."""
    lines = Grid(grid.height, grid.width + 1)
    tokens = ARTarget(decoder(), lines, FIRST, CODES, slots, branches, MAX_PROMPT, room)
    return SeparatorTarget(tokens, grid, ROW_END)


def with_ends(codes: Sequence[int], width: int) -> list[int]:
    """Token ids of committed codes, a separator behind every full row."""
    tokens = []
    for index, code in enumerate(codes):
        tokens.append(code + FIRST)
        if index % width == width - 1:
            tokens.append(ROW_END)
    return tokens


@cache
def reference(name: str, height: int, width: int) -> list[list[int]]:
    """Images by the definition: no cache, no tree, one token after the other."""
    sampling, images = SAMPLINGS[name], []
    rule = Coupled(Noise(CODES, silent=sampling.greedy))
    for request in IMAGES:
        codes: list[int] = []
        for position in range(height * width):
            logits, _ = alone(request.prompt, with_ends(codes, width), sampling.branches)
            seed, at = torch.tensor([request.seed]), torch.tensor([position])
            codes.append(int(rule.choose(log_probs(logits[:, None], sampling), seed, at)))
        images.append(codes)
    return images


def proposer_of(
    kind: str, drafter: DrafterNet, target: SeparatorTarget, sampling: Sampling
) -> tuple[Proposer, TreeShape]:
    """A proposer and the shape of its trees."""
    if kind == "self-draft":
        own = SelfDraftProposer(target.grid, target.slots, 3, "above", target.num_codes, target.device)
        return own, TreeShape(9, 3, 20)
    growth, shape = grow_dynamic, TreeShape(5, 4, 14)
    if kind == "static":
        growth, shape = static_growth("mc_sim_7b_63")
    tokens = EagleDrafter(drafter, target.tokens, 2 * shape.depth + 1, shape.width)
    return EagleProposer(SeparatorDrafter(tokens, target), sampling, growth, target.slots), shape


def generated(
    target: SeparatorTarget, sampling: Sampling, drafts: tuple[Proposer, TreeShape] | None
) -> list[list[int]]:
    """Codes of all images in their order: drafted, or of the AR baseline."""
    noise = Noise(CODES, silent=sampling.greedy)
    images = autoregressive(target, IMAGES, sampling, noise)
    if drafts is not None:
        proposer, shape = drafts
        images = speculative(target, proposer, Fixed(shape), Coupled(noise), IMAGES, sampling)
    return [image.codes for image in sorted(finished(images), key=lambda image: image.name)]


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("kind", ["ar", "dynamic", "static", "self-draft"])
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("sides", [(4, 4), (2, 6), (5, 1), (3, 2)])
def test_images_are_those_of_the_definition(sides: tuple[int, int], name: str, kind: str, slots: int) -> None:
    sampling = SAMPLINGS[name]
    target = make_target(slots, sampling.branches, Grid(*sides))
    drafts = None if kind == "ar" else proposer_of(kind, net(), target, sampling)
    assert generated(target, sampling, drafts) == reference(name, *sides)


@pytest.mark.parametrize("shape", [TreeShape(14, 1, 1), TreeShape(12, 3, 4), TreeShape(15, 2, 7)], ids=str)
@pytest.mark.parametrize("slots", [1, 2])
def test_trees_deeper_than_they_have_nodes(slots: int, shape: TreeShape) -> None:
    """In a cache with room for their nodes, each with a separator, and no more, as commands allocate it."""
    target = make_target(slots, 2, Grid(4, 4), 2 * (shape.budget + 1))
    proposer = SelfDraftProposer(target.grid, slots, shape.width, "above", CODES, target.device)
    assert generated(target, SAMPLINGS["sampled"], (proposer, shape)) == reference("sampled", 4, 4)


@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_nodes_see_their_path_and_its_separators(width: int) -> None:
    """Logits of every node of random trees, at several progresses, and what the cache then holds."""
    target = make_target(3, 2, Grid(15 // width, width))
    for slot in range(3):
        target.prefill(slot, IMAGES[slot].prompt)
    taken = commit_two_paths(target, seed=10 * width)
    tree = random_tree(3, 12, CODES, seed=5)
    scored = target.forward(tree, [*map(len, taken)])
    size = scored.features.shape[-1] // 2
    for slot, request in enumerate(IMAGES[:3]):
        tokens = with_ends(taken[slot], width)
        assert target.tokens.cache.length.view(2, 3)[0, slot] == len(request.prompt.conditional) + len(tokens)
        for node in range(tree.nodes):
            codes = taken[slot] + tree.codes[slot, path_to(tree, slot, node)].tolist()
            expected, _ = alone(request.prompt, with_ends(codes, width), 2)
            torch.testing.assert_close(scored.logits[:, slot, node], expected, atol=1e-5, rtol=1e-5)
            ended = len(codes) % width == 0
            halves = scored.features[:, slot, node].split(size, dim=-1)
            assert torch.equal(*halves) is not ended


def said(tokens: list[int], drafted: list[int], width: int, codes: int) -> list[Tensor]:
    """The drafter's feature behind tokens, of which `codes` are codes and the last one open, and behind each
    drafted code: from true features up to there, then from its own, separators passed on the way."""
    hidden, found = decoder().causal(torch.tensor([tokens]))[0, :-1], []
    for number in range(len(drafted) + 1):
        feature = net().causal(torch.tensor([tokens[1:]]), hidden[None])[0, -1]
        if (codes + number) % width == 0:
            tokens, hidden = [*tokens, ROW_END], torch.cat((hidden, feature[None]))
            feature = net().causal(torch.tensor([tokens[1:]]), hidden[None])[0, -1]
        found.append(feature)
        tokens, hidden = [*tokens, *drafted[number : number + 1]], torch.cat((hidden, feature[None]))
    return found


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_the_drafter_reads_and_drafts_separators(width: int, step: int) -> None:
    """Its features are those of a pass over all pairs (feature, next token) of the token sequence."""
    target = make_target(1, 1, Grid(12 // width, width))
    drafter = SeparatorDrafter(EagleDrafter(net(), target.tokens, 9, 1), target)
    codes = [(7 * n + 3) % CODES for n in range(12)]
    prompt = IMAGES[0].prompt
    prefix = target.prefill(0, prompt)
    drafter.prefill(0, prompt, prefix)
    features, root = prefix.features[0][None, None, -1:], 0
    while root < 9:
        pairs = features.shape[2]
        new = torch.tensor([codes[root - pairs + 1 : root + 1]])
        _, feature = drafter.extend(features, new, torch.tensor([pairs]), [root])
        got = [feature[0, 0]]
        for depth, code in enumerate(codes[root + 1 : root + 4]):
            seen = torch.ones(1, 1, depth + 1, dtype=torch.bool)
            _, grown = drafter.expand(torch.tensor([[code]]), feature[:, :, None], seen, depth)
            feature = grown[:, :, 0]
            got.append(feature[0, 0])
        tokens = prompt.conditional + with_ends(codes[:root], width) + [codes[root] + FIRST]
        drafted = tokens_of(codes[root + 1 : root + 4])
        expected = said(tokens, drafted, width, root + 1)
        torch.testing.assert_close(torch.stack(got), torch.stack(expected), atol=1e-5, rtol=1e-5)
        length = min(step, 10 - root)
        tree = chain(torch.tensor([codes[root : root + length]]))
        features = target.forward(tree, [root]).features
        target.commit(tree, accept([[*range(length)]]))
        root += length
