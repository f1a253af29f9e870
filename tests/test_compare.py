"""scripts/compare_*.sh: the commands that they run in both checkouts, and when they report a difference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT

STUB = """
import json, os, pathlib, sys
if sys.argv[1] == "-":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
words, here = sys.argv[2:], os.getcwd() == {root!r}
with open({log!r}, "a") as log:
    print(json.dumps([here, words]), file=log)
if words[0] == "bench":
    ms = 2.0 * {slow!r} if here else 2.0
    print("a table")
    print(json.dumps({{"rows": [{{"method": m, "step_ms": ms}} for m in ("ar", "eagle-2", "self-draft")]}}))
else:
    folder = pathlib.Path(words[words.index("--output_dir") + 1]) / "img"
    folder.mkdir(parents=True)
    for number in range(4):
        changed = here and number == 3 and {changed!r} in " ".join(words)
        (folder / f"{{number}}.png").write_text("b" if changed else "a")
"""


def compare(
    tmp_path: Path, script: str, *words: str, slow: float = 1.0, changed: str = "nothing"
) -> tuple[subprocess.CompletedProcess[str], list[tuple[bool, list[str]]]]:
    """Runs a script that compares this checkout with an empty one, with a stub in the place of main.py. In
    this checkout the stub takes `slow` times as long, and makes one other image if the words `changed` occur.
    Returns the finished script and the stub's calls: whether each ran in this checkout, and its words."""
    other, program, log = tmp_path / "other", tmp_path / "program", tmp_path / "log"
    other.mkdir()
    stub = STUB.format(python=sys.executable, root=str(ROOT), log=str(log), slow=slow, changed=changed)
    program.write_text(f"#!{sys.executable}\n{stub}")
    program.chmod(0o755)
    command = ["bash", str(ROOT / "scripts" / script), str(other), *words]
    environment = {**os.environ, "PYTHON": str(program)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return done, [tuple(json.loads(line)) for line in log.read_text().splitlines()]


@pytest.mark.parametrize(("slow", "status"), [(1.0, 0), (0.5, 0), (1.02, 0), (1.05, 1)])
def test_speed_is_compared_in_pairs_that_take_turns(tmp_path: Path, slow: float, status: int) -> None:
    done, calls = compare(tmp_path, "compare_speed.sh", "2", slow=slow)
    assert done.returncode == status, done.stderr
    assert [here for here, _ in calls] == [False, True, True, False]
    assert all("--total_token" in words and "32" in words for _, words in calls)
    rows = {line.split()[0]: line.split()[1:4] for line in done.stdout.splitlines()[1:]}
    assert set(rows) == {"ar", "eagle-2", "self-draft"}
    assert rows["ar"] == ["2.000", f"{2 * slow:.3f}", f"{1 / slow:.3f}"]


@pytest.mark.parametrize(("changed", "differing"), [("nothing", 0), ("--peanut", 2), ("--batch_size", 1)])
def test_images_are_compared_by_six_commands(tmp_path: Path, changed: str, differing: int) -> None:
    done, calls = compare(tmp_path, "compare_images.sh", changed=changed)
    assert done.returncode == bool(differing), done.stderr
    assert [here for here, _ in calls] == [False, True] * 6
    flags = [" ".join(words).split(" --prompt")[0] for _, words in calls]
    assert flags[::2] == flags[1::2] and len(set(flags)) == 6
    assert (
        done.stdout.count("OTHER IMAGES") == differing and done.stdout.count("same images") == 6 - differing
    )


def test_a_command_that_fails_ends_the_comparison(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    environment = {**os.environ, "PYTHON": "false"}
    for script in ("compare_speed.sh", "compare_images.sh"):
        command = ["bash", str(ROOT / "scripts" / script), str(tmp_path / "other")]
        assert subprocess.run(command, env=environment, capture_output=True, timeout=60).returncode
