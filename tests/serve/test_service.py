"""The service as its clients see it, through the `openai` package: images, streams, answers beside them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from adt_tree import Lantern, Pipeline, Sampling
from serve.pixels import Painter
from serve.settings import Settings
from tests.support.checkpoints import Checkpoints
from tests.support.service import PROMPT, Running, offline, opened, running

SETTINGS = Settings(slots=3, queue=40, max_prompt_tokens=32, timeout_s=2.0, replica="one")


def test_one_image_is_the_pipelines(live: Running, pipe: Pipeline) -> None:
    answer = live.openai.images.generate(prompt=PROMPT, model="emoji", extra_body={"seed": 7})
    assert base64.b64decode(answer.data[0].b64_json) == offline(pipe, seed=7)
    assert (answer.size, answer.output_format, answer.data[0].seed) == ("8x8", "png", 7)
    assert answer.usage.output_tokens == pipe.model.grid.size
    assert answer.usage.input_tokens == pipe.model.encode(PROMPT).length


def test_one_image_is_that_of_generate_images(
    live: Running, generate: Callable[..., Any], tmp_path: Path
) -> None:
    assert generate("o", "--top_k", 0)[0] == 0
    record = json.loads((tmp_path / "o" / "records" / "3.json").read_text())["statistics"]
    made = live.image(prompt=record["prompt"], seed=record["seed"])
    assert made == (tmp_path / "o" / "img" / "3.png").read_bytes()


def test_fields_that_change_nothing(live: Running) -> None:
    """OpenAI's clients may send them. The size is that of the model."""
    fields = {"quality": "hd", "moderation": "low", "style": "natural", "user": "one", "size": "8x8"}
    fields |= {"safety_identifier": "two", "background": "opaque"}
    assert live.image(seed=7, **fields) == live.image(seed=7)


def test_several_images_have_seeds_that_follow(live: Running, pipe: Pipeline) -> None:
    answer = live.openai.images.generate(prompt=PROMPT, n=4, extra_body={"seed": 40})
    assert [item.seed for item in answer.data] == [40, 41, 42, 43]
    for item in answer.data:
        assert base64.b64decode(item.b64_json) == offline(pipe, seed=item.seed)


def test_the_server_chooses_a_seed_and_names_it(live: Running, pipe: Pipeline) -> None:
    first, second = (live.openai.images.generate(prompt=PROMPT).data[0] for _ in range(2))
    assert first.seed != second.seed
    assert base64.b64decode(first.b64_json) == offline(pipe, seed=first.seed)


def test_a_stream_shows_the_image_as_it_grows(live: Running, pipe: Pipeline) -> None:
    request = {"prompt": PROMPT, "stream": True, "partial_images": 3, "extra_body": {"seed": 7}}
    *partials, last = live.openai.images.generate(**request)
    assert [event.type for event in partials] == ["image_generation.partial_image"] * 3
    assert [event.partial_image_index for event in partials] == [0, 1, 2]
    codes = pipe(PROMPT, seed=7).codes[0]
    for number, event in enumerate(partials, 1):
        picture, whole = opened(base64.b64decode(event.b64_json)), pipe.partial_image(codes[: 4 * number])
        assert picture.size == (8, 8) and picture.getpixel((7, 7)) == (128, 128, 128)
        assert picture.getpixel((0, 0)) == whole.convert("RGB").getpixel((0, 0)) != (128, 128, 128)
    assert last.type == "image_generation.completed" and last.seed == 7
    assert base64.b64decode(last.b64_json) == offline(pipe, seed=7)
    assert last.usage.total_tokens == last.usage.input_tokens + 16
    for event in (*partials, last):
        assert (event.background, event.output_format, event.quality, event.size) == (
            "opaque", "png", "auto", "8x8",
        )  # fmt: skip
        type(event).model_validate(event.model_dump(), strict=True)  # every field that the package requires


def test_the_events_of_a_stream_carry_their_type(live: Running) -> None:
    text = live.post({"prompt": PROMPT, "stream": True, "partial_rows": 1, "n": 2, "quality": "hd"}).text
    events = [block.split("\n") for block in text.strip().split("\n\n")]
    assert len(events) == 8  # for each of two images three rows, and then the whole image
    for name, data in events:
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}" and content["image_index"] in (0, 1)
    stream = live.openai.images.generate(prompt=PROMPT, stream=True, partial_images=0)
    assert next(iter(stream)).type.endswith("completed")


@pytest.mark.parametrize("kind", ["webp", "jpeg"])
def test_other_formats(live: Running, kind: str) -> None:
    sizes = [len(live.image(output_format=kind, output_compression=q, seed=1)) for q in (1, 100)]
    assert opened(live.image(output_format=kind, seed=1)).format == kind.upper() and sizes[0] < sizes[1]


