"""The engine on a tiny random transformer in fp32: the AR baseline's images, caches that hold the prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from adt_tree.batch import StepOutput
from adt_tree.decode import autoregressive, finished, speculative
from adt_tree.grid import Grid
from adt_tree.noise import Noise
from adt_tree.policy import INITS, AdaptiveTree, AdjacencyAdaptive, Fixed, Policy, TreeShape
from adt_tree.proposers.eagle import EagleProposer, Growth, grow_dynamic
from adt_tree.proposers.hybrid import HybridProposer
from adt_tree.proposers.self_draft import SelfDraftProposer
from adt_tree.records import Decoded
from adt_tree.relax import Relaxation, nearest_table
from adt_tree.roles import Proposer, Request
from adt_tree.sampling import Sampling
from adt_tree.static_trees import STATIC_TREES
from adt_tree.tree import root_only_tree
from adt_tree.verify import Coupled, GreedyRelaxed, Rejection, Rule
from models.drafter import DrafterNet, EagleDrafter
from models.target import ARTarget, Prompt
from models.transformer import Decoder, DecoderConfig
from tests.decoding import codes_of, commit_two_paths, path_to, random_tree, static_growth
from tests.tabular import TabularDrafter, TabularTarget, requests, table

CODES, FIRST, GRID, MAX_PROMPT, MAX_NODES = 24, 4, Grid(4, 4), 10, 60
IMAGES = [
    Request(str(n), Prompt([0, *[30 + n] * (n % 3 + 1), 38, 39], [0, 39]), 1000 + 7 * n) for n in range(5)
]
SHAPES = {
    "fixed": TreeShape(4, 3, 12),
    "line": TreeShape(6, 1, 6),
    "tree": TreeShape(5, 3, 14),
    "longer than a row": TreeShape(11, 2, 20),
}
CANDIDATES = 5
ADAPT = AdaptiveTree(depth_max=5, width_max=5, depth_start=3, width_start=3, budget=14)
SAMPLINGS = {
    "sampled": Sampling(),
    "unguided": Sampling(guidance=1.0),
    "greedy": Sampling(temperature=0.0),
    "greedy unguided": Sampling(temperature=0.0, guidance=1.0),
    "filtered": Sampling(temperature=0.9, top_k=7, top_p=0.9),
    "filtered unguided": Sampling(temperature=1.3, top_k=5, top_p=0.8, guidance=1.0),
}


def config(layers: int, kv_heads: int = 4) -> DecoderConfig:
    """A tiny shape."""
    return DecoderConfig(40, 32, 48, layers, 4, kv_heads, max_positions=100)


@cache
def decoder(dtype: torch.dtype = torch.float32, kv_heads: int = 4) -> Decoder:
    """The random target network; fixed weights."""
    torch.manual_seed(0)
    model = Decoder(config(2, kv_heads))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).eval().requires_grad_(False)


@cache
def net(dtype: torch.dtype = torch.float32) -> DrafterNet:
    """The random drafter network; of 24 codes some drafts are taken all the same."""
    torch.manual_seed(1)
    return DrafterNet(config(1)).to(dtype).eval().requires_grad_(False)


def make_target(slots: int, branches: int, model: Decoder | None = None) -> ARTarget:
    """A target over the random network."""
    return ARTarget(model or decoder(), GRID, FIRST, CODES, slots, branches, MAX_PROMPT, MAX_NODES)


def baseline(sampling: Sampling, slots: int, images: Sequence[Request] = IMAGES) -> dict[str, Decoded]:
    """Images of the AR baseline by name."""
    noise, target = Noise(CODES, silent=sampling.greedy), make_target(slots, sampling.branches)
    return {image.name: image for image in finished(autoregressive(target, images, sampling, noise))}


@cache
def reference(name: str) -> dict[str, list[int]]:
    """The AR baseline's codes, one image at a time."""
    return codes_of(baseline(SAMPLINGS[name], 1).values())


