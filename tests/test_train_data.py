"""Stored images: what the target would draw, features as decoding sees them; and pictures encoded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from adt_tree.relax import nearest_table
from models.codecs.neighbours import read_table
from models.codecs.vq import from_uint8
from models.model import Model
from tests import tiny
from tests.checkpoints import Checkpoints
from tests.conftest import Refused, Run
from training.shards import INDEX, read_shards
from training.teacher import drafter_tokens, features

FAMILIES = ("emoji", "anole", "lumina_mgpt", "llamagen")
Draw = Callable[[str], list[str]]
PROMPTS = ["red heart", "pizza", "cat face", "sun", "rocket"]


@pytest.fixture(scope="module")
def models(checkpoints: Checkpoints) -> dict[str, Model]:
    """Targets by family."""
    return {name: checkpoints[name].load(need_drafter=False) for name in FAMILIES}


@pytest.fixture
def draw(checkpoints: Checkpoints, tmp_path: Path) -> Draw:
    """A family -> the words that draw the prompts' images, but for the folder."""
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n")
    return lambda name: [*checkpoints[name].words(), "--prompt", str(path), "--output_dir"]


def by_name(root: Path, model: Model) -> dict[str, list[int]]:
    """Codes of the folder's images."""
    shards = read_shards([root], model)
    return {
        name.partition("/")[2]: codes.tolist() for name, codes in zip(shards.names, shards.codes, strict=True)
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_images_are_those_of_the_ar_baseline_however_often_resumed(
    run: Run, name: str, models: dict[str, Model], draw: Draw, tmp_path: Path
) -> None:
    model, words = models[name], draw(name)
    whole, parts, drawn = tmp_path / "whole", tmp_path / "parts", tmp_path / "drawn"
    assert run("generate_train_data", *words, whole, "--shard_size", 2)[0] == 0
    for window in (["--end_idx", "3"], ["--batch_size", "2"], []):
        assert run("generate_train_data", *words, parts, "--shard_size", 2, *window)[0] == 0
    assert by_name(parts, model) == by_name(whole, model) and len(by_name(whole, model)) == 5
    assert run("generate_images", *words, drawn, "--model_type", "base")[0] == 0
    for image, codes in by_name(whole, model).items():
        png = np.asarray(Image.open(drawn / "img" / f"{image}.png"))
        assert np.array_equal(np.asarray(model.image(codes)), png)
    index = json.loads((whole / INDEX).read_text())
    assert [len(shard["images"]) for shard in index["shards"]] == [2, 2, 1]
    assert {image["prompt"] for shard in index["shards"] for image in shard["images"]} == set(PROMPTS)
    assert index["weights"] == model.weights_sha


def test_a_listed_shard_that_is_gone_is_made_again(
    run: Run, models: dict[str, Model], draw: Draw, tmp_path: Path
) -> None:
    """The first of three: its images come again under its name, the others stay as they are."""
    words = ["generate_train_data", *draw("emoji"), tmp_path, "--shard_size", "2"]
    assert run(*words)[0] == 0
    before = by_name(tmp_path, models["emoji"])
    first, *others = sorted(tmp_path.glob("data_*.safetensors"))
    kept = [path.read_bytes() for path in others]
    first.unlink()
    assert run(*words)[0] == 0
    assert by_name(tmp_path, models["emoji"]) == before and len(before) == len(PROMPTS)
    assert len(kept) == 2 and [path.read_bytes() for path in others] == kept


@pytest.mark.parametrize("name", FAMILIES)
def test_features_are_those_of_one_causal_pass(
    run: Run, name: str, models: dict[str, Model], draw: Draw, tmp_path: Path
) -> None:
    """Both branches; separators among the tokens. Stored features are the recomputed ones.

    tests.test_train_drafter has them as decoding sees them, and those behind the padding of LlamaGen."""
    model, out = models[name], tmp_path / "out"
    assert run("generate_train_data", *draw(name), out, "--features", "--end_idx", 2)[0] == 0
    shards = read_shards([out], model)
    assert shards.has_features
    encoded = [model.encode(text) for text in shards.texts]
    computed = features(model, encoded, shards.codes)
    for image, prompt in enumerate(encoded):
        for branch, (stored, own) in enumerate(zip(shards.features(image), computed[image], strict=True)):
            torch.testing.assert_close(stored, own, atol=1e-4, rtol=1e-4)
            if name != "llamagen":
                row = drafter_tokens(model, prompt, branch, shards.codes[image])
                tokens = torch.cat((torch.tensor(prompt.tokens(branch)[:1]), row))
                expected = model.decoder.causal(tokens[None])[0]
                torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)


