"""Numbers of every type are read where they are given, or refused there in one line that names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from adt_tree import AdaptiveTree, Lantern, Sampling, TreeShape
from adt_tree.errors import UserError, as_seed

NAN, INFINITE = float("nan"), float("inf")
NUMBERS: dict[str, tuple[Callable[[Any], object], tuple[Any, ...]]] = {
    "temperature": (lambda x: Sampling(temperature=x), (-1, 101, NAN, INFINITE, "1", None)),
    "guidance": (lambda x: Sampling(guidance=x), (NAN, -INFINITE, -0.1, 1000, [3.0], True)),
    "top_p": (lambda x: Sampling(top_p=x), (0, 1.01, NAN, "0.9")),
    "top_k": (lambda x: Sampling(top_k=x), (-1, 50.0, NAN, "50", True)),
    "lantern_delta": (lambda x: Lantern(delta=x), (-0.1, NAN, 1e7, "0.1")),
    "lantern_k": (lambda x: Lantern(k=x), (-1, 2.5, NAN)),
    "depth of a tree": (lambda x: TreeShape(x, 2, 4), (-1, 1.5, NAN, "5")),
    "adt_beta": (lambda x: AdaptiveTree(beta=x), (-1, NAN, "x")),
    "adt_width_max": (lambda x: AdaptiveTree(width_max=x), (-1, 4.0, NAN)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_out_of_range_are_refused_where_they_are_given(name: str) -> None:
    make, values = NUMBERS[name]
    for value in values:
        with pytest.raises(UserError) as caught:
            make(value)
        assert str(caught.value).startswith(f"{name} {value!r}: ") and "\n" not in str(caught.value)


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    """Equal settings are equal values, whose texts stand in fingerprints of runs."""
    sampling = Sampling(np.float32(0.5), np.int64(9), torch.tensor(0.25), np.float64(2))
    assert repr(sampling) == repr(Sampling(0.5, 9, 0.25, 2.0))
    assert repr(TreeShape(np.int64(5), torch.tensor(4), np.uint8(10))) == repr(TreeShape(5, 4, 10))
    assert repr(Lantern(np.float64(0.5), np.int32(3))) == repr(Lantern(0.5, 3))


def test_seeds_are_whole_numbers_of_64_bits() -> None:
    whole = (7, np.int64(7), np.uint8(7), torch.tensor(7), 2**64 + 7)
    assert [as_seed(value) for value in whole] == [7] * len(whole)
    assert [as_seed(value) for value in (-1, 2**63 - 1, 2**63)] == [-1, 2**63 - 1, -(2**63)]
    for value in (True, 1.5, NAN, "7", None, [7], torch.ones(2, dtype=torch.int64)):
        with pytest.raises(UserError, match="seed ") as caught:
            as_seed(value)
        assert "\n" not in str(caught.value)
