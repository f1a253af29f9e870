"""What a visitor asks for: text fields -> checked values, or one line that says what to put right."""

from __future__ import annotations

import math
from collections.abc import Sequence

from adt_tree.errors import UserError
from adt_tree.method import RELAXED, Method, method_spec
from adt_tree.pipeline import Pipeline
from adt_tree.sampling import Sampling

MOST_CHARACTERS, MOST_PROMPTS = 300, 16
HOTTEST, MOST_GUIDANCE, LARGEST_SEED = 2.0, 10.0, 2**63 - 1


def prompt_of(text: object) -> str:
    """A prompt on one line. UserError if it is empty, too long or no text."""
    prompt = " ".join(str(text or "").split())
    if not prompt:
        raise UserError("The prompt is empty: describe a picture, for example “noto emoji of red heart”.")
    if len(prompt) > MOST_CHARACTERS:
        raise UserError(f"The prompt has {len(prompt):,} characters: give at most {MOST_CHARACTERS}.")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError("The prompt is not UTF-8 text: type it anew.") from None
    return prompt


def prompts_of(text: object) -> list[str]:
    """The lines of a text as prompts. UserError if there is none, or too many."""
    lines = [line for line in str(text or "").splitlines() if line.strip()]
    if len(lines) > MOST_PROMPTS:
        raise UserError(f"The list has {len(lines):,} prompts: give at most {MOST_PROMPTS}.")
    return [prompt_of(line) for line in lines or [""]]


def seed_of(value: object) -> int:
    """A seed. UserError if it is no whole number from 0 on."""
    text = str(value if value is not None else "").strip()
    if not (text.isascii() and text.isdecimal()) or len(text) > 19 or int(text) > LARGEST_SEED:
        raise UserError(f"The seed is {text[:40]!r}: give a whole number from 0 to {LARGEST_SEED}.")
    return int(text)


def number_of(value: object, name: str, most: float) -> float:
    """A number from 0 to `most`. UserError if it is anything else."""
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not 0 <= number <= most:
        raise UserError(f"The {name} is {str(value)[:40]!r}: give a number from 0 to {most:g}.")
    return number


def methods_of(
    pipe: Pipeline, names: Sequence[str], temperature: object, guidance: object, lantern: bool
) -> list[Method]:
    """The methods of these names. LANTERN relaxes those that take it."""
    sampling = Sampling(
        temperature=number_of(temperature, "temperature", HOTTEST),
        guidance=number_of(guidance, "guidance", MOST_GUIDANCE),
    )
    try:
        relaxed = {name: RELAXED if lantern and method_spec(name).lantern else None for name in names}
        return [pipe.method(name, sampling=sampling, lantern=relaxed[name]) for name in names]
    except ValueError as error:
        raise UserError(f"{error}.") from None