def test_classes_are_generated_and_learned_from(
    run: Run, refused: Refused, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    words = checkpoints["llamagen classes"].words()
    out = ["--class_labels", "0,3,6,2", "--output_dir", tmp_path / "out"]
    assert run("generate_train_data", *words, *out)[0] == 0
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("no class")
    Image.new("RGB", (8, 8)).save(tmp_path / "texts" / "a.png")
    pictures = ["--data_path", tmp_path / "texts", "--output_dir", tmp_path / "b", "--features"]
    assert "a.txt: prompt 'no class'" in refused("extract_code", *words, *pictures)
    train = ["--data_dir", tmp_path / "out", "--save_dir", tmp_path / "run", "--bs", "2"]
    assert run("train_drafter", *words, "--device", "cpu", *train, "--max_steps", "2")[0] == 0


def test_a_folder_keeps_one_distribution_and_one_target(
    run: Run, refused: Refused, checkpoints: Checkpoints, draw: Draw, tmp_path: Path
) -> None:
    """What draws into it and what learns from it; a damaged index and a torn shard are named."""
    out = tmp_path / "out"
    words = ["generate_train_data", *draw("emoji"), out]
    assert run(*words, "--end_idx", "2")[0] == 0
    assert "cfg = 3.0, now it is 2.0" in refused(*words, "--cfg", "2")
    assert "features = False" in refused(*words, "--features")
    assert "--drafter_path" in refused(*words, "--drafter_path", "x")
    other = tiny.build(tmp_path / "other", rms_norm_eps=1e-3)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.5
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    train = ["train_drafter", "--data_dir", out, "--save_dir", tmp_path / "run", "--device", "cpu"]
    own = [*train, "--model_path", checkpoints["emoji"].path]
    line = refused(*train, "--model_path", other)
    assert "another target (weights" in line and str(out) in line
    assert "grid" in refused(*train, *checkpoints["lumina_mgpt"].words(side=12))
    shard = out / "data_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-40])
    assert str(shard) in refused(*own)
    (out / INDEX).write_text("{")
    assert "index.json is damaged" in refused(*words)
    assert "index.json is damaged" in refused(*own)


@pytest.mark.parametrize("name", FAMILIES)
def test_pictures_become_codes_of_their_centre(
    run: Run, name: str, checkpoints: Checkpoints, models: dict[str, Model], tmp_path: Path
) -> None:
    model, data, out = models[name], tmp_path / "data", tmp_path / "out"
    side = model.grid.height * model.codec.config.patch_size
    rng = np.random.default_rng(0)
    (data / "below").mkdir(parents=True)
    pixels = {stem: rng.integers(0, 256, (side, side, 3), dtype=np.uint8) for stem in ("a", "below/b")}
    for stem, array in pixels.items():
        Image.fromarray(array).save(data / f"{stem}.png")
        (data / f"{stem}.txt").write_text(f"a picture\n of {stem[-1]} ")
    wide = rng.integers(0, 256, (side, 3 * side, 3), dtype=np.uint8)
    Image.fromarray(wide).save(data / "wide.png")
    (data / "wide.txt").write_text("wide")
    pixels["wide"] = wide[:, side : 2 * side]
    (data / "torn.jpg").write_bytes(b"no picture")
    (data / "torn.txt").write_text("torn")
    Image.fromarray(wide).save(data / "lonely.webp", lossless=True)
    words = ["extract_code", *checkpoints[name].words(), "--data_path", data, "--output_dir", out]
    assert run(*words, "--num_samples", "2")[0] == 0
    status, printed, _ = run(*words)
    last = json.loads(printed.splitlines()[-1])
    assert status == 0
    assert (last["damaged"], last["without_caption"], last["images"]) == (["torn"], 1, 3)
    shards = read_shards([out], model)
    assert sorted(shards.texts) == ["a picture of a", "a picture of b", "wide"]
    for stem, codes in by_name(out, model).items():
        expected = model.codec.encode(from_uint8(torch.from_numpy(pixels[stem].copy())[None]))
        assert codes == expected.flatten().tolist()


def test_pictures_without_captions_or_folder_are_refused(
    refused: Refused, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    words = ["extract_code", *checkpoints["emoji"].words(), "--output_dir", tmp_path / "out"]
    assert "no such folder" in refused(*words, "--data_path", tmp_path / "nowhere")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_bytes(b"")
    assert "none with a caption" in refused(*words, "--data_path", tmp_path / "data")
    (tmp_path / "data" / "a.txt").write_text("a")
    assert "can be read" in refused(*words, "--data_path", tmp_path / "data")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_of_nearest_codes_is_whole_and_read_back(
    run: Run, name: str, checkpoints: Checkpoints, models: dict[str, Model], tmp_path: Path
) -> None:
    model = models[name]
    assert run("generate_codebook", *checkpoints[name].words(), "--save_path", tmp_path)[0] == 0
    width = model.num_codes - 1
    path = tmp_path / f"top_{width}_indices.npy"
    stored = np.load(path)
    assert stored.dtype == np.uint16 and stored.shape == (model.num_codes, width)
    assert torch.equal(read_table(path, model.codebook, width), nearest_table(model.codebook, width))
