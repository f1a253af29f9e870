"""The engine on a tiny random transformer in fp32: every method makes the AR baseline's images, and the
caches hold the committed prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from adt_tree.engine import Engine, build
from adt_tree.grid import Grid
from adt_tree.method import METHODS, Method
from adt_tree.policy import INITS, AdaptiveTree, TreeShape
from adt_tree.records import Decoded
from adt_tree.roles import Request
from adt_tree.settings import Lantern, Sampling
from adt_tree.static_trees import STATIC_TREES, StaticTree
from models.decoder.cache import AttentionMetadata, KVCache
from models.decoder.config import DecoderConfig
from models.decoder.transformer import Decoder
from models.drafter import DrafterNet
from models.model import Model
from models.target import Prompt
from tests.support.decoding import codes_of, commit_two_paths, model_of, path_to, random_tree
from tests.support.methods import RELAXED
from tests.support.tabular import TabularModel, requests, table

SIZES = DecoderConfig(40, 32, 48, 1, 4, max_positions=120, qk_norm=True)
CODES, FIRST, GRID, MAX_PROMPT, MAX_NODES = 24, 4, Grid(4, 4), 10, 60
CODEBOOK = torch.randn(CODES, 3, generator=torch.Generator().manual_seed(2))
IMAGES = [
    Request(str(n), Prompt([0, *[30 + n] * (n % 3 + 1), 38, 39], [0, 39]), 1000 + 7 * n) for n in range(5)
]
FIXED, LINE, TREE = TreeShape(4, 3, 12), TreeShape(6, 1, 6), TreeShape(5, 3, 14)
LONG = TreeShape(11, 2, 20)  # longer than a row
# Their depth exceeds their number of nodes.
DEEP = (TreeShape(9, 3, 2), TreeShape(12, 1, 3), TreeShape(6, 4, 5))
ADAPT = AdaptiveTree(depth_max=5, width_max=5, depth_start=3, width_start=3, budget=14)
WINDOWS = {"sjd": TreeShape(3, 1, 3), "sjd-coupled": TreeShape(3, 1, 3), "sjd-pac": TreeShape(3, 3, 13)}
Tree = TreeShape | AdaptiveTree | str | None
GREEDY = Sampling(temperature=0.0)
PLAIN = Sampling(temperature=0.0, guidance=1.0)  # greedy, without guidance
FILTERED = Sampling(temperature=0.9, top_k=7, top_p=0.9)


@cache
def decoder(kv_heads: int = 4, dtype: torch.dtype = torch.float32) -> Decoder:
    """Returns the random target network, whose weights are always the same."""
    torch.manual_seed(0)
    model = Decoder(replace(SIZES, num_layers=2, num_kv_heads=kv_heads))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.cut_head(FIRST, CODES)
    return model.to(dtype).eval().requires_grad_(False)


@cache
def net(dtype: torch.dtype = torch.float32) -> DrafterNet:
    """Returns the random drafter network. As there are 24 codes, some of its drafts are accepted."""
    torch.manual_seed(1)
    return DrafterNet(SIZES).to(dtype).eval().requires_grad_(False)


def random_model(kv_heads: int = 4, dtype: torch.dtype = torch.float32, graphs: bool = False) -> Model:
    """Returns the random networks as a model."""
    return model_of(decoder(kv_heads, dtype), net(dtype), GRID, FIRST, CODEBOOK, graphs=graphs)


def new_engine(
    method: Method, slots: int, graphs: bool = False, dtype: torch.dtype = torch.float32
) -> Engine:
    """Returns the engine of a method over the random networks, with or without graphs, and with caches as
    commands allocate them."""
    longest = max(request.prompt.length for request in IMAGES)
    return build(random_model(dtype=dtype, graphs=graphs), method, slots, longest)


@cache
def reference(sampling: Sampling) -> dict[str, list[int]]:
    """Returns the AR baseline's codes, generated one image at a time."""
    return codes_of(new_engine(Method("ar", sampling), 1).decode(IMAGES))