def variants() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns requests of all methods and many settings, each with the arguments of Pipeline that make the
    same image."""
    made = []
    names = ("ar", "self-draft", "eagle-2", "sjd")
    for number in range(12):
        sampling = {"temperature": (1.0, 0.0, 0.6)[number % 3], "guidance": (3.0, 1.0, 4.5, 7.0)[number % 4]}
        sampling |= {"top_p": (1.0, 0.8)[number // 2 % 2], "top_k": (0, 5)[number // 6]}
        fields = {"seed": 100 + number, "method": names[number // 2 % 4], "prompt": f"image {number % 5}"}
        arguments: dict[str, Any] = {"sampling": Sampling(**sampling)}
        arguments |= {"method": fields["method"], "seed": fields["seed"], "prompt": fields["prompt"]}
        if number % 8 == 3:
            fields["lantern"], arguments["lantern"] = {"delta": 0.5, "k": 6}, Lantern(0.5, 6)
        made.append(({**fields, **sampling}, arguments))
    return made


def test_whatever_else_is_in_flight(live: Running, pipe: Pipeline) -> None:
    """Eight requests at a time mix methods, temperatures, guidance and seeds. Every image equals the one that
    Pipeline makes without the service."""
    requests = variants()
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda request: live.image(**request[0]), requests))
    for data, (fields, arguments) in zip(made, requests, strict=True):
        assert data == offline(pipe, **arguments), fields
    assert live.service.scheduler.backlog == 0


def test_models_health_and_metrics(live: Running) -> None:
    assert [model.id for model in live.openai.models.list()] == ["emoji"]
    assert live.openai.models.retrieve("emoji").id == "emoji"
    (described,) = httpx.get(f"{live.site}/v1/models").json()["data"]
    assert described["default_method"] in described["methods"] and described["rows"] == 4
    assert httpx.get(f"{live.site}/v1/models/emoji").json() == described
    with pytest.raises(openai.NotFoundError) as refused:
        live.openai.models.retrieve("dall-e-3")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    assert httpx.get(f"{live.site}/health").json()["status"] == "ok"
    assert httpx.head(f"{live.site}/health").status_code == 200
    live.image()
    figures = live.figures
    assert figures['adt_images_total{outcome="completed",replica="one"}'] >= 1
    assert figures['adt_codes_total{replica="one"}'] >= figures['adt_target_calls_total{replica="one"}'] > 0
    assert figures['adt_decoding_seconds_total{replica="one"}'] > 0
    assert figures['adt_queue_images{replica="one"}'] == figures['adt_in_flight_images{replica="one"}'] == 0
    assert figures['adt_codes_total{replica="one"}'] >= 15
    assert "# TYPE adt_codes_total counter" in httpx.get(f"{live.site}/metrics").text
    assert {"adt_first_partial_seconds_count", "adt_image_seconds_count"} <= {
        name.partition("{")[0] for name in figures
    }


@pytest.mark.parametrize("path", ["/", "/icon.svg", "/health", "/metrics", "/v1/models", "/v1/models/emoji"])
def test_head_is_get_without_a_body(live: Running, path: str) -> None:
    with httpx.Client(base_url=live.site) as client:  # a body would disturb the second answer
        heads = [client.head(path) for _ in range(2)]
        whole = client.get(path)
    for head in heads:
        assert head.status_code == whole.status_code == 200 and not head.content
        assert head.headers["content-type"] == whole.headers["content-type"]


def test_a_prompt_that_is_cut_is_said(checkpoints: Checkpoints) -> None:
    """So it is in an answer and in the last event of a stream, and there is no such field for other
    prompts."""
    prompt = "the sea " * 20
    with running(Pipeline(checkpoints["llamagen"].load()), SETTINGS) as service:
        content = service.post({"prompt": prompt}).json()
        assert "first 12" in content["warnings"][0] and content["warnings"][0].startswith("prompt: ")
        stream = service.post({"prompt": prompt, "stream": True, "partial_images": 1}).text
        *partial, last = [block.partition("data: ")[2] for block in stream.strip().split("\n\n")]
        assert json.loads(last)["warnings"] == content["warnings"] and "warnings" not in partial[0]
        assert "warnings" not in service.post({"prompt": "a red heart"}).json()


def test_no_proxy_holds_a_stream_back(live: Running) -> None:
    answer = live.post({"prompt": PROMPT, "stream": True})
    assert answer.headers["X-Accel-Buffering"] == "no" and answer.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("path", ["/", "/page.js", "/page.css", "/icon.svg"])
def test_the_page(live: Running, path: str) -> None:
    answer = httpx.get(live.site + path)
    assert answer.status_code == 200 and "default-src 'self'" in answer.headers["Content-Security-Policy"]
    for bytes_wanted in ("x", "bytes=999999-"):
        part = httpx.get(live.site + path, headers={"Range": bytes_wanted})
        assert part.status_code == 200 and part.content == answer.content
    assert "<script>" not in answer.text and "innerHTML" not in answer.text


def test_threads_are_those_of_the_process(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels are decoded with as many threads as torch uses in the thread that starts the service."""
    before, paint, seen = torch.get_num_threads(), Painter.picture, list[int]()

    def watched(*given: Any) -> str:
        seen.append(torch.get_num_threads())
        return paint(*given)

    monkeypatch.setattr(Painter, "picture", watched)
    torch.set_num_threads(2)
    try:
        with running(pipe, SETTINGS) as service:
            assert service.image(seed=5) == offline(pipe, seed=5)
        assert seen == [2]
    finally:
        torch.set_num_threads(before)
