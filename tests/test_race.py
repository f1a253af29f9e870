"""Recordings and races: what is kept is what was decoded, and the page needs nothing else."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from PIL import Image

from adt_tree import Lantern, Pipeline, Sampling
from adt_tree.errors import UserError
from cli import demo as command
from eval import race, race_film
from eval.race import Recording
from tests.conftest import Run

PROMPT = "sun"
HOSTILE = "</script><img src=x onerror=alert(1)>\u2028“'&"


@pytest.fixture(scope="module")
def runners(pipe: Pipeline) -> list[Recording]:
    """One image under the AR baseline and under EAGLE-2."""
    sampling = Sampling(temperature=1.0)
    return [race.record(pipe, pipe.method(name, sampling=sampling), PROMPT, 5) for name in ("ar", "eagle-2")]


def tile(recording: Recording, place: int) -> Image.Image:
    """A partial image from the sheet."""
    frames = recording.frames
    sheet = Image.open(io.BytesIO(base64.b64decode(frames["sheet"].partition(",")[2]))).convert("RGBA")
    (wide, high), columns = frames["size"], frames["columns"]
    left, top = place % columns * wide, place // columns * high
    return sheet.crop((left, top, left + wide, top + high))


def test_a_recording_is_what_was_decoded(pipe: Pipeline, runners: list[Recording]) -> None:
    size = pipe.model.grid.size
    for recording in runners:
        out = pipe(PROMPT, method=recording.method, sampling=Sampling(temperature=1.0), seed=5)
        assert recording.codes == out.codes[0] and len(recording.steps) == out.stats["target_calls"]
        assert [step["accepted"] for step in recording.steps] == [step.accepted for step in out.steps[0]]
        assert recording.exact
        assert recording.seconds == pytest.approx(sum(step["ms"] for step in recording.steps) / 1e3)
        assert recording.frames["counts"][-1] == size and recording.frames["counts"][0] == 1
    assert runners[0].pixels == runners[1].pixels and runners[0].codes == runners[1].codes
    relaxed = race.record(pipe, pipe.method("eagle-2", lantern=Lantern(delta=0.9, k=40)), PROMPT, 5)
    assert relaxed.pixels != runners[0].pixels and not relaxed.exact and relaxed.method == "eagle-2-lantern"


def test_the_accepted_path_leads_to_the_committed_codes(runners: list[Recording]) -> None:
    assert all(step["tree"] is None for step in runners[0].steps)
    drafted = [step for step in runners[1].steps if step["tree"]]
    assert drafted
    for step in drafted:
        tree, start = step["tree"], step["position"]
        codes = runners[1].codes[start : start + step["accepted"] + 1]
        path = [node for node in tree["path"] if node]
        assert [tree["codes"][node] for node in path] == codes[: step["accepted"]]
        assert [tree["depths"][node] for node in path] == list(range(1, step["accepted"] + 1))
        assert tree["codes"][0] == runners[1].codes[start - 1] and len(tree["codes"]) == step["nodes"] + 1
        assert all(0 <= value <= 1 for value in tree["probability"])


def test_partial_images_end_where_the_codes_do(pipe: Pipeline, runners: list[Recording]) -> None:
    recording, grid = runners[0], pipe.model.grid
    final = pipe.image(recording.codes).convert("RGBA")
    last = tile(recording, len(recording.frames["counts"]) - 1)
    assert last.getchannel("A").getextrema() == (255, 255)
    apart = [abs(a - b) for a, b in zip(last.tobytes(), final.tobytes(), strict=True)]
    assert sum(apart) / len(apart) < 30  # the sheet is lossy
    count = recording.frames["counts"][1]
    shown = sum(value > 127 for value in tile(recording, 1).getchannel("A").tobytes())
    assert shown / (final.width * final.height) == pytest.approx(count / grid.size, abs=0.02)


def test_the_page_needs_nothing_else(runners: list[Recording]) -> None:
    page = race.race_html([replace(one, prompt=HOSTILE) for one in runners])
    assert page.count("</script>") == 1 and "<img" not in page
    assert set(re.findall(r"https?://[^\"'\s]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|fetch\(|XMLHttpRequest|<link[^>]+href=\"(?!data:)", page)
    frame = race.embedded(runners)
    assert frame.count("<") == 2 and frame.endswith("</iframe>")  # all markup inside is escaped


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"\xff", b"[]", b"{}", b"[" * 100_000, {"steps": []}, {"steps": [{}]}, {"codes": [1]},
        {"grid": 3}, {"seconds": "soon"}, {"prompt": None}, {"frames": {}},
        {"frames": {"sheet": "http://example.org/x", "size": [1, 1], "counts": [1]}},
    ],
)  # fmt: skip
def test_damaged_recordings(
    damage: bytes | dict[str, object], runners: list[Recording], tmp_path: Path
) -> None:
    path = tmp_path / "race_a.json"
    race.write(path, runners[0])
    assert asdict(race.read(path)) == json.loads(json.dumps(asdict(runners[0])))
    content = damage if isinstance(damage, bytes) else json.dumps({**asdict(runners[0]), **damage}).encode()
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged, or no recording"):
        race.read(path)


def test_the_film_moves(runners: list[Recording], tmp_path: Path) -> None:
    path = tmp_path / "race.webp"
    assert race_film.film(runners, path) == path.stat().st_size < 1_500_000
    with Image.open(path) as picture:
        assert picture.n_frames > 2 and picture.info["loop"] == 0
    with pytest.raises(UserError, match=r"\.webp"):
        race_film.film(runners, tmp_path / "race.mp4")


def test_generate_images_records(generate: Run, tmp_path: Path) -> None:
    """A race is of the images that all folders with recordings have one of."""
    for name, words in (
        ("ar", "--record 2 --model_type base"),
        ("none", "--model_type base"),
        ("sd", "--record 1 --drafter_type self-draft"),
    ):
        assert generate(name, "--num_images", 2, *words.split())[0] == 0
    ((first, second),) = race.races([tmp_path / name for name in ("ar", "none", "sd")])
    assert first.pixels == second.pixels and first.seed == second.seed
    with Image.open(next((tmp_path / "ar" / "img").glob("*.png"))) as picture:
        assert picture.size == tuple(first.frames["size"])


def test_the_demo_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(UserError, match=r"setup\.sh requirements-demo\.txt"):
        command.run(command.Options.parse([]))
    assert command.Options.parse([]).host == "127.0.0.1"


def test_the_demo_does_without_a_drafter(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = Path(shutil.copytree(tiny_checkpoint, tmp_path / "alone"))
    (alone / "drafter" / "model.safetensors").write_bytes(b"")
    words = ["--model_path", str(alone)]
    assert command.pipeline(command.Options.parse(words)).model.drafter_net is None
    assert "the methods that need it are not offered" in capsys.readouterr().out
    with pytest.raises(UserError, match="drafter"):
        command.pipeline(command.Options.parse([*words, "--drafter_path", str(alone / "drafter")]))
