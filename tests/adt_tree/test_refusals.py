"""The Python API refuses bad values: one line names the argument and its value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from adt_tree import AdaptiveTree, Lantern, Pipeline, Sampling, StaticTree, TreeShape
from adt_tree.errors import as_seed
from adt_tree.grid import Grid, Raster
from lab.settings import Control
from models.family import LoadOptions
from models.loading import load
from tests.support.refusal import refusal

PROMPTS = ["sun", "red moon", "a"]
Make = Callable[[Pipeline], object]
NUMBERS: dict[str, tuple[Callable[[Any], object], tuple[Any, ...]]] = {
    "temperature": (lambda x: Sampling(temperature=x), (-1, 101, nan, inf, "1", None)),
    "guidance": (lambda x: Sampling(guidance=x), (nan, -inf, -0.1, 1000, [3.0], True)),
    "top_p": (lambda x: Sampling(top_p=x), (0, 1.01, nan, "0.9")),
    "top_k": (lambda x: Sampling(top_k=x), (-1, 50.0, nan, "50", True)),
    "lantern.delta": (lambda x: Lantern(delta=x), (-0.1, nan, 1e7, "0.1")),
    "lantern.k": (lambda x: Lantern(k=x), (-1, 2.5, nan)),
    "tree.depth": (lambda x: TreeShape(x, 2, 4), (-1, 1.5, nan, "5")),
    "tree.beta": (lambda x: AdaptiveTree(beta=x), (-0.1, 1.1, nan, "x")),
    "tree.width_max": (lambda x: AdaptiveTree(width_max=x), (-1, 4.0, nan)),
    "seed": (as_seed, (True, 1.5, nan, "7", b"7", None, [7], torch.tensor(True), np.True_)),
}
START = {"depth_start": 4, "width_start": 4, "depth_max": 6, "width_max": 6, "depth_min": 2, "width_min": 2}
CONSTANTS: list[dict[str, Any]] = [
    {"init": "diagonal"}, {"depth_min": 0}, {"depth_start": 7}, {"width_start": 1}, {"width_min": 5},
    {"step_depth": -1}, {"step_width": -1}, {"budget": -1},
]  # fmt: skip
CASES: list[tuple[Make, str]] = [
    # methods and trees
    (lambda pipe: pipe.method("medusa"), "method 'medusa'.* ar, eagle-1"),
    (lambda pipe: pipe("sun", method=["ar"]), r"method \['ar'\]"),
    (lambda pipe: pipe("sun", method=""), "method ''"),
    (lambda pipe: replace(pipe.method("self-draft"), verify="rejection"), "verify .*self-draft.*coupled"),
    (lambda pipe: replace(pipe.method("sjd-coupled"), verify="rejection"), "verify 'rejection': .*sjd-c"),
    (lambda pipe: replace(pipe.method("self-draft"), seed_cells="below"), "seed_cells .*above, left"),
    (lambda pipe: replace(pipe.method("sjd-pac"), seed_cells="both"), "seed_cells 'both'.*random, left, abo"),
    (lambda pipe: replace(pipe.method("eagle-2"), rules="published"), "rules .*fixed, reference"),
    (lambda pipe: replace(pipe.method("ar"), relaxed=Control("accept-all")), "accept-all.*method ar"),
    (lambda pipe: pipe.method("ar", lantern=Lantern()), "lantern: method ar"),
    (lambda pipe: pipe.method("sjd", lantern=Lantern()), "lantern: method sjd"),
    (lambda pipe: pipe.method("adt-tree", tree=TreeShape(2, 2, 4)), "adt-tree.*AdaptiveTree"),
    (lambda pipe: pipe.method("eagle-2", tree=AdaptiveTree()), "eagle-2.*TreeShape.*AdaptiveTree"),
    (lambda pipe: pipe.method("eagle-1", tree=StaticTree("oak")), "tree 'oak'.*mc_sim_7b_63"),
    (lambda pipe: pipe("sun", method="eagle-2", tree=TreeShape(2, 65, 70)), " 65: .* 64 codes"),
    (lambda pipe: pipe("sun", seed=b"7"), "seed b'7'"),
    # settings beside a whole method, and settings of another type
    (lambda pipe: pipe("sun", pipe.method("ar"), sampling=Sampling(0.0)), "sampling"),
    (lambda pipe: next(pipe.stream("sun", pipe.method("ar"), lantern=Lantern())), "lantern"),
    (lambda pipe: pipe.method(pipe.method("eagle-2"), sampling=Sampling()), "sampling"),
    (lambda pipe: pipe("sun", sampling={"temperature": 0}), "sampling"),
    (lambda pipe: pipe("sun", method="eagle-2", lantern=True), "lantern True"),
    (lambda pipe: pipe("sun", lantern=Lantern(k=63), method="eagle-2"), "lantern.k 63.* 64 codes"),
    (lambda pipe: pipe("sun", "eagle-2", lantern=Lantern(table="~/no.npy")), r"no\.npy"),
    # prompts, seeds and codes
    *((lambda pipe, bad=bad: pipe(bad), word) for bad, word in (
        ([], "prompt"), ({"sun"}, "{'sun'}"), (None, "None"), (3, "3"), ([b"x"], "b'x'"),
        (["sun", 3], "prompt 1 is 3"), (["sun", ""], "blank"), (" \n\t", "blank"), ("\ud800 hat", "Unicode"),
        (pandas.Series(["sun", None]), "prompt 1"),
    )),
    (lambda pipe: pipe(PROMPTS, seed=[1]), "1 seeds.* 3 prompts"),
    (lambda pipe: pipe.requests(["sun", "sea"], [1, "x"]), "'x'"),
    *((lambda pipe, bad=bad: pipe("sun", batch_size=bad), f"batch_size {bad}") for bad in (0, 1.5)),
    (lambda pipe: pipe.image([1, 2]), r"codes \[1, 2\]"),
    (lambda pipe: pipe.image([10**6] * pipe.model.grid.size), r"codes \[1000000"),
    # loading
    (lambda _: Pipeline.from_pretrained(None), "None"),
    (lambda _: Pipeline.from_pretrained("emoji", drafter=""), "drafter_path"),
    (lambda _: Pipeline.from_pretrained("emoji", drafter=False), "False"),
    (lambda _: Pipeline.from_pretrained("emoji", options={}), "options {}"),
    (lambda _: Pipeline.from_pretrained("emoji", device="gpu"), "device gpu"),
    (lambda _: Pipeline.from_pretrained("emoji", precision="int8"), "precision int8"),
    (lambda _: load("emoji", LoadOptions(device=0)), "device 0"),
    *((lambda _, name=name: load("emoji", LoadOptions(**{name: "x"})), f"^{name} x: emoji does not read it")
      for name in ("vq_path", "text_encoder", "tokenizer_base_path", "trust_torchscript")),
]  # fmt: skip


def all_cases() -> Iterator[tuple[Make, str]]:
    """Returns all cases: what is called, and the pattern of its line."""
    yield from CASES
    for name, (make, values) in NUMBERS.items():
        yield from ((lambda _, m=make, x=x: m(x), f"^{name} {re.escape(repr(x))}: ") for x in values)
    yield from ((lambda _, w=wrong: AdaptiveTree(**START | w), r"tree\.") for wrong in CONSTANTS)


@pytest.mark.parametrize(("make", "named"), [*all_cases()])
def test_one_line_names_the_argument(pipe: Pipeline, make: Make, named: str) -> None:
    assert re.search(named, refusal(lambda: make(pipe)))


@pytest.mark.parametrize("position", [-1, 6, 100])
def test_a_cell_outside_the_grid(position: int) -> None:
    for grid in (Grid(2, 3), Grid(1, 3, before=(Raster(1, 3),))):
        with pytest.raises(ValueError, match=str(position)):
            grid.cell(position)


@pytest.mark.parametrize("sides", [(0, 3), (3, 0), (-1, 2)])
def test_a_grid_without_cells(sides: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"grid {sides[0]} x"):
        Grid(*sides)
