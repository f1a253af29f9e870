"""Bad values through every door: each door that takes a field refuses them in one line that names the field.

A door is a function that gives a value to one field of a call and returns the line of the refusal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch

from adt_tree import Lantern, Pipeline, Sampling, generate
from adt_tree.errors import UserError
from models.family import LoadOptions
from serve.settings import Settings
from tests import tiny_transformers as tiny

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


def refusal(call: Callable[[], object]) -> str:
    """Returns the line with which a call is refused."""
    with pytest.raises(UserError) as refused:
        call()
    return str(refused.value)


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


@cache
def emu3(folder: Path) -> Any:
    """Returns a model of transformers."""
    import transformers

    return transformers.Emu3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def from_transformers(fixtures: pytest.FixtureRequest, field: str, value: Any) -> str:
    """Gives the value to Pipeline.from_transformers."""
    model = emu3(fixtures.getfixturevalue("checkpoints")["emu3"].path)
    return refusal(lambda: Pipeline.from_transformers(model, None, options=LoadOptions(**{field: value})))


def custom_generate(fixtures: pytest.FixtureRequest, field: str, value: Any) -> str:
    """Gives the value to transformers' generate, whose prompts are token ids."""
    model, words = emu3(fixtures.getfixturevalue("checkpoints")["emu3"].path), tiny.emu3_vocabulary()
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