def check_records(image: Decoded, tree: Tree) -> None:
    """Checks that the steps add up to the image, and that their trees respect the budget and the end of the
    image."""
    most = tree.largest.budget if tree else 0
    position = 1
    for step in image.steps:
        assert (step.position, (step.row, step.column)) == (position, GRID.cell(position)[:2])
        assert step.accepted <= step.depth <= GRID.size - position - 1 and step.nodes <= most
        assert len(step.top1) == step.accepted + 1 and 1 / CODES <= min(step.top1) <= max(step.top1) <= 1
        position += step.accepted + 1
    assert position == GRID.size == len(image.codes)
    assert image.target_calls == len(image.steps)
    assert image.tau == pytest.approx((GRID.size - 1) / len(image.steps))


TREES: list[tuple[str, Tree]] = [("ar", None), ("eagle-2", FIXED)]
TREES += [("adt-tree", replace(ADAPT, init=init)) for init in INITS]
TREES += [("eagle-1", StaticTree(name)) for name in STATIC_TREES]
TREES += product(("self-draft",), (LINE, TREE, LONG))
TREES += [("adt-self-draft", ADAPT)]


def exact_methods(sampling: Sampling) -> list[Method]:
    """Returns every proposer with every kind of its trees, under the coupled rule."""
    cells = {name: "both" for name, spec in METHODS.items() if "both" in spec.seed_cells}
    return [Method(name, sampling, tree, seed_cells=cells.get(name)) for name, tree in TREES]


def one_of_each(methods: Sequence[Method]) -> list[Method]:
    """Returns a method of every name, rule and relaxation."""
    return list({(m.name, m.verify, m.lantern is None): m for m in methods}.values())


EXACT = exact_methods(Sampling()) + one_of_each(exact_methods(PLAIN)) + one_of_each(exact_methods(FILTERED))
EXACT += [Method(name, Sampling(), tree) for name in ("eagle-2", "self-draft") for tree in DEEP]
EXACT += [
    Method(name, GREEDY, tree, seed_cells=cells)
    for (name, tree), cells in product(WINDOWS.items(), ("random", "above"))
]
GUMBEL = [Method("sjd-gumbel", s, TreeShape(5, 1, 5), seed_cells="above") for s in (Sampling(), FILTERED)]
EXACT += GUMBEL
SLOTS = [(method, 4) for method in EXACT] + [(method, 1) for method in one_of_each(exact_methods(Sampling()))]


@pytest.mark.parametrize(("method", "slots"), SLOTS, ids=str)
def test_speculation_is_the_ar_baseline(method: Method, slots: int) -> None:
    assert method.exact
    images = list(new_engine(method, slots).decode(IMAGES))
    assert codes_of(images) == reference(method.sampling)
    assert any(step.accepted for image in images for step in image.steps) is method.drafting
    for image in images:
        check_records(image, method.tree)
        assert (image.drafter_calls > 0) is method.spec.network


def test_the_likeliest_code_is_known_at_every_position() -> None:
    """At temperature 0 the committed codes are the likeliest, so a drafting method records the same
    probabilities as the AR baseline."""
    likeliest = []
    for method in (Method("ar", GREEDY), Method("adt-tree", GREEDY, ADAPT)):
        images = new_engine(method, 3).decode(IMAGES)
        likeliest.append({i.name: [p for step in i.steps for p in step.top1] for i in images})
    assert {name: pytest.approx(top1, abs=2e-4) for name, top1 in likeliest[0].items()} == likeliest[1]


def drafted_methods(sampling: Sampling) -> list[Method]:
    """Returns the methods whose images depend on the drafts, at this sampling; some of them at temperature 0
    instead."""
    relaxed, static = Lantern(0.4, 8), StaticTree("mc_sim_7b_63")
    return [
        Method("eagle-2", sampling, FIXED, verify="rejection"),
        Method("adt-tree", sampling, ADAPT, relaxed, "rejection"),
        Method("eagle-1", sampling, static, relaxed, "rejection", "reference"),
        Method("eagle-1", sampling, StaticTree("naive_extend_57"), verify="rejection"),
        Method("adt-tree", sampling, replace(ADAPT, init="random"), relaxed),
        Method("adt-tree", GREEDY, replace(ADAPT, init="vertical"), relaxed),
        Method("eagle-1", GREEDY, static, relaxed),
        *(Method(name, sampling, tree) for name, tree in (WINDOWS | RELAXED).items()),
    ]


COMPANY = [*drafted_methods(Sampling()), *(Method(name, FILTERED, tree) for name, tree in WINDOWS.items())]
COMPANY += [Method("ar", Sampling()), Method("self-draft", Sampling(), TREE)]


