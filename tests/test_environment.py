"""The packages that scripts/setup.sh installs run models of transformers and the documents' Python lines.

Each runs in a new process. A torchvision that does not fit torch stops the import of transformers' models
there, as it does for a user, and nothing in tests/ works around that.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.checkpoints import Checkpoints
from tests.support.runs import ROOT, images, python

# T5 runs in transformers; codes without pixels.
FAMILIES = {"llamagen": "", "glm_image": "--height 64 --width 64"}
JANUS = "ckpts/janus_pro/Janus-Pro-1B"  # the checkpoint that the documents name


def run(*words: object) -> None:
    """Runs Python in a new process, which must succeed."""
    done = python(*words, timeout=250)
    assert done.returncode == 0, done.stderr


def python_block(document: str) -> str:
    """Returns the first Python code that a document shows."""
    block, *_ = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)
    return block


def test_generate_images(checkpoints: Checkpoints, tmp_path: Path) -> None:
    options = "--prompt heart --num_images 1 --method self-draft --output_dir".split()
    lines = [
        ["generate_images", *checkpoints[family].words(), *size.split(), *options, str(tmp_path / family)]
        for family, size in FAMILIES.items()
    ]
    run("-c", f"import main; assert not any([main.main(words) for words in {lines!r}])")
    assert [len(images(tmp_path / family)) for family in FAMILIES] == [1, 0]


def test_readme_from_pretrained(tmp_path: Path) -> None:
    picture = tmp_path / "heart.png"
    run("-c", python_block("README.md").replace("heart.png", str(picture)))
    assert picture.is_file()


def test_readme_from_transformers(checkpoints: Checkpoints, tmp_path: Path) -> None:
    tiny = checkpoints["janus_pro"].copied(tmp_path / "janus_pro")
    published = {"image_processor_type": "JanusImageProcessor"}  # the tiny checkpoint has none
    (tiny.path / "preprocessor_config.json").write_text(json.dumps(published))
    block, picture = python_block("docs/TRANSFORMERS.md"), tmp_path / "heart.png"
    assert JANUS in block
    run("-c", block.replace(JANUS, str(tiny.path)).replace("heart.png", str(picture)))
    assert picture.is_file()