@dataclass(frozen=True)
class Method:
    """A tree, by name, a rule, and who drafts: the network, self-draft or hybrid."""

    tree: str
    rule: Rule
    drafter: str = "network"
    seed_cells: str = "above"

    def __str__(self) -> str:
        return f"{self.drafter} {self.tree} {type(self.rule).__name__}"

    def policy(self, slots: int) -> Policy:
        """One of SHAPES, a static tree's, or adaptive by its initialisation."""
        if self.tree in SHAPES:
            return Fixed(SHAPES[self.tree])
        if self.tree in STATIC_TREES:
            return Fixed(static_growth(self.tree)[1])
        return AdjacencyAdaptive(replace(ADAPT, init=self.tree), slots)

    def growth(self) -> Growth:
        """By level, or by the list."""
        if self.tree not in STATIC_TREES:
            return grow_dynamic
        return static_growth(self.tree, keep_q=isinstance(self.rule, Rejection))[0]

    def proposer(
        self, target: ARTarget, sampling: Sampling, kind: type[EagleDrafter] = EagleDrafter
    ) -> Proposer:
        """A fresh one, its network the random one beside the target."""
        slots = target.slots
        own = SelfDraftProposer(GRID, slots, CANDIDATES, self.seed_cells, CODES, target.device)
        if self.drafter == "self-draft":
            return own
        eagle = EagleProposer(kind(net(), target, 11, 10, "published"), sampling, self.growth(), slots)
        return eagle if self.drafter == "network" else HybridProposer(own, eagle)

    def steps(
        self, target: ARTarget, sampling: Sampling, images: Sequence[Request] = IMAGES
    ) -> Iterator[StepOutput]:
        """Target calls of the images by a fresh proposer."""
        proposer, policy = self.proposer(target, sampling), self.policy(target.slots)
        return speculative(target, proposer, policy, self.rule, images, sampling)

    def decode(self, sampling: Sampling, slots: int, images: Sequence[Request] = IMAGES) -> Iterator[Decoded]:
        """Images as they finish."""
        return finished(self.steps(make_target(slots, sampling.branches), sampling, images))


TREES = [("network", tree) for tree in ("fixed", *INITS, *STATIC_TREES)]
TREES += product(("self-draft", "hybrid"), ("line", "tree", "longer than a row", "horizontal"))


def coupled(sampling: Sampling) -> Coupled:
    """The exact rule."""
    return Coupled(Noise(CODES, silent=sampling.greedy))


def exact_methods(sampling: Sampling) -> list[Method]:
    """Every drafter with every kind of tree, coupled."""
    return [Method(tree, coupled(sampling), drafter, "both") for drafter, tree in TREES]


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize(("drafter", "tree"), TREES)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_speculation_is_the_ar_baseline(name: str, drafter: str, tree: str, slots: int) -> None:
    images = list(Method(tree, coupled(SAMPLINGS[name]), drafter).decode(SAMPLINGS[name], slots))
    assert codes_of(images) == reference(name)
    assert any(step.accepted for image in images for step in image.steps)
    assert all((image.drafter_calls == 0) == (drafter == "self-draft") for image in images)


@pytest.mark.parametrize("slots", [2, 4, 7])
def test_the_ar_baseline_does_not_depend_on_its_company(slots: int) -> None:
    """With refills, and with more slots than requests."""
    assert codes_of(baseline(SAMPLINGS["sampled"], slots).values()) == reference("sampled")


def sampled_methods() -> list[Method]:
    """Rules whose images depend on the drafts."""
    near = nearest_table(torch.randn(CODES, 3, generator=torch.Generator().manual_seed(2)), 12)
    relaxed = Relaxation(near, 8, 0.4)
    return [
        Method("fixed", Rejection(CODES, False)),
        Method("horizontal", Rejection(CODES, False, relaxed)),
        Method("mc_sim_7b_63", Rejection(CODES, True, relaxed, reference=True)),
        Method("naive_extend_57", Rejection(CODES, True)),
        Method("random", Coupled(Noise(CODES, silent=False), relaxed)),
        Method("vertical", GreedyRelaxed(CODES, relaxed)),
        Method("mc_sim_7b_63", GreedyRelaxed(CODES, relaxed, torch.arange(26))),
    ]


COMPANY = [Method("tree", coupled(Sampling()), drafter) for drafter in ("self-draft", "hybrid")]


@pytest.mark.parametrize("method", [*sampled_methods(), *COMPANY], ids=str)
def test_an_image_is_the_same_in_any_company(method: Method) -> None:
    sampling = Sampling(temperature=0.0) if isinstance(method.rule, GreedyRelaxed) else Sampling()
    alone = {r.name: next(iter(method.decode(sampling, 1, [r]))) for r in IMAGES}
    for slots, images in ((1, IMAGES), (3, IMAGES), (4, IMAGES[::-1]), (7, IMAGES)):
        for image in method.decode(sampling, slots, images):
            own = alone[image.name]
            assert image.codes == own.codes
            shapes = [(s.position, s.depth, s.width, s.nodes, s.accepted) for s in image.steps]
            assert shapes == [(s.position, s.depth, s.width, s.nodes, s.accepted) for s in own.steps]
            assert (image.target_calls, image.drafter_calls) == (own.target_calls, own.drafter_calls)


