"""Command lines that cannot be: status 2, one line that names the word, and nothing is written.

Options that no model is needed for are in test_options.py, damaged files of a checkpoint in
tests/models/test_refusals.py, prompt files in tests/storage/test_prompts.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Refused
from tests.support.checkpoints import Checkpoints

COMMANDS = [
    "generate_image", "memory x1", "check_ckpts emoji anole --model_path some_folder",
    "train_drafter --model glm_image", "generate_codebook --batch_size",
    "extract_code --model glm_image --features", "generate_images --method ar --heatmaps 2",
]  # fmt: skip
# A checkpoint, options of generate_images, and words of the line. @NAME is a path of a checkpoint.
OPTIONS = [
    ("janus_pro", "--model_path @emu3", "config.json"),
    ("simplear", "--model_path @liquid", "config.json"),
    ("anole", "--model_path @lumina_mgpt", "model 'lumina_mgpt'"),
    ("lumina_mgpt", "--model_path @anole", "model 'anole'"),
    ("llamagen", "--class_labels 1,2", "--prompt"),
    ("llamagen", "--target_size 16", "8 px"),
    ("llamagen classes", "--prompt sun", "--class_labels"),
    ("llamagen classes", "--class_labels 7", "0 to 6"),
    ("llamagen classes", "--class_labels 1,1", "--class_labels"),
    ("lumina_mgpt", "--target_size 10", "--target_size 10"),
    ("lumina_mgpt", "--target_size 20", "<reserved08805>"),
    ("emu3", "--ratio 0:3", "--ratio 0:3"),
    ("emu3", "--target_size 1 --ratio 9:1", "--target_size 1"),
    ("glm_image", "--target_size 64", "height"),
    ("glm_image", "--ratio 1:1", "--ratio"),
    ("glm_image", "--record 1", "--record 1"),
    ("emoji", "--height 64", "--height 64"),
    ("emoji", "--target_size 512", "--target_size 512"),
    ("emoji", f"--prompt {2000 * 'word'} --method ar", "prompt"),
    ("emoji", "--drafter_path nowhere", "nowhere"),
    ("emoji", "--revision main --model_path configs", "configs"),
    ("emoji", "--cuda_graphs --device cpu", "--cuda_graphs"),
    ("emoji", "--compile --device cpu", "--compile"),
]


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_and_choices(refused: Refused, words: str) -> None:
    assert words.split()[-1] in refused(*words.split())


@pytest.mark.parametrize(("name", "words", "word"), OPTIONS, ids=lambda text: text[:40])
def test_options_that_do_not_fit_the_model(
    name: str, words: str, word: str, checkpoints: Checkpoints, tmp_path: Path, refused: Refused
) -> None:
    given = [checkpoints[text[1:]].path if text[0] == "@" else text for text in words.split()]
    if not {"--prompt", "--class_labels"} & {*given}:
        given += ["--prompt", "sun"]
    line = refused("generate_images", *checkpoints[name].words(), "--output_dir", tmp_path / "o", *given)
    assert word in line and len(line) < 500 and not (tmp_path / "o").exists()
