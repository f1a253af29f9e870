"""Anole and Lumina-mGPT from the published layouts, by the commands. Random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests import published, tiny
from tests.checkpoints import Checkpoints
from tests.conftest import Refused, Run

CAPTIONS = {"images": [{"id": 9, "file_name": "9.jpg"}, {"id": 4, "file_name": "4.jpg"}],
            "annotations": [{"id": 501, "image_id": 9, "caption": "a cat on the hat"},
                            {"id": 502, "image_id": 9, "caption": "not the first"},
                            {"id": 377, "image_id": 4, "caption": "the ocean"}]}  # fmt: skip


def test_the_readme_command_of_adt_tree(run: Run, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """As published but for its paths and k, as the codebook has 64 codes: images by annotation, statistics
    and configuration under its names."""
    (tmp_path / "captions_val2017.json").write_text(json.dumps(CAPTIONS))
    anole, out = checkpoints["anole"], tmp_path / "out"
    words = f"""generate_images --prompt MSCOCO2017Val --model anole --temperature 1 --model_type eagle
        --model_path {anole.path} --drafter_path {anole.drafter} --output_dir {out} --lantern --peanut
        --lantern_k 20 --lantern_delta 0.5 --num_images -1 --prompt_dir {tmp_path}"""
    assert run(*words.split())[0] == 0
    assert {path.name for path in (out / "img").iterdir()} == {"501.png", "377.png"}
    statistics = json.loads((out / "global_statistics_0_10000.json").read_text())
    assert [entry["ann_id"] for entry in statistics.values()] == [501, 377]
    for entry, text in zip(statistics.values(), ("a cat on the hat", "the ocean"), strict=True):
        assert entry["prompt"] == text and entry["acceptance_length"] >= 1 and entry["time"] > 0
    options = json.loads((out / "generation_configs.json").read_text())
    assert (options["model"], options["lantern_delta"], options["peanut"]) == ("anole", 0.5, True)


def test_the_layout_does_not_matter(run: Run, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """The same weights as one file with a decoder inside, and as shards with Meta's VQGAN: one picture."""
    pictures = []
    for name in ("emoji", "anole"):
        out = tmp_path / name
        rest = ["--prompt", "cat", "--num_images", "2", "--model_type", "base", "--output_dir", out]
        assert run("generate_images", *checkpoints[name].words(), *rest)[0] == 0
        pictures.append([(out / "img" / f"{n}.png").read_bytes() for n in range(2)])
    assert pictures[0] == pictures[1] and pictures[0][0] != pictures[0][1]


def test_prompts_of_lumina_mgpt(checkpoints: Checkpoints) -> None:
    model = checkpoints["lumina_mgpt"].load()
    words = tiny.vocabulary() | {name: len(tiny.vocabulary()) + n for n, name in enumerate(published.LUMINA)}
    prompt = model.encode("cat")
    opening = [words["<racm3:break>"], words["<reserved08802>"], words["<reserved08802>"]]
    text = "Generate an image of 8x8 according to the following prompt:\ncat"
    ids = [words[{" ": "Ġ", "\n": "Ċ"}.get(letter, letter)] for letter in text]
    assert prompt.unconditional == opening
    assert prompt.conditional == [words["<s>"], *ids, words["<reserved08706>"], *opening]
    assert model.row_end == words["<reserved08799>"] and (model.grid.height, model.grid.width) == (4, 4)


def test_lumina_mgpt_by_the_command(run: Run, checkpoints: Checkpoints, tmp_path: Path) -> None:
    words = ["generate_images", *checkpoints["lumina_mgpt"].words(), "--prompt", "cat", "--num_images", "1"]
    words += ["--model_type", "base", "--cfg_mode", "sequential", "--output_dir", tmp_path / "o"]
    assert run(*words)[0] == 0


def test_where_the_tokenizer_may_lie(
    run: Run, refused: Refused, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    anole = checkpoints["anole"].copied(tmp_path / "copy")
    base = Path(shutil.move(anole.path.parent / "chameleon", tmp_path / "base" / "chameleon"))
    words = ["generate_images", *anole.words(), "--prompt", "cat", "--model_type", "base"]
    words += ["--num_images", "1", "--output_dir", tmp_path / "out", "--tokenizer_base_path"]
    assert "tokenizer.json" in refused(*words, tmp_path / "base")
    shutil.copy(anole.path / "tokenizer.json", base / "tokenizer" / "text_tokenizer.json")
    assert run(*words, tmp_path / "base")[0] == 0
