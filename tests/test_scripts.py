"""Scripts of tables and figures: every command they give is one that the program takes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from main import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
NOTE = """#!{python}
import json, sys
with open({path!r}, "a") as stream:
    stream.write(json.dumps(sys.argv[1:]) + "\\n")
"""
SCRIPTS = {  # script with its arguments -> commands of the embedded model, of a published one
    "table1_coco.sh": (3, 3),
    "table2_parti.sh": (3, 3),
    "table3_quality.sh": (27, 21),
    "figure_acceptance.sh": (4, 4),
    "race.sh": (4, 4),
}


@pytest.mark.parametrize("model", ["emoji", "anole"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_commands_are_taken(script: str, model: str, tmp_path: Path) -> None:
    noted, python = tmp_path / "noted.jsonl", tmp_path / "python"
    python.write_text(NOTE.format(python=sys.executable, path=str(noted)))
    python.chmod(0o755)
    env = {**os.environ, "PYTHON": str(python), "MODEL": model, "REF_DIR": "real"}
    subprocess.run(["bash", *shlex.split(f"scripts/{script}")], cwd=ROOT, env=env, check=True)
    lines = [json.loads(line) for line in noted.read_text().splitlines()]
    assert len(lines) == SCRIPTS[script][model != "emoji"]
    for program, name, *words in lines:
        options = import_module(f"cli.{name}").Options.parse(words)  # refuses what it does not know
        assert program == "main.py" and name in COMMANDS and getattr(options, "model", model) == model


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_shell(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