@pytest.mark.parametrize("shape", [TreeShape(9, 3, 2), TreeShape(12, 1, 3), TreeShape(6, 4, 5)], ids=str)
@pytest.mark.parametrize("kind", ["network", "self-draft"])
def test_trees_deeper_than_they_have_nodes(kind: str, shape: TreeShape) -> None:
    """In a cache with room for their nodes and no more, as commands allocate it."""
    sampling, slots = Sampling(), 3
    longest = max(request.prompt.length for request in IMAGES)
    target = ARTarget(decoder(), GRID, FIRST, CODES, slots, sampling.branches, longest, shape.budget + 1)
    proposer: Proposer = SelfDraftProposer(GRID, slots, shape.width, "above", CODES, target.device)
    if kind == "network":
        drafter = EagleDrafter(net(), target, shape.depth, shape.width)
        proposer = EagleProposer(drafter, sampling, grow_dynamic, slots)
    images = finished(speculative(target, proposer, Fixed(shape), coupled(sampling), IMAGES, sampling))
    assert codes_of(images) == reference("sampled")


@pytest.mark.parametrize("kind", ["ar", "network"])
def test_runs_leave_nothing_behind(kind: str) -> None:
    """Some with fewer images than slots, some left before their images were done."""
    method, sampling = Method("fixed", coupled(Sampling())), Sampling()
    target = make_target(3, sampling.branches)
    proposer = method.proposer(target, sampling)
    for count in (1, 1, 2, 3, *[1] * 20):
        images = finished(autoregressive(target, IMAGES[:count], sampling, method.rule.noise))
        if kind == "network":
            steps = speculative(target, proposer, method.policy(3), method.rule, IMAGES[:count], sampling)
            images = finished(steps)
        image = next(images)
        assert image.codes == reference("sampled")[image.name]


@pytest.mark.parametrize("depth", [1, 3, 20])
def test_the_last_tree_is_cut(depth: int) -> None:
    """Not a code beyond the image, even by a drafter that is always right."""
    sampling, logits = Sampling(temperature=0.0), table(3, 6)
    target = TabularTarget(logits, Grid(2, 3), 2)
    proposer = EagleProposer(TabularDrafter(logits), sampling, grow_dynamic, 2)
    policy, rule = Fixed(TreeShape(depth, 2, 30)), Coupled(Noise(4, silent=True))
    images = list(finished(speculative(target, proposer, policy, rule, requests(3), sampling)))
    assert len(images) == 3
    for image in images:
        assert len(image.codes) == 6
        assert all(step.accepted == step.depth for step in image.steps)
        assert [step.depth for step in image.steps] == {1: [1, 1, 0], 3: [3, 0], 20: [4]}[depth]


def test_a_drafter_that_knows_the_distribution_has_every_level_accepted() -> None:
    """Coupled at temperature 1 as well: drafts and target share their noise."""
    for sampling in (Sampling(temperature=0.0), Sampling(temperature=1.0, guidance=1.5)):
        logits = table(4, 8)
        target = TabularTarget(logits, Grid(2, 4), 3)
        proposer = EagleProposer(TabularDrafter(logits), sampling, grow_dynamic, 3)
        policy, rule = Fixed(TreeShape(3, 2, 6)), Coupled(Noise(4, silent=sampling.greedy))
        for image in finished(speculative(target, proposer, policy, rule, requests(5), sampling)):
            assert [(step.depth, step.accepted) for step in image.steps] == [(3, 3), (2, 2)]


def test_no_requests() -> None:
    assert list(Method("fixed", coupled(Sampling())).decode(Sampling(), 2, [])) == []
    assert baseline(Sampling(), 2, []) == {}


def started(slots: int, branches: int, kv_heads: int = 4) -> ARTarget:
    """A target whose slots hold prompts of different lengths."""
    target = make_target(slots, branches, decoder(kv_heads=kv_heads))
    for slot in range(slots):
        target.prefill(slot, IMAGES[slot].prompt)
    return target


def tokens_of(codes: Sequence[int]) -> list[int]:
    """Token ids."""
    return [code + FIRST for code in codes]


