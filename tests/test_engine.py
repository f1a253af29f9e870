"""The engine on a tiny random transformer in fp32: plain decoding's images, caches that hold the prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from adt_tree.candidates import CandidateCache
from adt_tree.decode import autoregressive, speculative
from adt_tree.eagle import EagleProposer, Growth, StaticGrowth, grow_dynamic
from adt_tree.grid import Grid
from adt_tree.noise import Noise
from adt_tree.policy import INITS, AdaptiveTree, AdjacencyAdaptive, Fixed, Policy, TreeShape
from adt_tree.records import Decoded
from adt_tree.relax import Relaxation, nearest_table
from adt_tree.roles import Proposer, Request
from adt_tree.sampling import Sampling
from adt_tree.self_draft import SelfDraftProposer
from adt_tree.tree import STATIC_TREES, DraftTree, StaticTree, ancestor_mask, root_only_tree
from adt_tree.verify import Coupled, GreedyRelaxed, Rejection, Rule, Verdict
from models.drafter import DrafterNet, EagleDrafter
from models.target import ARTarget, Prompt
from models.transformer import Decoder, DecoderConfig
from tests.tabular import TabularDrafter, TabularTarget, requests, table

CODES, FIRST, GRID, MAX_PROMPT, MAX_NODES = 24, 4, Grid(4, 4), 10, 60
IMAGES = [
    Request(str(n), Prompt([0, *[30 + n] * (n % 3 + 1), 38, 39], [0, 39]), 1000 + 7 * n) for n in range(5)
]
ADAPT = AdaptiveTree(depth_max=5, width_max=5, depth_start=3, width_start=3, budget=14)
LAWS = {
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


def plain(law: Sampling, slots: int, images: Sequence[Request] = IMAGES) -> dict[str, Decoded]:
    """Plain decoding by name."""
    noise = Noise(CODES, silent=law.greedy)
    return {
        image.name: image for image in autoregressive(make_target(slots, law.branches), images, law, noise)
    }


@cache
def reference(name: str) -> dict[str, list[int]]:
    """The images of plain decoding, one at a time."""
    return {key: image.codes for key, image in plain(LAWS[name], 1).items()}


@dataclass(frozen=True)
class Method:
    """A tree, by name, and a rule."""

    tree: str
    rule: Rule

    def policy(self, slots: int) -> Policy:
        """Fixed for dynamic and static trees, else adaptive by its initialisation."""
        if self.tree == "fixed":
            return Fixed(TreeShape(4, 3, 12))
        if self.tree in STATIC_TREES:
            tree = StaticTree(STATIC_TREES[self.tree])
            return Fixed(TreeShape(tree.depth, tree.width, len(tree.parents) - 1))
        return AdjacencyAdaptive(AdaptiveTree(**{**_fields(ADAPT), "init": self.tree}), slots)

    def growth(self) -> Growth:
        """By level, or by the list."""
        if self.tree not in STATIC_TREES:
            return grow_dynamic
        keep_q = isinstance(self.rule, Rejection)
        return StaticGrowth(StaticTree(STATIC_TREES[self.tree]), keep_q, torch.device("cpu"))

    def proposer(self, target: ARTarget, law: Sampling) -> EagleProposer:
        """The random drafter beside a target."""
        return EagleProposer(EagleDrafter(net(), target, 6, 10), law, self.growth(), target.slots)

    def decode(self, law: Sampling, slots: int, images: Sequence[Request] = IMAGES) -> Iterator[Decoded]:
        """Images as they finish."""
        target = make_target(slots, law.branches)
        proposer = self.proposer(target, law)
        return speculative(target, proposer, self.policy(slots), self.rule, images, law)


def _fields(constants: AdaptiveTree) -> dict[str, float | int | str]:
    return {name: getattr(constants, name) for name in constants.__dataclass_fields__}


def coupled(law: Sampling) -> Coupled:
    """The exact rule of a law."""
    return Coupled(Noise(CODES, silent=law.greedy))


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("tree", ["fixed", *INITS, *STATIC_TREES])
@pytest.mark.parametrize("law", LAWS)
def test_speculation_is_plain_decoding(law: str, tree: str, slots: int) -> None:
    images = list(Method(tree, coupled(LAWS[law])).decode(LAWS[law], slots))
    assert {image.name: image.codes for image in images} == reference(law)
    assert any(step.accepted for image in images for step in image.steps)


@pytest.mark.parametrize("slots", [2, 4, 7])
def test_plain_decoding_does_not_depend_on_its_company(slots: int) -> None:
    """With refills, and with more slots than requests."""
    assert {name: image.codes for name, image in plain(LAWS["sampled"], slots).items()} == reference(
        "sampled"
    )


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


@pytest.mark.parametrize("method", sampled_methods(), ids=lambda m: f"{m.tree} {type(m.rule).__name__}")
def test_an_image_is_the_same_in_any_company(method: Method) -> None:
    law = Sampling(temperature=0.0) if isinstance(method.rule, GreedyRelaxed) else Sampling()
    alone = {r.name: next(iter(method.decode(law, 1, [r]))) for r in IMAGES}
    for slots, images in ((1, IMAGES), (3, IMAGES), (4, IMAGES[::-1]), (7, IMAGES)):
        for image in method.decode(law, slots, images):
            own = alone[image.name]
            assert image.codes == own.codes
            shapes = [(s.position, s.depth, s.width, s.nodes, s.accepted) for s in image.steps]
            assert shapes == [(s.position, s.depth, s.width, s.nodes, s.accepted) for s in own.steps]
            assert (image.target_calls, image.drafter_calls) == (own.target_calls, own.drafter_calls)


@pytest.mark.parametrize("shape", [TreeShape(9, 3, 2), TreeShape(12, 1, 3), TreeShape(6, 4, 5)], ids=str)
@pytest.mark.parametrize("kind", ["network", "self-draft"])
def test_trees_deeper_than_they_have_nodes(kind: str, shape: TreeShape) -> None:
    """In a cache with room for their nodes and no more, as commands allocate it."""
    law, slots = Sampling(), 3
    longest = max(request.prompt.length for request in IMAGES)
    target = ARTarget(decoder(), GRID, FIRST, CODES, slots, law.branches, longest, shape.budget + 1)
    proposer: Proposer = SelfDraftProposer(
        CandidateCache(GRID, slots, shape.width, "above", CODES, target.device)
    )
    if kind == "network":
        drafter = EagleDrafter(net(), target, shape.depth, shape.width)
        proposer = EagleProposer(drafter, law, grow_dynamic, slots)
    images = speculative(target, proposer, Fixed(shape), coupled(law), IMAGES, law)
    assert {image.name: image.codes for image in images} == reference("sampled")


@pytest.mark.parametrize("kind", ["plain", "network"])
def test_runs_leave_nothing_behind(kind: str) -> None:
    """Some with fewer images than slots, some left before their images were done."""
    method, law = Method("fixed", coupled(Sampling())), Sampling()
    target = make_target(3, law.branches)
    proposer = method.proposer(target, law)
    for count in (1, 1, 2, 3, *[1] * 20):
        images = autoregressive(target, IMAGES[:count], law, method.rule.noise)
        if kind == "network":
            images = speculative(target, proposer, method.policy(3), method.rule, IMAGES[:count], law)
        image = next(images)
        assert image.codes == reference("sampled")[image.name]


@pytest.mark.parametrize("depth", [1, 3, 20])
def test_the_last_tree_is_cut(depth: int) -> None:
    """Not a code beyond the image, even by a drafter that is always right."""
    law = Sampling(temperature=0.0)
    logits = table(3, 6)
    target = TabularTarget(logits, Grid(2, 3), 2)
    proposer = EagleProposer(TabularDrafter(logits), law, grow_dynamic, 2)
    policy = Fixed(TreeShape(depth, 2, 30))
    images = list(speculative(target, proposer, policy, Coupled(Noise(4, silent=True)), requests(3), law))
    assert len(images) == 3
    for image in images:
        assert len(image.codes) == 6
        assert all(step.accepted == step.depth for step in image.steps)
        assert [step.depth for step in image.steps] == {1: [1, 1, 0], 3: [3, 0], 20: [4]}[depth]


def test_a_drafter_that_knows_the_law_has_every_level_accepted() -> None:
    """Coupled at temperature 1 as well: drafts and target share their noise."""
    for law in (Sampling(temperature=0.0), Sampling(temperature=1.0, guidance=1.5)):
        logits = table(4, 8)
        target = TabularTarget(logits, Grid(2, 4), 3)
        proposer = EagleProposer(TabularDrafter(logits), law, grow_dynamic, 3)
        rule = Coupled(Noise(4, silent=law.greedy))
        for image in speculative(target, proposer, Fixed(TreeShape(3, 2, 6)), rule, requests(5), law):
            assert [(step.depth, step.accepted) for step in image.steps] == [(3, 3), (2, 2)]


def test_no_requests() -> None:
    assert list(Method("fixed", coupled(Sampling())).decode(Sampling(), 2, [])) == []
    assert plain(Sampling(), 2, []) == {}


def random_tree(slots: int, nodes: int, seed: int) -> DraftTree:
    """Random topologies with padding at the end of some rows."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.zeros(slots, nodes, dtype=torch.int64)
    depths = torch.zeros_like(parents)
    for node in range(1, nodes):
        parents[:, node] = (torch.rand(slots, generator=generator) * node).long()
        depths[:, node] = depths.gather(1, parents[:, node : node + 1])[:, 0] + 1
    codes = torch.randint(0, CODES, (slots, nodes), generator=generator)
    deepest = int(depths.max())
    valid = torch.ones_like(parents, dtype=torch.bool)
    return DraftTree(codes, parents, depths, ancestor_mask(parents, deepest), valid, deepest, nodes)


