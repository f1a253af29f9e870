"""POST /generate for GLM-Image, asked as SGLang's diffusion server 0.5.23 asks its --srt-encoder-url.

`one` and `several` are the recorded form of its requests: those of generate_prior_tokens, which asks for one
image, and of generate_prior_tokens_batch, in its class GlmImageAR.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import httpx
import pytest

from adt_tree import Pipeline, Sampling
from adt_tree.grid import Grid
from cli import serve as command
from serve import server
from serve.settings import Settings
from tests.conftest import Refused
from tests.models.parity.test_glm_image import Theirs
from tests.support import tiny_glm_image as tiny
from tests.support.checkpoints import Checkpoints
from tests.support.service import Running, running

SIZE = (3, 2)  # cells of the images that most tests ask for; their previews have 19 x 13
SETTINGS = Settings(slots=2, queue=10, max_prompt_tokens=64)
TEXTS = ["a red heart", "a cat in the sun, with a hat", "sea"]
SAMPLED = Sampling(1.0, 0, 1.0, guidance=1.0)  # SGLang sends the temperature alone


@pytest.fixture(scope="module")
def theirs(checkpoints: Checkpoints) -> Theirs:
    """Returns a tiny checkpoint with transformers' processor, which SGLang's client runs."""
    return Theirs(checkpoints["glm_image"].path)


@pytest.fixture(scope="module")
def glm(theirs: Theirs) -> Iterator[Running]:
    """Serves the tiny checkpoint, for images of up to 3 x 4 cells."""
    with running(theirs.ours(3, 4), SETTINGS) as service:
        yield service


def one(theirs: Theirs, text: str, seed: int | None, cells: tuple[int, int] = SIZE) -> dict[str, Any]:
    """Returns the request for one image."""
    inputs = theirs.inputs([text], Grid(*cells))
    grids = inputs["image_grid_thw"].tolist()
    count = sum(height * width for _, height, width in grids)
    sampling: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": count + 1, "ignore_eos": True}
    if seed is not None:
        sampling["sampling_seed"] = seed
    ids = inputs["input_ids"][0].tolist()
    return {"input_ids": ids, "image_data": [{"image_grid_thw": grids}], "sampling_params": sampling}


def several(theirs: Theirs, texts: Sequence[str], seeds: Sequence[int | None]) -> dict[str, Any]:
    """Returns the request for several images."""
    made = [one(theirs, text, seed) for text, seed in zip(texts, seeds, strict=True)]
    return {name: [request[name] for request in made] for name in made[0]}


def post(live: Running, payload: Any, **more: Any) -> httpx.Response:
    return httpx.post(f"{live.site}/generate", json=payload, timeout=60, **more)


@cache
def offline(theirs: Theirs, text: str, seed: int, sampling: Sampling = SAMPLED) -> list[int]:
    """Returns the codes that Pipeline makes, the preview's first."""
    return theirs.ours(*SIZE)(text, sampling=sampling, seed=seed).codes[0]


@pytest.mark.parametrize("count", [1, 3])
def test_a_list_is_answered_by_a_list(glm: Running, theirs: Theirs, count: int) -> None:
    answer = post(glm, several(theirs, TEXTS[:count], range(7, 7 + count)))
    assert answer.status_code == 200, answer.text
    made = answer.json()
    expected = [offline(theirs, text, 7 + number) for number, text in enumerate(TEXTS[:count])]
    assert [entry["output_ids"] for entry in made] == expected
    assert len({tuple(codes) for codes in expected}) == count
    for entry, text in zip(made, TEXTS, strict=False):
        length = len(one(theirs, text, None)["input_ids"])
        codes = 19 * 13 + 3 * 2
        assert entry["meta_info"] == {
            "prompt_tokens": length, "completion_tokens": codes, "cached_tokens": 0, "reasoning_tokens": 0,
        }  # fmt: skip


def test_one_prompt_is_answered_by_an_object(glm: Running, theirs: Theirs) -> None:
    """Without a seed, as with null, the server chooses one."""
    codes = post(glm, one(theirs, TEXTS[0], 5)).json()["output_ids"]
    assert codes == offline(theirs, TEXTS[0], 5)
    null = one(theirs, TEXTS[0], None)
    null["sampling_params"]["sampling_seed"] = None
    free = [post(glm, payload).json()["output_ids"] for payload in (null, null, one(theirs, TEXTS[0], None))]
    assert len({tuple(ids) for ids in free}) == 3


def test_filters_that_are_sent_apply(glm: Running, theirs: Theirs) -> None:
    """Those of generation_config.json, a top-p of 0.7, do not."""
    payload = one(theirs, TEXTS[0], 5)
    payload["sampling_params"] |= {"top_p": 0.7, "temperature": 0.8, "top_k": 9}
    filtered = Sampling(0.8, 9, 0.7, guidance=1.0)
    codes = post(glm, payload).json()["output_ids"]
    assert codes == offline(theirs, TEXTS[0], 5, filtered) != offline(theirs, TEXTS[0], 5)


