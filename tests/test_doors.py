"""Bad values through every door: each door that takes a field refuses them in one line that names the field.

A door is a function that gives a value to one field of a call and returns the line of the refusal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest

from serve.settings import Settings

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


DOORS: dict[str, Door] = {"command line": command_line, "http": http}
LACKS = {"http": ("device", "precision", "batch_size")}  # door -> fields that it does not have
CASES = [
    (door, field, value) for door in DOORS for field, bad in BAD.items() for value in bad
    if field not in LACKS.get(door, ())
]  # fmt: skip


@pytest.mark.parametrize(("door", "field", "value"), CASES)
def test_a_bad_value_is_refused(request: pytest.FixtureRequest, door: str, field: str, value: object) -> None:
    line = DOORS[door](request, field, value).strip()
    names = field, FLAGS.get(field, field), field.partition("_")[2] or field
    assert "\n" not in line and any(name in line for name in names)
