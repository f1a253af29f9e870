"""The commands of quality metrics on tiny checkpoints: values, pairing by name, counts, the record kept."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from eval.metrics import networks, pictures, scores
from eval.metrics.clip import aesthetic, clip_scores, preference_scores
from eval.metrics.distances import frechet
from eval.metrics.pictures import Pair
from tests import metric_checkpoints as tiny
from tests.conftest import Refused, Result, Run

CPU = torch.device("cpu")
TEXTS = ("a cat", "photo", "a b c", "cat photo", "x y", "z")


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries' networks in the widths of the tiny checkpoints."""
    tiny.narrow(monkeypatch)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run of six prompts as generate_images leaves it, a map beside its images."""
    return make_run(tmp_path / "run")


def make_run(folder: Path, shift: int = 0) -> Path:
    (folder / "img").mkdir(parents=True)
    records = {}
    for row, text in enumerate(TEXTS):
        tiny.picture(48 + 3 * row + shift, 40 + row).save(folder / "img" / f"{row}.png")
        records[str(row)] = {"prompt": text, "ann_id": row}
    tiny.picture(20, 20).save(folder / "contact_sheet.png")
    (folder / "global_statistics_0_10000.json").write_text(json.dumps(records))
    return folder


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """Seven reference pictures in folders of classes."""
    for row in range(7):
        path = tmp_path / "real" / f"class{row % 2}" / f"{row}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        tiny.picture(40 + row, 50 + 2 * row).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(path)
    return tmp_path / "real"


def test_fid_and_clip_score(result: Result, run_folder: Path, real: Path, tmp_path: Path) -> None:
    clip, inception = tiny.clip(tmp_path), tiny.inception(tmp_path)
    entry = result(
        "eval_fid_clip", "--fake_dir", run_folder, "--ref_dir", real, "--how_many", 5, "--eval_res", 32,
        "--clip_path", clip, "--inception_path", inception, "--batch_size", 3, "--device", "cpu",
    )  # fmt: skip
    fakes = [run_folder / "img" / f"{row}.png" for row in range(5)]
    reals = sorted(real.rglob("*.jpg"))
    net, _ = networks.inception(inception, 32, CPU)
    fid = frechet(*(networks.features(net, paths, 8) for paths in (fakes, reals)))
    assert entry["scores"]["fid_32px"] == pytest.approx(fid, rel=1e-3)
    loaded, cosines = tiny.loaded_clip(clip), []
    for path, text in zip(fakes, TEXTS, strict=False):  # one by one, by the published steps
        pixels = loaded.network.prepare(pictures.reference_crop(Image.open(path), 32))[None]
        with torch.no_grad():
            words = loaded.texts([f"A photo depicts {text}"])
            cosines.append(F.cosine_similarity(loaded.network.module(pixels), words).item())
    assert entry["scores"]["clip_score"] == pytest.approx(float(np.mean(cosines)), abs=1e-5)
    assert entry["images"] == 5 and entry["real_images"] == 7
    assert set(entry["weights"]) == {"clip", "inception"} and entry["commit"] and entry["device"]
    assert scores.read(run_folder / "scores.json") == [entry]


def test_pairs_go_by_name_and_not_by_rank(
    run_folder: Path, tmp_path: Path, result: Result, refused: Refused
) -> None:
    """With one image gone every other keeps its own prompt; -1 misses it, its number is honoured."""
    (run_folder / "img" / "1.png").unlink()
    pairs = pictures.pairs_of(str(run_folder), None, 5, ("", ""))
    assert [(p.text, p.path.stem) for p in pairs] == [(TEXTS[row], str(row)) for row in (0, 2, 3, 4, 5)]
    words = ("eval_fid_clip", "--fake_dir", run_folder, "--clip_path", tiny.clip(tmp_path), "--how_many")
    for count in (-1, 6):
        assert "5 of 6 prompts have an image, missing are those of 1" in refused(*words, count)
    entry = result(*words, 5)
    assert entry["images"] == 5 and "fid_256px" not in entry["scores"]


def test_names_of_the_published_codes(tmp_path: Path) -> None:
    """LANTERN numbers rows of the prompt file, ADT-Tree names annotations: both find their prompt."""
    notes = [{"id": 900 + n, "image_id": n, "caption": text} for n, text in enumerate(TEXTS)]
    source = tmp_path / "coco.json"
    source.write_text(json.dumps({"annotations": notes, "images": [{"id": n} for n in range(6)]}))
    for name in ("prompt_3.png", "903.png", "image_3.png", "0903.jpg"):
        folder = tmp_path / name
        folder.mkdir()
        tiny.picture(8, 8).save(folder / name)
        (pair,) = pictures.pairs_of(str(folder), str(source), 1, ("--fake_dir", "--caption_path"))
        assert pair.text == TEXTS[3]


def test_hps_and_aesthetic(result: Result, run_folder: Path, tmp_path: Path) -> None:
    clip, hps = tiny.clip(tmp_path), tiny.hps(tmp_path)
    head = tiny.aesthetic(tmp_path, tiny.aesthetic_head(24))
    entry = result(
        "eval_hpsv2", "--image_path", run_folder, "--hps_path", hps, "--clip_path", clip, "--how_many", 4
    )
    loaded = tiny.loaded_clip(clip)
    pairs = [Pair(str(n), TEXTS[n], run_folder / "img" / f"{n}.png") for n in range(4)]
    alone = [preference_scores(loaded, [pair], 1).item() for pair in pairs]
    assert entry["scores"]["hpsv2"] == pytest.approx(np.mean(alone), abs=1e-6) and entry["images"] == 4
    other = clip_scores(loaded, pairs, 32, "", 2)
    assert abs(float(other.mean()) - np.mean(alone)) > 1e-4, "the preparations differ"
    entry = result(
        "eval_quality", "--fake_dir", run_folder, "--metrics", "aesthetic", "--clip_path", clip,
        "--aesthetic_path", head, "--batch_size", 4,
    )  # fmt: skip
    assert [e["command"] for e in scores.read(run_folder / "scores.json")] == ["eval_hpsv2", "eval_quality"]
    each = networks.features(aesthetic(loaded, head), sorted((run_folder / "img").iterdir()), 1)
    assert entry["scores"]["aesthetic"] == pytest.approx(float(each.mean()), abs=1e-5)


def test_precision_and_recall_with_stored_features(
    result: Result, refused: Refused, run: Run, run_folder: Path, real: Path, tmp_path: Path
) -> None:
    vgg, stored = tiny.vgg(tmp_path), tmp_path / "real.safetensors"
    plain = ("eval_prec_recall", "--vgg_path", vgg)
    kept, fake = (*plain, "--fname_precalc", stored), ("--fake_dir", run_folder)
    assert run(*kept, "--ref_dir", real)[0] == 0 and stored.is_file()
    entry = result(*kept, *fake, "--k", 2)
    assert (entry["images"], entry["real_images"]) == (6, 7)
    assert entry["scores"] == result(*plain, *fake, "--ref_dir", real, "--k", 2)["scores"]
    same = result(*plain, *fake, "--ref_dir", run_folder)  # whose maps are no images to compare with
    assert same["scores"] == {"precision": 1.0, "recall": 1.0} and same["real_images"] == 6
    fewer = result(*kept, *fake, "--num_samples", 6)
    assert (fewer["images"], fewer["real_images"]) == (6, 6)
    weights = torch.load(vgg, weights_only=True)
    torch.save({name: tensor + 1 for name, tensor in weights.items()}, vgg)
    assert "made by other weights" in refused(*kept, *fake)
    torch.save({name: tensor * float("nan") for name, tensor in weights.items()}, vgg)
    assert "its features are not finite" in refused(*plain, *fake, "--ref_dir", real)


def test_quality_of_inception_and_effnet(
    result: Result, run_folder: Path, real: Path, tmp_path: Path
) -> None:
    words = ("eval_quality", "--fake_dir", run_folder, "--ref_dir")
    inception = ("--eval_res", 40, "--inception_path", tiny.inception(tmp_path))
    found = result(*words, real, *inception, "--metrics", "is", "kid", "fid", "--splits", 2)["scores"]
    assert set(found) == {"is", "is_std", "kid", "kid_std", "fid_40px"}
    assert found["is"] >= 1 and found["fid_40px"] > 0
    same = result(*words, run_folder / "img")
    assert same["scores"]["effnet_fd"] == pytest.approx(0, abs=1e-6)
    assert result(*words, make_run(tmp_path / "b", 9))["scores"]["effnet_fd"] > 0.1


def test_what_is_refused(refused: Refused, run_folder: Path, real: Path, tmp_path: Path) -> None:
    fake, ref = ("--fake_dir", run_folder), ("--ref_dir", real)
    prompts, empty, nowhere = tmp_path / "prompts.txt", tmp_path / "empty", tmp_path / "no"
    prompts.write_text("one\ntwo\n")
    empty.mkdir()
    clip = ("eval_fid_clip", *fake, "--clip_path", tmp_path)
    two = (*clip, "--how_many", 2)
    for says, *words in (
        ("5000: 6 of 6 prompts", *clip),
        ("6 images", "eval_quality", *fake, *ref, "--how_many", 7),
        ("7 images", "eval_quality", *fake, *ref, "--ref_how_many", 8),
        ("compares with other images", "eval_quality", *fake),
        ("it is no folder", "eval_quality", "--fake_dir", nowhere, *ref),
        ("give --fake_dir", "eval_prec_recall"),
        ("0 images", "eval_quality", *fake, "--how_many", 0),
        ("there is no folder", "eval_quality", *fake, *ref, "--scores", nowhere / "scores.json"),
        ("holds no .png", "eval_quality", "--fake_dir", empty, *ref),
        ("4 of 6 images in", *two, "--caption_path", prompts),
        ("are of no prompt (2.png, 3.png", *two, "--caption_path", prompts),
    ):
        assert says in refused(*words)
    images, record = run_folder / "img", run_folder / "scores.json"
    (images / "prompt_1.png").write_bytes(b"")
    assert "are both of prompt '1'" in refused(*two)
    (images / "prompt_1.png").unlink()
    (images / "3.png").write_bytes(b"no image")
    assert "3.png: cannot be read" in refused("eval_quality", *fake, *ref)
    for damaged in ("[1]", '{"0": {"prompt": 5}}'):
        (run_folder / "global_statistics_0_10000.json").write_text(damaged)
        assert "name the prompts by --prompt_path" in refused("eval_hpsv2", "--image_path", run_folder)
    record.write_text('[{"scores": ')
    assert "is damaged" in refused("eval_quality", *fake, *ref)
    assert record.read_text() == '[{"scores": '


def _append(path: Path, number: int) -> None:
    scores.append(path, {"n": number})


def test_scores_of_programs_at_once_all_get_in(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, get_context("fork")) as pool:
        list(pool.map(partial(_append, tmp_path / "scores.json"), range(24)))
    assert sorted(entry["n"] for entry in scores.read(tmp_path / "scores.json")) == list(range(24))
    assert {path.name for path in tmp_path.iterdir()} == {"scores.json", ".scores.json.lock"}
