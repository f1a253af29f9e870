"""The scripts: they fetch the listed files and check them, and our commands accept every command line that
they contain."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from main import COMMANDS, module_of
from tests.support.runs import ROOT

SCRIPTS = ROOT / "scripts"
SCRIPTS_OF_COMMANDS = (
    "table1_coco.sh", "table2_parti.sh", "table3_quality.sh", "figure_acceptance.sh", "race.sh",
)  # fmt: skip
Done = subprocess.CompletedProcess[str]


def bash(script: str, *words: str, **variables: str) -> Done:
    """Runs one of the scripts."""
    options = {"cwd": ROOT, "env": {**os.environ, **variables}, "timeout": 60}
    return subprocess.run(["bash", SCRIPTS / script, *words], capture_output=True, text=True, **options)


@pytest.fixture
def words(tmp_path: Path) -> Callable[..., list[list[str]]]:
    """Returns a function that runs a script with a program in place of Python, and returns the words of each
    call of that program."""
    program, log = tmp_path / "program", tmp_path / "log"
    note = f"print(json.dumps(sys.argv[1:]), file=open({str(log)!r}, 'a'))"
    program.write_text(f"#!{sys.executable}\nimport json, sys\n{note}\n")
    program.chmod(0o755)

    def run(script: str, *arguments: str, **variables: str) -> list[list[str]]:
        done = bash(script, *arguments, PYTHON=str(program), **variables)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in log.read_text().splitlines()]

    return run


@pytest.mark.parametrize("script", SCRIPTS_OF_COMMANDS)
def test_commands_are_taken(script: str, words: Callable[..., list[list[str]]]) -> None:
    for program, name, *rest in words(script, MODEL="anole", REF_DIR="real"):
        options = module_of(name).Options.parse(rest)  # refuses what it does not know
        assert program == "main.py" and name in COMMANDS
        assert getattr(options, "model", "anole") == "anole"


def test_get_ckpts_hands_its_variables_on(words: Callable[..., list[list[str]]]) -> None:
    variables = {"REVISION": "v1", "FILE": "c2i_B_256.pt", "PIXELS": "1"}
    given = ["--revision", "v1", "--file", "c2i_B_256.pt", "--pixels"]
    assert words("get_ckpts.sh", "a", "b", **variables) == [["main.py", "get_ckpts", *given, "a", "b"]]


@pytest.fixture
def get(tmp_path: Path) -> Callable[..., Done]:
    """Returns a function that runs get_data.sh, which fetches from mirror/ into data/. The archive there has
    one small member, laid out as COCO's."""
    if not shutil.which("curl"):
        pytest.skip("needs curl")
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    with zipfile.ZipFile(mirror / "annotations_trainval2014.zip", "w") as archive:
        archive.writestr("annotations/captions_val2014.json", '{"annotations": []}')
    (mirror / "PartiPrompts.tsv").write_text("Prompt\nnot the published file\n")
    options = {"FOLDER": str(tmp_path / "data"), "MIRROR": mirror.as_uri(), "PYTHON": sys.executable}
    return lambda *names: bash("get_data.sh", *names, **options)


def test_unknown_sums_are_recorded_once_and_hold(get: Callable[..., Done], tmp_path: Path) -> None:
    first = get("MSCOCO2014")
    assert first.returncode == 0 and first.stdout.count("SHA256SUMS") == 2, first.stderr
    captions, sums = tmp_path / "data" / "captions_val2014.json", tmp_path / "data" / "SHA256SUMS"
    before = sums.read_text()
    assert captions.read_text() == '{"annotations": []}' and len(before.splitlines()) == 2
    again = get("MSCOCO2014")
    assert again.returncode == 0 and again.stdout.count("verified") == 2 and sums.read_text() == before
    captions.write_text("{}")
    bad = get("MSCOCO2014")
    assert bad.returncode == 2 and "captions_val2014.json" in bad.stderr
    assert len(bad.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("PartiPrompts", "fab29e41"),  # the published checksum
        ("SJDPrompts", "SJDPrompts.tsv"),
        ("LAION", "LAION"),
    ],
)
def test_what_is_wrong_missing_or_unknown_is_refused(
    get: Callable[..., Done], tmp_path: Path, name: str, named: str
) -> None:
    done = get(name)
    assert done.returncode == 2 and named in done.stderr.splitlines()[-1]
    assert not (tmp_path / "data" / f"{name}.tsv").exists()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
@pytest.mark.parametrize("python", [sys.executable, "no-such-python"])
def test_gpu_check_without_a_gpu_is_one_line(python: str) -> None:
    done = bash("gpu_check.sh", PYTHON=python)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "GPU" in done.stderr
    assert python in done.stderr