def alone(prompt: Prompt, tokens: list[int], branches: int, kv_heads: int = 4) -> tuple[Tensor, Tensor]:
    """Logits [G, V] and features [G, D] behind a prompt and tokens, without a cache."""
    model, rows = decoder(kv_heads=kv_heads), (prompt.conditional, prompt.unconditional)[:branches]
    features = torch.stack([model.causal(torch.tensor([row + tokens]))[0, -1] for row in rows])
    return model.head(features)[:, FIRST : FIRST + CODES], features


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("branches", [1, 2])
def test_node_logits_are_those_of_its_path_alone(branches: int, kv_heads: int) -> None:
    target = started(3, branches, kv_heads)
    taken = commit_two_paths(target, seed=10)
    tree = random_tree(3, 14, CODES, seed=20)
    scored = target.forward(tree, [*map(len, taken)])
    for slot in range(3):
        for node in range(tree.nodes):
            codes = taken[slot] + tree.codes[slot, path_to(tree, slot, node)].tolist()
            logits, features = alone(IMAGES[slot].prompt, tokens_of(codes), branches, kv_heads)
            torch.testing.assert_close(scored.logits[:, slot, node], logits, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(scored.features[:, slot, node], features, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("branches", [1, 2])
def test_cache_after_commit_is_a_fresh_prefill(branches: int) -> None:
    target = started(3, branches)
    for slot, codes in enumerate(commit_two_paths(target, seed=30)):
        prompt, tail = IMAGES[slot].prompt, tokens_of(codes)
        fresh = ARTarget(decoder(), GRID, FIRST, CODES, 1, branches, MAX_PROMPT + len(tail), MAX_NODES - 20)
        fresh.prefill(0, Prompt(prompt.conditional + tail, prompt.unconditional + tail))
        for branch in range(branches):
            row = branch * 3 + slot
            length = int(target.cache.length[row])
            assert length == int(fresh.cache.length[branch])
            both = (target.cache, row), (fresh.cache, branch)
            held, expected = (whole.store[:, at, :, :, :length] for whole, at in both)
            torch.testing.assert_close(held, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("third, same", [(2, True), (4, False)])
def test_of_a_leafy_chain_the_last_node_alone_is_moved(third: int, same: bool) -> None:
    """Paths of 0, 1, 2, ... and one last node anywhere: the same cache. Another path would come out wrong."""
    path = torch.tensor([[0, 1, third, 7], [0, 5, 0, 0], [0, 0, 0, 0]])
    count, caches = torch.tensor([4, 2, 1]), []
    for leafy_chain in (False, True):
        target = started(3, 1)
        target.forward(random_tree(3, 9, CODES, seed=50), [0] * 3)
        target.cache.commit(path, count, leafy_chain)
        held = [target.cache.store[:, row, :, :, : target.cache.length[row]] for row in range(3)]
        caches.append(torch.cat([part.flatten() for part in held]))
    assert torch.equal(*caches) is same


def test_a_slot_forgets_its_last_image() -> None:
    target = started(2, 2)
    commit_two_paths(target, seed=40)
    prefix = target.prefill(0, IMAGES[2].prompt)
    fresh = make_target(1, 2).prefill(0, IMAGES[2].prompt)
    torch.testing.assert_close(prefix.logits, fresh.logits, atol=1e-5, rtol=1e-5)
    logits = target.forward(root_only_tree(torch.tensor([3, 4])), [0, 20]).logits
    expected, _ = alone(IMAGES[2].prompt, tokens_of([3]), 2)
    torch.testing.assert_close(logits[:, 0, 0], expected, atol=1e-5, rtol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="positions"):
        ARTarget(decoder(), GRID, FIRST, CODES, 1, 2, 50, 60)
    with pytest.raises(ValueError, match="prompt"):
        make_target(1, 2).prefill(0, Prompt([0] * (MAX_PROMPT + 1), [0]))


def test_bf16_runs() -> None:
    """Whole images, the same from run to run; other tokens than fp32 are allowed."""
    sampling, model = Sampling(), decoder(torch.bfloat16)

    def run() -> dict[str, list[int]]:
        target = make_target(3, 2, model)
        drafter = EagleDrafter(net(torch.bfloat16), target, 5, 5)
        proposer, policy = EagleProposer(drafter, sampling, grow_dynamic, 3), AdjacencyAdaptive(ADAPT, 3)
        return codes_of(finished(speculative(target, proposer, policy, coupled(sampling), IMAGES, sampling)))

    first = run()
    assert sorted(first) == sorted(request.name for request in IMAGES)
    assert all(len(codes) == GRID.size and 0 <= min(codes) <= max(codes) < CODES for codes in first.values())
    assert run() == first