def path_to(tree: DraftTree, slot: int, node: int) -> list[int]:
    """Nodes from the root to a node."""
    path = [node]
    while path[0]:
        path.insert(0, int(tree.parents[slot, path[0]]))
    return path


def started(slots: int, branches: int, kv_heads: int = 4) -> ARTarget:
    """A target whose slots hold prompts of different lengths."""
    target = make_target(slots, branches, decoder(kv_heads=kv_heads))
    for slot in range(slots):
        target.prefill(slot, IMAGES[slot].prompt)
    return target


def alone(prompt: Prompt, codes: list[int], branches: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Logits [G, V] and features [G, D] after a prompt and codes, without a cache."""
    model, logits, features = decoder(kv_heads=kv_heads), [], []
    for tokens in (prompt.conditional, prompt.unconditional)[:branches]:
        hidden = model.causal(torch.tensor([tokens + [code + FIRST for code in codes]]))[0, -1]
        logits.append(model.head(hidden)[FIRST : FIRST + CODES])
        features.append(hidden)
    return torch.stack(logits), torch.stack(features)


def committed(target: ARTarget, seed: int) -> list[list[int]]:
    """Commit two random paths of different lengths in every slot; the codes committed."""
    taken: list[list[int]] = [[] for _ in range(target.slots)]
    for turn in range(2):
        tree = random_tree(target.slots, 9, seed + turn)
        target.forward(tree, [*map(len, taken)])
        ends = [(3 * slot + 5 * turn + 2) % tree.nodes for slot in range(target.slots)]
        paths = [path_to(tree, slot, end) for slot, end in enumerate(ends)]
        longest = max(len(path) for path in paths)
        index = torch.tensor([path + [0] * (longest - len(path)) for path in paths])
        target.commit(tree, Verdict(index, torch.tensor([len(path) for path in paths]), index))
        for slot, path in enumerate(paths):
            taken[slot] += tree.codes[slot, path].tolist()
    return taken


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("branches", [1, 2])
def test_node_logits_are_those_of_its_path_alone(branches: int, kv_heads: int) -> None:
    target = started(3, branches, kv_heads)
    taken = committed(target, seed=10)
    tree = random_tree(3, 14, seed=20)
    scored = target.forward(tree, [*map(len, taken)])
    for slot in range(3):
        for node in range(tree.nodes):
            codes = taken[slot] + tree.codes[slot, path_to(tree, slot, node)].tolist()
            expected = alone(IMAGES[slot].prompt, codes, branches, kv_heads)
            torch.testing.assert_close(scored.logits[:, slot, node], expected[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(scored.features[:, slot, node], expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("branches", [1, 2])
def test_cache_after_commit_is_a_fresh_prefill(branches: int) -> None:
    target = started(3, branches)
    taken = committed(target, seed=30)
    for slot, codes in enumerate(taken):
        prompt = IMAGES[slot].prompt
        tail = [code + FIRST for code in codes]
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
        target.forward(random_tree(3, 9, seed=50), [0] * 3)
        target.cache.commit(path, count, leafy_chain)
        held = [target.cache.store[:, row, :, :, : target.cache.length[row]] for row in range(3)]
        caches.append(torch.cat([part.flatten() for part in held]))
    assert torch.equal(*caches) is same


def test_a_slot_forgets_its_last_image() -> None:
    target = started(2, 2)
    committed(target, seed=40)
    prefix = target.prefill(0, IMAGES[2].prompt)
    fresh = make_target(1, 2).prefill(0, IMAGES[2].prompt)
    torch.testing.assert_close(prefix.logits, fresh.logits, atol=1e-5, rtol=1e-5)
    logits = target.forward(root_only_tree(torch.tensor([3, 4])), [0, 20]).logits
    expected, _ = alone(IMAGES[2].prompt, [3], 2, 4)
    torch.testing.assert_close(logits[:, 0, 0], expected, atol=1e-5, rtol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="positions"):
        ARTarget(decoder(), GRID, FIRST, CODES, 1, 2, 50, 60)
    with pytest.raises(ValueError, match="prompt"):
        make_target(1, 2).prefill(0, Prompt([0] * (MAX_PROMPT + 1), [0]))


def test_bf16_runs() -> None:
    """Whole images, the same from run to run; other tokens than fp32 are allowed."""
    law, model = Sampling(), decoder(torch.bfloat16)

    def run() -> dict[str, list[int]]:
        target = make_target(3, 2, model)
        drafter = EagleDrafter(net(torch.bfloat16), target, 5, 5)
        proposer = EagleProposer(drafter, law, grow_dynamic, 3)
        images = speculative(target, proposer, AdjacencyAdaptive(ADAPT, 3), coupled(law), IMAGES, law)
        return {image.name: image.codes for image in images}

    first = run()
    assert sorted(first) == sorted(request.name for request in IMAGES)
    assert all(len(codes) == GRID.size and 0 <= min(codes) <= max(codes) < CODES for codes in first.values())
    assert run() == first
