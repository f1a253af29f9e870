"""The Python API: every exact method gives the same image in any batch, and a bad argument gives an error of
one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from adt_tree import METHODS, AdaptiveTree, Lantern, Pipeline, Sampling, StaticTree, TreeShape
from models.family import LoadOptions
from tests.support.refusal import refusal

PROMPTS = ["sun", "red moon", "a"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_seed_one_image(pipe: Pipeline, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, guidance=2.0)
    expected = pipe(PROMPTS, method="ar", sampling=sampling, seed=5)
    assert expected.stats["tau"] == 1 and len(expected.codes[0]) == pipe.model.grid.size
    exact = {name for name in METHODS if pipe.method(name, sampling=sampling).exact}
    relaxed = {name for name in METHODS if pipe.method(name).relaxed_rule}
    assert exact == {
        name for name, spec in METHODS.items() if spec.exact or not (temperature or name in relaxed)
    }
    for name in exact:
        out = pipe(PROMPTS, method=name, sampling=sampling, seed=5, batch_size=2)
        assert out.codes == expected.codes, name
        assert [a.tobytes() for a in out.images] == [b.tobytes() for b in expected.images]


def test_a_prompt_alone_and_in_a_list(pipe: Pipeline) -> None:
    together = pipe(PROMPTS, seed=3)
    alone = [pipe(text, seed=3 + place).codes[0] for place, text in enumerate(PROMPTS)]
    assert together.codes == alone == pipe(PROMPTS, seed=[3, 4, 5]).codes


def test_statistics_are_of_the_steps(pipe: Pipeline) -> None:
    out = pipe(PROMPTS, method="eagle-2", tree=TreeShape(2, 2, 4))
    steps = [step for steps in out.steps for step in steps]
    assert len(out.images) == len(PROMPTS)
    assert out.stats["tau"] == sum(step.accepted + 1 for step in steps) / len(steps)
    assert out.stats["target_calls"] == len(steps) / len(PROMPTS)
    assert max(step.depth for step in steps) <= 2 and max(step.nodes for step in steps) <= 4


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda pipe: pipe.method("medusa"), "method 'medusa'.* ar, eagle-1"),
        (lambda pipe: replace(pipe.method("self-draft"), verify="rejection"), "verify .*self-draft.*coupled"),
        (lambda pipe: replace(pipe.method("self-draft"), seed_cells="below"), "seed_cells .*above, left"),
        (lambda pipe: pipe.method("ar", lantern=Lantern()), "lantern: method ar"),
        (lambda pipe: pipe.method("adt-tree", tree=TreeShape(2, 2, 4)), "adt-tree.*AdaptiveTree"),
        (lambda pipe: pipe.method("eagle-2", tree=AdaptiveTree()), "eagle-2.*TreeShape.*AdaptiveTree"),
        (lambda pipe: pipe.method("eagle-1", tree=StaticTree("oak")), "tree 'oak'.*mc_sim_7b_63"),
        (lambda pipe: replace(pipe.method("eagle-2"), rules="published"), "rules .*fixed, reference"),
        (lambda pipe: replace(pipe.method("eagle-2"), control="floor"), "accept-none"),
        (lambda pipe: pipe.method("sjd", lantern=Lantern()), "lantern: method sjd"),
        (
            lambda pipe: replace(pipe.method("sjd-coupled"), verify="rejection"),
            "verify 'rejection': method sjd-coupled",
        ),
        (
            lambda pipe: replace(pipe.method("sjd-pac"), seed_cells="both"),
            "seed_cells 'both'.*random, left, above",
        ),
        (lambda pipe: pipe([]), "prompt"),
        (lambda pipe: pipe("sun", pipe.method("ar"), sampling=Sampling(0.0)), "sampling"),
        (lambda pipe: next(pipe.stream("sun", pipe.method("ar"), lantern=Lantern())), "lantern"),
        (lambda pipe: pipe(PROMPTS, seed=[1]), "1 seeds.* 3 prompts"),
        (lambda pipe: pipe.method(pipe.method("eagle-2"), sampling=Sampling()), "sampling"),
        (lambda pipe: Lantern(delta=-1), "lantern_delta -1"),
        (lambda pipe: pipe("sun", lantern=Lantern(k=63), method="eagle-2"), "lantern_k 63.* 64 codes"),
        (lambda pipe: pipe("sun", method="eagle-2", tree=TreeShape(2, 65, 70)), " 65 .* 64 codes"),
        # values of another kind
        (lambda pipe: pipe("sun", method="eagle-2", lantern=True), "lantern True"),
        (lambda pipe: pipe("sun", sampling={"temperature": 0}), "sampling"),
        (lambda pipe: pipe("sun", method=["ar"]), r"method \['ar'\]"),
        (lambda pipe: pipe("sun", method=""), "method ''"),
        (lambda pipe: pipe({"sun"}), "{'sun'}"),
        (lambda pipe: pipe.image([1, 2]), r"codes \[1, 2\]"),
        (lambda pipe: pipe.image([10**6] * pipe.model.grid.size), r"codes \[1000000"),
        (lambda pipe: Pipeline.from_pretrained(None), "None"),
        (lambda pipe: Pipeline.from_pretrained("emoji", drafter=""), "drafter_path"),
        (lambda pipe: Pipeline.from_pretrained("emoji", drafter=False), "False"),
        (lambda pipe: Pipeline.from_pretrained("emoji", options={}), "options {}"),
    ],
)
def test_bad_arguments_are_one_line(pipe: Pipeline, make: Callable[[Pipeline], object], named: str) -> None:
    assert re.search(named, refusal(lambda: make(pipe), ValueError))


def test_the_fastest_method_is_exact_and_taken_by_default(pipe: Pipeline) -> None:
    method = pipe.method()
    assert method.exact and pipe("sun", seed=1).codes == pipe("sun", method=method, seed=1).codes


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("zipar", "pjd")])
def test_a_stream_is_the_image_as_it_grows(pipe: Pipeline, name: str) -> None:
    """Two images are in flight. The codes of each step follow the codes before it, its path is that of the
    accepted drafts in its tree, and confidence falls along paths."""
    expected = pipe(PROMPTS, method=name, seed=5, batch_size=2)
    codes: dict[int, list[int]] = {}
    for step in pipe.stream(PROMPTS, method=name, seed=5, batch_size=2):
        tree, before = step.tree, codes.setdefault(step.image, [step.tree.codes[0]])
        assert step.position == len(before) and tree.codes[0] == before[-1]
        assert [tree.parents[node] for node in tree.path] == [0, *tree.path][: len(tree.path)]
        assert [tree.codes[node] for node in tree.path] == step.codes[:-1]
        assert all(tree.depths[n] == tree.depths[p] + 1 for n, p in enumerate(tree.parents) if n)
        assert tree.confidence[0] == 0 and len(tree.codes) == step.step.nodes + 1
        assert all(tree.confidence[n] <= tree.confidence[p] + 1e-6 for n, p in enumerate(tree.parents))
        before += step.codes
    assert [codes[place] for place in range(len(PROMPTS))] == expected.codes


def test_a_static_tree_has_no_node_below_a_filtered_one(pipe: Pipeline) -> None:
    """Two codes pass the filter, and the tree asks for more children of a node than these."""
    for step in pipe.stream("sun", method="eagle-1", sampling=Sampling(top_k=2, guidance=2.0)):
        assert len(step.tree.codes) == step.step.nodes + 1


def test_options_of_loading_are_read(tiny_checkpoint: Path) -> None:
    options = LoadOptions(device="cpu", precision="bf16")
    assert Pipeline.from_pretrained(str(tiny_checkpoint), options=options).model.precision == "bf16"
    full = Pipeline.from_pretrained(str(tiny_checkpoint), precision="fp32", options=options)
    assert full.model.precision == "fp32"
