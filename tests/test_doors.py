"""Bad values through every door: each door that takes a field refuses them in one line that names the field.

A door is a function that gives a value to one field of a call and returns the line of the refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import pytest

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


DOORS: dict[str, Door] = {"command line": command_line}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("field", "value"), [(field, value) for field, bad in BAD.items() for value in bad])
def test_a_bad_value_is_refused(request: pytest.FixtureRequest, door: str, field: str, value: object) -> None:
    line = DOORS[door](request, field, value).strip()
    assert "\n" not in line and (field in line or FLAGS.get(field, field) in line)
