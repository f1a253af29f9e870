"""model.generate(..., custom_generate=...) of GLM-Image: the codes of two rasters, and the token behind
them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adt_tree.errors import UserError
from tests.adt_tree.generation.test_custom_generate import FORMS, module_cache
from tests.models.parity.test_glm_image import TEXTS, Theirs
from tests.support import tiny_glm_image as tiny
from tests.support.checkpoints import Checkpoints
from tests.support.refusal import refusal

__all__ = ["module_cache"]  # a fixture that every test uses
ROWS, COLUMNS = 3, 2
LENGTH = 19 * 13 + ROWS * COLUMNS  # the preview's codes and the image's


@pytest.fixture(scope="module")
def theirs(checkpoints: Checkpoints) -> Theirs:
    """Returns a tiny checkpoint as transformers loads it."""
    return Theirs(checkpoints["glm_image"].path)


def arguments(theirs: Theirs, count: int, **more: Any) -> dict[str, Any]:
    """Returns the arguments of a greedy call that makes whole images and the token behind them."""
    inputs = theirs.inputs(TEXTS[:count], theirs.ours(ROWS, COLUMNS).model.grid)
    return {**inputs, "do_sample": False, "max_new_tokens": LENGTH + 1, **more}


def only_codes(row: int, ids: Tensor) -> list[int]:
    """Allows the codes alone, which our decoding does by masking the other rows of the head."""
    return list(range(tiny.CODES))


@pytest.mark.parametrize(
    ("form", "count", "method", "behind"), [("folder", 1, None, 1), ("callable", 3, "self-draft", 0)]
)
def test_tokens_of_generate(theirs: Theirs, form: str, count: int, method: str, behind: int) -> None:
    """All greedy tokens are equal, with the padding of the prompts. The token behind the image may be any
    token of the vocabulary."""
    call = arguments(theirs, count, max_new_tokens=LENGTH + behind)
    start = call["input_ids"].shape[1]
    masked = theirs.model.generate(**(call | {"max_new_tokens": LENGTH}), prefix_allowed_tokens_fn=only_codes)
    tokens = theirs.model.generate(**call, **FORMS[form], method=method)
    assert torch.equal(tokens[:, : start + LENGTH], masked)
    assert tokens.shape[1] == start + LENGTH + behind
    assert len({tuple(row) for row in tokens.tolist()}) == count
    if behind:
        assert tokens[:, -1].tolist() == last_of_generate(theirs, call, masked)
    if count == 3:
        assert call["attention_mask"].min() == 0, "no padding was tested"


REFUSED: dict[str, dict[str, Any]] = {
    "image_grid_thw": {"image_grid_thw": torch.tensor([[1, 3, 2], [1, 19, 13], [1, 3, 2]])},
    "size at a time": {"image_grid_thw": torch.tensor([[1, 3, 2], [1, 19, 13], [1, 2, 3], [1, 13, 19]])},
    "guidance_scale": {"guidance_scale": 2.0},
    f"max_new_tokens {LENGTH - 1}": {"max_new_tokens": LENGTH - 1},
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_honoured_is_refused(theirs: Theirs, word: str) -> None:
    call = arguments(theirs, 2, **REFUSED[word]) | FORMS["callable"]
    assert word in refusal(lambda: theirs.model.generate(**call))


def test_source_images_are_refused(theirs: Theirs) -> None:
    """A prompt that contains the end of an image asks for an edited image."""
    call = arguments(theirs, 1)
    call["input_ids"][0, 3] = tiny.CODES + tiny.END
    with pytest.raises(UserError, match="prompt 0"):
        theirs.model.generate(**call, **FORMS["callable"])


def last_of_generate(theirs: Theirs, call: dict[str, Any], masked: Tensor) -> list[int]:
    """Returns the tokens that `generate` itself puts behind the images. A function forces the codes inside
    them."""
    start = call["input_ids"].shape[1]

    def forced(row: int, ids: Tensor) -> list[int]:
        at = len(ids)
        return list(range(tiny.CODES + tiny.MORE)) if at == start + LENGTH else [int(masked[row, at])]

    return theirs.model.generate(**call, prefix_allowed_tokens_fn=forced)[:, -1].tolist()
