"""--deterministic: in bf16 too an exact method draws the AR baseline's image; it is refused elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adt_tree import Pipeline, Sampling
from models.errors import CheckpointError
from models.loading import load
from models.packed import packable, row_invariant
from models.spec import LoadOptions
from tests.conftest import Refused

PROMPTS = ["noto emoji of red heart", "fluent emoji of pizza", "twemoji emoji of owl"]
multiplied = pytest.mark.skipif(
    not packable(torch.ones(1, 1).bfloat16()), reason="no bf16 products on this CPU"
)


@multiplied
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_seed_gives_one_image_in_bf16(temperature: float) -> None:
    """Without the option images part; with it none does, whatever the tree and the images in flight."""
    exact = Pipeline.from_pretrained(precision="bf16", options=LoadOptions(deterministic=True))
    rough, sampling = Pipeline(replace(exact.model, deterministic=False)), Sampling(temperature)

    def codes(pipe: Pipeline, method: str, batch_size: int) -> list[list[int]]:
        return pipe(PROMPTS, method=method, sampling=sampling, seed=3, batch_size=batch_size).codes

    baseline = codes(exact, "ar", 1)
    for method, batch_size in (("ar", 3), ("eagle-1", 1), ("adt-tree", 2), ("self-draft", 3)):
        assert codes(exact, method, batch_size) == baseline, method
    assert codes(rough, "self-draft", 1) != codes(rough, "ar", 1)


def test_products_that_depend_on_their_neighbours_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("emoji", LoadOptions(precision="fp32"))
    if packable(torch.ones(1, 1)):
        assert row_invariant(model.decoder)
        products = "models.packed.Product.__call__"
        monkeypatch.setattr(products, lambda self, x: x.sum() + torch.zeros(len(x), 1))
    assert not row_invariant(model.decoder)
    with pytest.raises(CheckpointError, match="--deterministic: this CPU's products in fp32"):
        load("emoji", LoadOptions(precision="fp32", deterministic=True))


def test_where_it_is_not_made_for_it_is_refused(refused: Refused, tmp_path: Path) -> None:
    words = "generate_images --deterministic --precision fp16 --output_dir".split()
    assert "choose another --precision" in refused(*words, tmp_path / "out")