@pytest.mark.parametrize("method", COMPANY, ids=str)
def test_an_image_is_the_same_in_any_company(method: Method) -> None:
    """An image does not depend on refills, nor on slots without requests, nor on the image before it."""
    alone = {image.name: image for image in new_engine(method, 1).decode(IMAGES)}
    for slots, images in ((3, IMAGES), (7, IMAGES[::-1])):
        for image in new_engine(method, slots).decode(images):
            single = alone[image.name]
            assert image.codes == single.codes
            shapes = [(s.position, s.depth, s.width, s.nodes, s.accepted) for s in image.steps]
            assert shapes == [(s.position, s.depth, s.width, s.nodes, s.accepted) for s in single.steps]
            assert (image.target_calls, image.drafter_calls) == (single.target_calls, single.drafter_calls)


@pytest.mark.parametrize(
    ("depth", "steps"),
    [(1, [(1, 1), (1, 1), (0, 0)]), (2, [(2, 2), (1, 1)]), (3, [(3, 3), (0, 0)]), (20, [(4, 4)])],
)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(guidance=1.5)])
def test_a_drafter_that_is_always_right(sampling: Sampling, depth: int, steps: list[tuple[int, int]]) -> None:
    """Every level is accepted, also at temperature 1, because drafts and target share their noise. The last
    tree is cut, so that no code lies beyond the image."""
    logits, method = table(3, 6), Method("eagle-2", sampling, TreeShape(depth, 2, 30))
    images = list(build(TabularModel(logits, logits, Grid(2, 3)), method, 2, 0).decode(requests(5)))
    assert len(images) == 5
    for image in images:
        assert len(image.codes) == 6
        assert [(step.depth, step.accepted) for step in image.steps] == steps


def tokens_of(codes: Sequence[int]) -> list[int]:
    """Returns the token ids of codes."""
    return [code + FIRST for code in codes]


def alone(prompt: Prompt, tokens: list[int], branches: int, kv_heads: int = 4) -> tuple[Tensor, Tensor]:
    """Returns logits [G, V] and features [G, D] behind a prompt and tokens, computed by one pass without a
    cache."""
    model, rows = decoder(kv_heads), (prompt.conditional, prompt.unconditional)[:branches]
    features = torch.stack([model.causal(torch.tensor([row + tokens]))[0, -1] for row in rows])
    return model.head(features), features


