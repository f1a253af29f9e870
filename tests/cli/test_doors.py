"""Bad values through every door: each door that takes a field refuses them in one line that names the field.

A door is a function that gives a value to one field of a call and returns the line of the refusal. The types
of settings are a door too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch

from adt_tree import AdaptiveTree, Lantern, Pipeline, Sampling, TreeShape, generate
from adt_tree.errors import as_seed
from models.family import LoadOptions
from serve.settings import Settings
from tests.support import tiny_transformers as tiny
from tests.support.refusal import refusal

SETTINGS = Settings(slots=1, max_prompt_tokens=32)  # of the fixture `live`
Door = Callable[[pytest.FixtureRequest, str, object], str]
BAD: dict[str, tuple[object, ...]] = {
    "prompt": ("", " \n", "caf\udce9"),
    "seed": ("x", 1.5),
    "temperature": (nan, inf, -1.0),
    "guidance": (nan, inf, -1.0),
    "top_k": (-1, 1.5),
    "top_p": (nan, 0.0, 1.5),
    "method": ("jacobi",),
    "lantern_delta": (nan, inf, -1.0),
    "device": ("gpu",),
    "precision": ("int8",),
    "batch_size": (0, 1.5),
}
FLAGS = {"guidance": "cfg", "seed": "random_seed"}  # field -> option of another name


def command_line(fixtures: pytest.FixtureRequest, field: str, value: object) -> str:
    """Gives the value to generate_images."""
    refused = fixtures.getfixturevalue("refused")
    return refused("generate_images", f"--{FLAGS.get(field, field)}={value}")


def http(fixtures: pytest.FixtureRequest, field: str, value: object) -> str:
    """Gives the value to POST /v1/images/generations."""
    name, _, part = field.partition("_") if field.startswith("lantern") else (field, "", "")
    given: dict[str, Any] = {"prompt": "sun", name: {part: value} if part else value}
    answer = fixtures.getfixturevalue("live").post(json.dumps(given).encode())
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


def pipeline(fixtures: pytest.FixtureRequest, field: str, value: Any) -> str:
    """Gives the value to Pipeline."""
    pipe, folder = fixtures.getfixturevalue("pipe"), fixtures.getfixturevalue("tiny_checkpoint")
    if field in ("device", "precision"):
        return refusal(lambda: Pipeline.from_pretrained(folder, **{field: value}))
    if field in ("temperature", "guidance", "top_k", "top_p"):
        return refusal(lambda: pipe("sun", sampling=Sampling(**{field: value})))
    if field == "lantern_delta":
        return refusal(lambda: pipe("sun", "eagle-2", lantern=Lantern(delta=value)))
    call = {"prompts" if field == "prompt" else field: value}
    return refusal(lambda: pipe(**{"prompts": "sun"} | call))


def from_transformers(fixtures: pytest.FixtureRequest, field: str, value: Any) -> str:
    """Gives the value to Pipeline.from_transformers."""
    model = fixtures.getfixturevalue("emu3")
    return refusal(lambda: Pipeline.from_transformers(model, None, options=LoadOptions(**{field: value})))


def custom_generate(fixtures: pytest.FixtureRequest, field: str, value: Any) -> str:
    """Gives the value to transformers' generate, whose prompts are token ids."""
    model, words = fixtures.getfixturevalue("emu3"), tiny.emu3_vocabulary()
    ids = [words[word] for word in (tiny.BEGIN, tiny.IMAGE_START, "3", "*", "5", tiny.IMAGE_TOKEN)]
    call = {"guidance_scale" if field == "guidance" else field: value}
    settings = {"do_sample": False, "max_new_tokens": 21, "custom_generate": generate, **call}
    return refusal(lambda: model.generate(torch.tensor([ids]), **settings))


DOORS: dict[str, Door] = {
    "command line": command_line,
    "http": http,
    "Pipeline": pipeline,
    "from_transformers": from_transformers,
    "custom_generate": custom_generate,
}
FIELDS = {  # door -> the fields that it takes, if not all
    "http": [field for field in BAD if field not in ("device", "precision", "batch_size")],
    "from_transformers": ("device", "precision"),
    "custom_generate": ("guidance", "method", "seed"),
}
CASES = [(door, field, value) for door in DOORS for field in FIELDS.get(door, BAD) for value in BAD[field]]


@pytest.mark.parametrize(("door", "field", "value"), CASES)
def test_a_bad_value_is_refused(request: pytest.FixtureRequest, door: str, field: str, value: object) -> None:
    line = DOORS[door](request, field, value).strip()
    names = field, FLAGS.get(field, field), field.partition("_")[2] or field
    assert "\n" not in line and any(name in line for name in names)


NUMBERS: dict[str, tuple[Callable[[Any], object], tuple[Any, ...]]] = {
    "temperature": (lambda x: Sampling(temperature=x), (-1, 101, nan, inf, "1", None)),
    "guidance": (lambda x: Sampling(guidance=x), (nan, -inf, -0.1, 1000, [3.0], True)),
    "top_p": (lambda x: Sampling(top_p=x), (0, 1.01, nan, "0.9")),
    "top_k": (lambda x: Sampling(top_k=x), (-1, 50.0, nan, "50", True)),
    "lantern_delta": (lambda x: Lantern(delta=x), (-0.1, nan, 1e7, "0.1")),
    "lantern_k": (lambda x: Lantern(k=x), (-1, 2.5, nan)),
    "depth of a tree": (lambda x: TreeShape(x, 2, 4), (-1, 1.5, nan, "5")),
    "adt_beta": (lambda x: AdaptiveTree(beta=x), (-1, nan, "x")),
    "adt_width_max": (lambda x: AdaptiveTree(width_max=x), (-1, 4.0, nan)),
    "seed": (as_seed, (True, 1.5, nan, "7", None, [7])),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_out_of_range_are_refused_where_they_are_given(name: str) -> None:
    make, values = NUMBERS[name]
    for value in values:
        line = refusal(lambda value=value: make(value))
        assert line.startswith(f"{name} {value!r}: ")


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