def test_images_of_different_sizes_in_one_list(glm: Running, theirs: Theirs) -> None:
    """Each has its own engine, one after the other."""
    parts = [one(theirs, TEXTS[0], 5), one(theirs, TEXTS[1], 6, (2, 3))]
    made = post(glm, {name: [part[name] for part in parts] for name in parts[0]}).json()
    assert made[0]["output_ids"] == offline(theirs, TEXTS[0], 5)
    other = theirs.ours(2, 3)(TEXTS[1], sampling=SAMPLED, seed=6).codes[0]
    assert made[1]["output_ids"] == other and len(other) == 13 * 19 + 6


WRONG: dict[str, tuple[str, Any]] = {
    "no ids": ("input_ids", []),
    "ids of a text": ("input_ids", "a red heart"),
    "an id that is no number": ("input_ids", [1, "2"]),
    "an id beyond the vocabulary": ("input_ids", [1, 10**6]),
    "a negative id": ("input_ids", [-1, 64]),
    "no image start": ("input_ids", [80, 81]),
    "too many ids": ("input_ids", [80] * 64 + [tiny.CODES + tiny.START]),
    "no grids": ("image_data", []),
    "one grid": ("image_data", [{"image_grid_thw": [[1, 3, 2]]}]),
    "the preview first": ("image_data", [{"image_grid_thw": [[1, 19, 13], [1, 3, 2]]}]),
    "another preview": ("image_data", [{"image_grid_thw": [[1, 3, 2], [1, 16, 16]]}]),
    "two frames": ("image_data", [{"image_grid_thw": [[2, 3, 2], [1, 19, 13]]}]),
    "no cells": ("image_data", [{"image_grid_thw": [[1, 0, 2], [1, 19, 13]]}]),
    "sides without a preview": ("image_data", [{"image_grid_thw": [[1, 1, 4000], [1, 1, 1]]}]),
    "a source image": ("image_data", [{"image_grid_thw": [[1, 3, 2]] * 3}]),
    "more cells than the server takes": ("image_data", [{"image_grid_thw": [[1, 32, 32], [1, 16, 16]]}]),
    "too few tokens": ("sampling_params", {"max_new_tokens": 19 * 13 + 5}),
    "SGLang's default of 128 tokens": ("sampling_params", {}),
    "a setting that is not read": ("sampling_params", {"max_new_tokens": 999, "min_p": 0.1}),
    "a seed below 0": ("sampling_params", {"max_new_tokens": 999, "sampling_seed": -1}),
    "a temperature below 0": ("sampling_params", {"max_new_tokens": 999, "temperature": -1}),
    "a field that is not read": ("return_logprob", True),
}  # fmt: skip


@pytest.mark.parametrize(("name", "as_list"), [*((name, False) for name in WRONG), ("a negative id", True)])
def test_what_does_not_fit_is_named(glm: Running, theirs: Theirs, name: str, as_list: bool) -> None:
    field, value = WRONG[name]
    payload = one(theirs, TEXTS[0], 5) | {field: value}
    if as_list:
        payload = {key: [part] for key, part in payload.items()}
    answer = post(glm, payload)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field and field in error["message"] and "\n" not in error["message"]


def test_lists_that_do_not_fit(glm: Running, theirs: Theirs) -> None:
    """One entry of each list belongs to each prompt, and no list is longer than slots and queue."""
    payload = several(theirs, TEXTS, [1, 2, 3])
    for field in ("image_data", "sampling_params"):
        short = payload | {field: payload[field][:2]}
        assert post(glm, short).json()["error"]["param"] == field
    long = {name: value * 5 for name, value in payload.items()}
    assert post(glm, long).status_code == 400
    assert post(glm, payload | {"input_ids": None}).status_code == 400


def test_the_rest_of_the_service_beside_it(glm: Running, theirs: Theirs) -> None:
    """Health is what SGLang asks for first. There are no pictures, so there is no page."""
    assert post(glm, one(theirs, TEXTS[0], 5)).status_code == 200
    assert httpx.get(f"{glm.site}/health").status_code == 200
    assert httpx.get(f"{glm.site}/v1/models").json()["data"][0]["id"] == "glm_image"
    assert glm.post({"prompt": "sun"}).status_code == httpx.get(glm.site).status_code == 404
    assert glm.figures['adt_images_total{outcome="completed",replica=""}'] > 0


def test_other_models_and_the_key(pipe: Pipeline, theirs: Theirs) -> None:
    with running(pipe, Settings(slots=1, api_key="secret")) as emoji:
        payload = one(theirs, TEXTS[0], 5)
        assert post(emoji, payload).status_code == 401
        answer = post(emoji, payload, headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 400 and "emoji" in answer.json()["error"]["message"]


def test_the_command_serves_the_codes(
    theirs: Theirs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    monkeypatch.setattr(server, "run", lambda *_: True)
    words = ["--model", "glm_image", "--model_path", str(theirs.folder), "--device", "cpu", "--port", "0"]
    command.run(command.Options.parse([*words, "--height", "64", "--width", "64", "--precision", "fp32"]))
    out = capsys.readouterr().out
    assert "/generate" in out and "no key" in out
