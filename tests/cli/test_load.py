"""A load test: Locust's clients stream images, and load_test finds those that differ from offline ones."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from serve.settings import Settings
from tests.conftest import Refused, Run
from tests.support.checkpoints import Checkpoints
from tests.support.runs import ROOT
from tests.support.service import Running

SETTINGS = Settings(slots=2)  # of the fixture `live`


@pytest.mark.skipif(find_spec("locust") is None, reason="needs locust (requirements-dev.txt)")
def test_images_are_those_made_offline(
    live: Running, checkpoints: Checkpoints, tmp_path: Path, run: Run, refused: Refused
) -> None:
    words = [sys.executable, "-m", "locust", "-f", "serve/locustfile.py", "--headless", "--host", live.site]
    words += ["--users", "3", "--spawn-rate", "3", "--run-time", "3s", "--stop-timeout", "20"]
    words += ["--methods", "self-draft", "ar", "--temperatures", "0", "1", "--cancelled", "0.2"]
    words += ["--csv", str(tmp_path / "times"), "--save", str(tmp_path / "images")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "times_stats.csv").open() as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    pictures, images = (int(rows[name]["Request Count"]) for name in ("first picture", "image"))
    stored = sorted((tmp_path / "images").glob("*.png"))
    # Locust's last table may lack the requests that it let end after the time.
    assert pictures >= images > 0 and len(stored) >= max(images, 2)
    assert rows["Aggregated"]["Failure Count"] == "0"
    stored[0].write_bytes(stored[1].read_bytes())
    command = ["load_test", "--images", tmp_path / "images", "--model_path", checkpoints["emoji"].path]
    status, out, err = run(*command, "--precision", "fp32", "--batch_size", "2")
    other = tmp_path / "other" / "7.json"
    other.parent.mkdir()
    for content, says in ((json.dumps({"prompt": "x", "model": "anole"}), "anole"), ('{"prompt":', "JSON")):
        other.write_text(content)
        assert says in refused("load_test", "--images", other.parent, *command[3:])
    found = {"images": len(stored), "different": [stored[0].stem]}
    assert (status, json.loads(out.splitlines()[-1])) == (1, found), err


def test_a_folder_without_images_is_refused(refused: Refused, tmp_path: Path) -> None:
    assert "--images" in refused("load_test", "--images", tmp_path)
