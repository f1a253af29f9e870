"""scripts/get_data.sh from a local mirror: sums checked, unknown ones recorded and held to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "get_data.sh"
MEMBERS = ("annotations/captions_val2014.json",)

pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")


def get(tmp_path: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Run the script with tmp_path/mirror as the network."""
    mirror = (tmp_path / "mirror").as_uri()
    env = {**os.environ, "FOLDER": str(tmp_path / "data"), "MIRROR": mirror, "PYTHON": sys.executable}
    return subprocess.run(
        ["bash", str(SCRIPT), *names], env=env, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """An archive as COCO's, with one small member."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    with zipfile.ZipFile(folder / "annotations_trainval2014.zip", "w") as archive:
        for member in MEMBERS:
            archive.writestr(member, '{"annotations": []}')
    return folder


def test_unknown_sums_are_recorded_once_and_hold(mirror: Path, tmp_path: Path) -> None:
    first = get(tmp_path, "MSCOCO2014")
    assert first.returncode == 0 and first.stdout.count("no sum is known") == 2, first.stderr
    captions = tmp_path / "data" / "captions_val2014.json"
    sums = (tmp_path / "data" / "SHA256SUMS").read_text()
    assert captions.read_text() == '{"annotations": []}' and len(sums.splitlines()) == 2
    again = get(tmp_path, "MSCOCO2014")
    assert again.returncode == 0 and again.stdout.count("checked") == 2
    assert (tmp_path / "data" / "SHA256SUMS").read_text() == sums
    captions.write_text("{}")
    bad = get(tmp_path, "MSCOCO2014")
    assert bad.returncode == 2 and "captions_val2014.json has SHA-256" in bad.stderr
    assert len(bad.stderr.splitlines()) == 1


def test_what_does_not_have_its_known_sum_is_refused(mirror: Path, tmp_path: Path) -> None:
    (mirror / "PartiPrompts.tsv").write_text("Prompt\nnot the published file\n")
    done = get(tmp_path, "PartiPrompts")
    assert done.returncode == 2 and "expected fab29e41" in done.stderr
    assert not (tmp_path / "data" / "PartiPrompts.tsv").exists()


def test_what_is_missing_or_unknown_is_one_line(mirror: Path, tmp_path: Path) -> None:
    missing = get(tmp_path, "SJDPrompts")
    assert missing.returncode == 2 and "could not be fetched" in missing.stderr.splitlines()[-1]
    unknown = get(tmp_path, "LAION")
    assert unknown.returncode == 2 and "there is no LAION" in unknown.stderr