@pytest.mark.parametrize(("sampling", "kv_heads"), [(PLAIN, 4), (GREEDY, 2)])
def test_node_logits_are_those_of_its_path_alone(sampling: Sampling, kv_heads: int) -> None:
    target = random_model(kv_heads=kv_heads).target(3, sampling, MAX_NODES, MAX_PROMPT)
    for slot in range(3):
        target.prefill({slot: IMAGES[4].prompt})  # the next prompt replaces it
        target.prefill({slot: IMAGES[slot].prompt})
    taken = commit_two_paths(target, seed=10)
    tree = random_tree(3, 14, CODES, seed=20)
    scored = target.forward(tree, [*map(len, taken)])
    for slot in range(3):
        for node in range(tree.nodes):
            codes = taken[slot] + tree.codes[slot, path_to(tree, slot, node)].tolist()
            logits, features = alone(IMAGES[slot].prompt, tokens_of(codes), sampling.branches, kv_heads)
            torch.testing.assert_close(scored.logits[:, slot, node], logits, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(scored.features[:, slot, node], features, atol=1e-5, rtol=1e-5)


def test_the_same_unconditional_prefix_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot holds the same bits as after passes of its own."""
    prompts = [IMAGES[0].prompt, IMAGES[1].prompt, Prompt([0, 31], [0, 38]), IMAGES[1].prompt]
    alone = [random_model().target(1, GREEDY, MAX_NODES, MAX_PROMPT) for _ in prompts]
    expected = [target.prefill({0: prompt})[0] for target, prompt in zip(alone, prompts, strict=True)]
    target, passes, forward = random_model().target(2, GREEDY, MAX_NODES, MAX_PROMPT), [0], Decoder.forward

    def counted(*given: Any) -> Tensor:
        passes[-1] += 1
        return forward(*given)

    monkeypatch.setattr(Decoder, "forward", counted)
    for number, prompt in enumerate(prompts):
        target.release(1)
        prefix = target.prefill({1: prompt})[1]
        assert torch.equal(prefix.logits, expected[number].logits)
        assert all(map(torch.equal, prefix.features, expected[number].features))
        assert torch.equal(target.cache.store[:, 1::2], alone[number].cache.store)
        assert torch.equal(target.cache.length[1::2], alone[number].cache.length)
        passes.append(0)
    assert passes == [2, 1, 2, 2, 0], "the third prompt has another unconditional prefix"


@pytest.mark.parametrize(
    ("prompts", "passes"),
    [
        ([Prompt([0, 31, 32], [0, 39])] * 4, 2),
        ([Prompt([0, first, 32], [0, 39]) for first in (31, 35, 33, 31)], 2),
        ([Prompt([0] + [31] * count, [0, 39]) for count in (3, 1, 4, 2)], 5),
        ([Prompt([0] + [31] * count, [0] * count) for count in (3, 1, 3, 1)], 2 + 4),
    ],
    ids=["one prompt", "one length", "four lengths", "two unconditional prefixes"],
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_prefixes_of_one_length_share_a_pass(
    prompts: list[Prompt], passes: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots hold the same bits, and the images have the same codes, as those begun alone."""
    alone = random_model(kv_heads=kv_heads).target(1, GREEDY, MAX_NODES, MAX_PROMPT)
    target, calls, forward = (
        random_model(kv_heads=kv_heads).target(5, GREEDY, MAX_NODES, MAX_PROMPT),
        0,
        Decoder.forward,
    )

    def counted(*given: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return forward(*given)

    monkeypatch.setattr(Decoder, "forward", counted)
    slots = (4, 0, 1, 3)  # in any order, and without slot 2
    prefixes = target.prefill(dict(zip(slots, prompts, strict=True)))
    assert calls == passes and prefixes.keys() == set(slots)
    for slot, prompt in zip(slots, prompts, strict=True):
        alone.release(0)
        expected = alone.prefill({0: prompt})[0]
        assert torch.equal(prefixes[slot].logits, expected.logits)
        assert all(map(torch.equal, prefixes[slot].features, expected.features))
        assert torch.equal(target.cache.store[:, slot::5], alone.cache.store)
        assert torch.equal(target.cache.length[slot::5], alone.cache.length)
    assert not target.cache.store[:, 2::5].any()
    requests = [Request(str(n), prompt, seed=n) for n, prompt in enumerate(prompts)]
    together = codes_of(new_engine(Method("ar", FILTERED), 4).decode(requests))
    assert together == codes_of(new_engine(Method("ar", FILTERED), 1).decode(requests))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="positions"):
        random_model().target(1, GREEDY, 60, 50)
    with pytest.raises(ValueError, match="prompt"):
        random_model().target(1, GREEDY, MAX_NODES, MAX_PROMPT).prefill(
            {0: Prompt([0] * (MAX_PROMPT + 1), [0])}
        )


def test_room_for_longer_prompts_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass reads as much as the longest prompt in flight needs, and the codes stay the same."""
    bounds, metadata = list[int](), KVCache.metadata

    def watched(
        cache: KVCache, depths: Tensor, ancestors: Tensor, lengths: Sequence[int | None]
    ) -> AttentionMetadata:
        bounds.append(max(length for length in lengths if length is not None))
        return metadata(cache, depths, ancestors, lengths)

    monkeypatch.setattr(KVCache, "metadata", watched)
    longest = max(image.prompt.length for image in IMAGES)
    for method in (Method("ar", Sampling()), Method("eagle-2", Sampling(), FIXED)):
        engine = build(random_model(), method, 2, longest + 30)
        assert codes_of(engine.decode(IMAGES)) == reference(Sampling())
        assert max(bounds) < longest + GRID.size
        bounds.clear()
        next(engine.decode(IMAGES[:1]))  # the long prompts before it are forgotten
        assert max(bounds) < IMAGES[0].prompt.length + GRID.size < longest + GRID.size
        bounds.clear()


def test_bf16_runs() -> None:
    """Images are complete and the same in every run. Their codes may differ from those in fp32."""
    engine = new_engine(Method("adt-tree", Sampling(), ADAPT), 3, dtype=torch.bfloat16)
    first, again = (codes_of(engine.decode(IMAGES)) for _ in range(2))
    assert first == again and first.keys() == reference(Sampling()).keys()
    assert all(len(codes) == GRID.size and 0 <= min(codes) <= max(codes) < CODES for codes in first.values())
