"""A recording holds everything that was decoded, and the race page needs nothing else."""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from PIL import Image

from adt_tree import Lantern, Pipeline, Sampling
from adt_tree.errors import UserError
from adt_tree.policy import TreeShape
from demo import recording
from demo.film import SIDE, Pane
from demo.race_page import race_frame, race_page
from demo.recording import Recording
from tests.conftest import Refused, Run

PROMPT, SAMPLING = "sun", Sampling(temperature=0.5)
TREES = {"ar": None, "self-draft": TreeShape(3, 1, 3)}  # a fixed tree, so that all runs take the same steps
HOSTILE = "</script><img src=x onerror=alert(1)>\u2028“'&"


@pytest.fixture(scope="module")
def runners(pipe: Pipeline) -> list[Recording]:
    """Returns recordings of one image by the AR baseline and by self-drafting."""
    methods = [pipe.method(name, sampling=SAMPLING, tree=tree) for name, tree in TREES.items()]
    return [recording.record(pipe, method, PROMPT, 5) for method in methods]


def test_a_recording_holds_what_was_decoded(pipe: Pipeline, runners: list[Recording]) -> None:
    for runner in runners:
        out = pipe(PROMPT, runner.method, sampling=SAMPLING, tree=TREES[runner.method], seed=5)
        assert runner.codes == out.codes[0] and not runner.why
        assert [step["accepted"] for step in runner.steps] == [step.accepted for step in out.steps[0]]
        assert runner.seconds == pytest.approx(sum(step["ms"] for step in runner.steps) / 1e3)
    assert runners[0].pixels == runners[1].pixels
    relaxed = recording.record(pipe, pipe.method("eagle-2", lantern=Lantern(delta=0.9, k=40)), PROMPT, 5)
    assert relaxed.pixels != runners[0].pixels and "LANTERN" in relaxed.why


def test_the_accepted_path_holds_the_committed_codes(runners: list[Recording]) -> None:
    assert all(step["tree"] is None for step in runners[0].steps)
    drafted = [step for step in runners[1].steps if step["tree"]]
    assert any(step["accepted"] for step in drafted)
    for step in drafted:
        tree, start = step["tree"], step["position"]
        assert len(tree["path"]) == step["accepted"] and len(tree["codes"]) == step["nodes"] + 1
        committed = [tree["codes"][node] for node in (0, *tree["path"])]
        assert committed == runners[1].codes[start - 1 : start + step["accepted"]]


def test_a_partial_image_shows_only_its_codes(pipe: Pipeline, runners: list[Recording]) -> None:
    frames, size = runners[0].frames, pipe.model.grid.size
    sheet = Image.open(io.BytesIO(base64.b64decode(frames["sheet"].partition(",")[2]))).convert("RGBA")
    (width, height), columns = frames["size"], frames["columns"]
    assert frames["counts"] == list(range(1, size + 1))  # the AR baseline commits one code per step
    for index, count in enumerate(frames["counts"]):
        left, top = index % columns * width, index // columns * height
        alpha = sheet.crop((left, top, left + width, top + height)).getchannel("A").tobytes()
        opaque = sum(value > 127 for value in alpha) / len(alpha)
        assert opaque == pytest.approx(count / size, abs=0.02)
    last = sheet.crop((left, top, left + width, top + height)).convert("RGB").tobytes()
    differences = [abs(a - b) for a, b in zip(last, pipe.image(runners[0].codes).tobytes(), strict=True)]
    assert sum(differences) / len(differences) < 30  # the sheet is compressed with loss


def test_a_film_keeps_the_shape_of_an_image(runners: list[Recording]) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (8, 4), "red").save(stream, format="WEBP", lossless=True)
    sheet = recording.SHEET_START + base64.b64encode(stream.getvalue()).decode()
    wide = replace(runners[0], frames={"sheet": sheet, "columns": 1, "size": [8, 4], "counts": [1]})
    canvas = Image.new("RGB", (SIDE, 400))
    Pane(wide, "black").paint(canvas, 0, 0.0)
    assert canvas.tobytes().count(b"\xff\0\0") == SIDE * SIDE / 2


def test_the_page_needs_nothing_else_and_shows_texts_as_texts(runners: list[Recording]) -> None:
    page = race_page([replace(runner, prompt=HOSTILE) for runner in runners])
    assert page.count("</script>") == 1 and "<img" not in page
    assert set(re.findall(r"https?://[^\"'\s]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|fetch\(|XMLHttpRequest|<link[^>]+href=\"(?!data:)", page)
    frame = race_frame(runners)
    assert frame.count("<") == 2 and frame.endswith("</iframe>")  # the whole page is escaped


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff", b"[]", b"[" * 100_000, {"steps": []},
        {"frames": {"sheet": "http://example.org/x", "size": [1, 1], "counts": [1]}},
    ],
)  # fmt: skip
def test_damaged_recordings_are_refused(
    damage: bytes | dict[str, object], runners: list[Recording], tmp_path: Path
) -> None:
    path = tmp_path / "race_a.json"
    recording.write(path, runners[0])
    assert asdict(recording.read(path)) == json.loads(json.dumps(asdict(runners[0])))
    content = damage if isinstance(damage, bytes) else json.dumps({**asdict(runners[0]), **damage}).encode()
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"race_a\.json"):
        recording.read(path)


def test_folders_race(generate: Run, run: Run, refused: Refused, tmp_path: Path) -> None:
    """Races show the images that all folders with recordings have recorded."""
    for name, words in {
        "ar": "--record 2 --method ar", "none": "--method ar", "sd": "--record 1 --method self-draft",
    }.items():  # fmt: skip
        assert generate(name, "--num_images", 2, *words.split())[0] == 0
    folders = [tmp_path / name for name in ("ar", "none", "sd")]
    ((first, second),) = recording.races(folders)
    assert first.pixels == second.pixels and first.seed == second.seed
    for name in ("race.html", "race.webp"):
        assert run("report", *folders, "--race", tmp_path / "new" / name)[0] == 0
    assert (tmp_path / "new" / "race.html").read_text() == race_page([first, second])
    with Image.open(tmp_path / "new" / "race.webp") as animation:
        assert animation.n_frames > 2 and animation.info["loop"] == 0
    assert "race.mp4" in refused("report", *folders, "--race", tmp_path / "race.mp4")
    assert "--record" in refused("report", tmp_path / "none", "--race", tmp_path / "race.html")
