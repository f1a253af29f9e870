"""Two rasters with different sides, one after the other: every method makes the AR baseline's codes, and the
records say which raster a tree belongs to."""

from __future__ import annotations

from functools import cache

import pytest

from adt_tree.engine import build
from adt_tree.grid import Grid, Raster
from adt_tree.method import METHODS, Method
from adt_tree.policy import AdaptiveTree, TreeShape
from adt_tree.records import Decoded
from adt_tree.sampling import Sampling
from adt_tree.static_trees import StaticTree
from models.model import Model
from tests.decoding import codes_of, model_of
from tests.test_engine import CODEBOOK, FIRST, IMAGES, decoder, net

PREVIEW, PICTURE = Raster(3, 5), Raster(6, 4)
GRID = Grid(PICTURE.height, PICTURE.width, before=(PREVIEW,))
ADAPT = AdaptiveTree(depth_max=7, width_max=4, depth_start=3, width_start=3, budget=14)
TREES = {
    "eagle-1": StaticTree("naive_extend_57"),
    "eagle-2": TreeShape(5, 3, 12),
    "adt-tree": ADAPT,
    "self-draft": TreeShape(9, 3, 14),  # longer than a row of either raster
    "adt-self-draft": ADAPT,
}
# Every exact method that drafts, with every setting of seed_cells.
METHOD_CELLS = [(name, cells) for name in TREES for cells in (METHODS[name].seed_cells or (None,))]


def model() -> Model:
    """Returns a random network over both rasters."""
    return model_of(decoder(), net(), GRID, FIRST, CODEBOOK)


def decoded(method: Method, slots: int) -> dict[str, Decoded]:
    """Returns the images by name."""
    longest = max(request.prompt.length for request in IMAGES)
    return {image.name: image for image in build(model(), method, slots, longest).decode(IMAGES)}


@cache
def reference(temperature: float) -> dict[str, list[int]]:
    """Returns the AR baseline's codes, one image at a time."""
    return codes_of(decoded(Method("ar", Sampling(temperature)), 1).values())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("name", "cells"), [("ar", None), *METHOD_CELLS], ids=str)
def test_two_rasters_decode_as_the_ar_baseline_does(name: str, cells: str | None, temperature: float) -> None:
    images = decoded(Method(name, Sampling(temperature), TREES.get(name), seed_cells=cells), 3)
    assert codes_of(images.values()) == reference(temperature)
    crossing = 0
    for image in images.values():
        last = image.steps[-1]
        assert len(image.codes) == PREVIEW.size + PICTURE.size == last.position + last.accepted + 1
        for step in image.steps:
            assert (step.row, step.column, step.raster) == GRID.cell(step.position)
            crossing += step.position < PREVIEW.size < step.position + step.accepted + 1
    assert crossing or name == "ar"  # the last tree of a raster reaches into the next


@pytest.mark.parametrize("name", ["adt-tree", "adt-self-draft"])
def test_the_first_tree_of_a_raster_has_the_start_values(name: str) -> None:
    for image in decoded(Method(name, Sampling(), ADAPT), 3).values():
        roots = [GRID.cell(step.position - 1).raster for step in image.steps]
        for raster in (0, 1):
            first = image.steps[roots.index(raster)]
            assert (first.depth, first.width) == (ADAPT.depth_start, ADAPT.width_start)
        others = [step for step in image.steps if GRID.cell(step.position - 1).raster]
        assert {(step.depth, step.width) for step in others} > {(ADAPT.depth_start, ADAPT.width_start)}


def test_a_model_of_one_raster_records_none() -> None:
    one = model_of(decoder(), net(), Grid(2, 3), FIRST, CODEBOOK)
    image = next(build(one, Method("ar", Sampling()), 1, 10).decode(IMAGES[:1]))
    assert {step.raster for step in image.steps} == {None}
    assert all("raster" not in step.as_dict() for step in image.steps)
