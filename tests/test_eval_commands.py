"""The commands of quality metrics on tiny checkpoints: values, pairing by name, counts, the record kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from PIL import Image
from torch.nn import functional as F

from eval.errors import UserError
from eval.metrics import networks, pictures, scores
from eval.metrics.clip import aesthetic, clip_scores, preference_scores
from eval.metrics.pictures import Pair
from tests import metric_checkpoints as tiny
from tests.conftest import Refused, Run

CPU = torch.device("cpu")
TEXTS = ("a cat", "photo", "a b c", "cat photo", "x y", "z")
Command = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries' networks in the widths of the tiny checkpoints."""
    tiny.narrow(monkeypatch)


@pytest.fixture
def command(run: Run) -> Command:
    """A command's status, its last line as JSON and what it wrote to standard error."""

    def call(*words: object) -> tuple[int, dict[str, Any], str]:
        status, out, err = run(*words)
        last = out.splitlines()[-1] if status == 0 and out else ""
        return status, json.loads(last) if last.startswith("{") else {}, err

    return call


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
        place = tmp_path / "real" / f"class{row % 2}"
        place.mkdir(parents=True, exist_ok=True)
        tiny.picture(40 + row, 50 + 2 * row).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(
            place / f"{row}.jpg"
        )
    return tmp_path / "real"


def test_fid_and_clip_score(command: Command, run_folder: Path, real: Path, tmp_path: Path) -> None:
    clip, inception = tiny.clip(tmp_path), tiny.inception(tmp_path)
    status, entry, err = command(
        "eval_fid_clip", "--fake_dir", run_folder, "--ref_dir", real, "--how_many", 5, "--eval_res", 32,
        "--clip_path", clip, "--inception_path", inception, "--batch_size", 3, "--device", "cpu",
    )  # fmt: skip
    assert status == 0, err
    fakes = [run_folder / "img" / f"{row}.png" for row in range(5)]
    reals = sorted(real.rglob("*.jpg"))
    net, _ = networks.inception(inception, 32, CPU)
    a, b = (networks.features(net, p, 8).double().numpy() for p in (fakes, reals))
    s, t = (np.cov(rows, rowvar=False) + 1e-10 * np.eye(rows.shape[1]) for rows in (a, b))
    root = scipy.linalg.sqrtm(s @ t).real
    fid = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(s + t - 2 * root)
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


def test_pairs_go_by_name_and_not_by_rank(run_folder: Path, tmp_path: Path, command: Command) -> None:
    """With one image gone every other keeps its own prompt; -1 misses it, its number is honoured."""
    clip = tiny.clip(tmp_path)
    (run_folder / "img" / "1.png").unlink()
    pairs = pictures.pairs_of(str(run_folder), None, 5, ("", ""))
    assert [(p.name, p.text, p.path.stem) for p in pairs] == [
        (str(row), TEXTS[row], str(row)) for row in (0, 2, 3, 4, 5)
    ]
    words = ("eval_fid_clip", "--fake_dir", run_folder, "--clip_path", clip, "--how_many")
    for count in (-1, 6):
        status, _, err = command(*words, count)
        assert status == 2 and "5 of 6 prompts have an image, missing are those of 1" in err
    status, entry, err = command(*words, 5)
    assert status == 0 and entry["images"] == 5 and "fid_256px" not in entry["scores"], err


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


def test_hps_and_aesthetic(command: Command, run_folder: Path, tmp_path: Path) -> None:
    clip, hps, head = tiny.clip(tmp_path), tiny.hps(tmp_path), tiny.aesthetic(tmp_path, 24)
    status, entry, err = command(
        "eval_hpsv2", "--image_path", run_folder, "--hps_path", hps, "--clip_path", clip, "--how_many", 4
    )
    assert status == 0, err
    loaded = tiny.loaded_clip(clip)
    pairs = [Pair(str(n), TEXTS[n], run_folder / "img" / f"{n}.png") for n in range(4)]
    alone = [preference_scores(loaded, [pair], 1).item() for pair in pairs]
    assert entry["scores"]["hpsv2"] == pytest.approx(np.mean(alone), abs=1e-6) and entry["images"] == 4
    other = clip_scores(loaded, pairs, 32, "", 2)
    assert abs(float(other.mean()) - np.mean(alone)) > 1e-4, "the preparations differ"
    status, entry, err = command(
        "eval_quality", "--fake_dir", run_folder, "--metrics", "aesthetic", "--clip_path", clip,
        "--aesthetic_path", head, "--batch_size", 4,
    )  # fmt: skip
    assert status == 0, err
    assert [e["command"] for e in scores.read(run_folder / "scores.json")] == ["eval_hpsv2", "eval_quality"]
    paths = sorted((run_folder / "img").iterdir())
    each = networks.features(aesthetic(loaded, head), paths, 1)
    assert entry["scores"]["aesthetic"] == pytest.approx(float(each.mean()), abs=1e-5)


def test_precision_and_recall_with_stored_features(
    command: Command, run_folder: Path, real: Path, tmp_path: Path
) -> None:
    vgg, stored = tiny.vgg(tmp_path), tmp_path / "real.safetensors"
    words = ("eval_prec_recall", "--vgg_path", vgg, "--fname_precalc", stored)
    assert command(*words, "--ref_dir", real)[0] == 0 and stored.is_file()
    status, entry, err = command(*words, "--fake_dir", run_folder, "--k", 2)
    assert status == 0 and (entry["images"], entry["real_images"]) == (6, 7), err
    _, again, _ = command(
        "eval_prec_recall", "--vgg_path", vgg, "--fake_dir", run_folder, "--ref_dir", real, "--k", 2
    )
    assert again["scores"] == entry["scores"] and set(entry["scores"]) == {"precision", "recall"}
    same = command(
        "eval_prec_recall", "--vgg_path", vgg, "--fake_dir", run_folder, "--ref_dir", run_folder / "img"
    )
    assert same[1]["scores"] == {"precision": 1.0, "recall": 1.0}
    _, fewer, _ = command(*words, "--fake_dir", run_folder, "--num_samples", 6)
    assert (fewer["images"], fewer["real_images"]) == (6, 6)
    other = torch.load(vgg, weights_only=True)
    torch.save({name: tensor + 1 for name, tensor in other.items()}, vgg)
    status, _, err = command(*words, "--fake_dir", run_folder)
    assert status == 2 and "made by other weights" in err
    torch.save({name: tensor * float("nan") for name, tensor in other.items()}, vgg)
    words = ("eval_prec_recall", "--vgg_path", vgg, "--ref_dir", real)
    status, _, err = command(*words, "--fake_dir", run_folder)
    assert status == 2 and "its features are not finite" in err


def test_quality_of_inception_and_effnet(
    command: Command, run_folder: Path, real: Path, tmp_path: Path
) -> None:
    words = ("eval_quality", "--fake_dir", run_folder, "--eval_res", 40)
    words += ("--inception_path", tiny.inception(tmp_path))
    status, entry, err = command(*words, "--ref_dir", real, "--metrics", "is", "kid", "fid", "--splits", 2)
    assert status == 0, err
    assert set(entry["scores"]) == {"is", "is_std", "kid", "kid_std", "fid_40px"}
    assert entry["scores"]["is"] >= 1 and entry["scores"]["fid_40px"] > 0
    status, entry, err = command("eval_quality", "--fake_dir", run_folder, "--ref_dir", run_folder / "img")
    assert status == 0 and entry["scores"]["effnet_fd"] == pytest.approx(0, abs=1e-6), err
    status, entry, _ = command(
        "eval_quality", "--fake_dir", run_folder, "--ref_dir", make_run(tmp_path / "b", 9)
    )
    assert status == 0 and entry["scores"]["effnet_fd"] > 0.1


def test_what_is_refused(refused: Refused, run_folder: Path, real: Path, tmp_path: Path) -> None:
    fake = ("--fake_dir", run_folder)
    assert "5000: 6 of 6 prompts" in refused("eval_fid_clip", *fake, "--clip_path", tmp_path)
    assert "6 images" in refused("eval_quality", *fake, "--ref_dir", real, "--how_many", 7)
    assert "7 images" in refused("eval_quality", *fake, "--ref_dir", real, "--ref_how_many", 8)
    assert "compares with other images" in refused("eval_quality", *fake)
    assert "it is no folder" in refused("eval_quality", "--fake_dir", tmp_path / "no", "--ref_dir", real)
    assert "give --fake_dir" in refused("eval_prec_recall")
    assert "0 images" in refused("eval_quality", *fake, "--how_many", 0)
    nowhere = ("--scores", tmp_path / "no" / "scores.json")
    assert "there is no folder" in refused("eval_quality", *fake, "--ref_dir", real, *nowhere)
    (tmp_path / "empty").mkdir()
    assert "holds no .png" in refused("eval_quality", "--fake_dir", tmp_path / "empty", "--ref_dir", real)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    words = ("eval_fid_clip", *fake, "--caption_path", prompts, "--how_many", 2, "--clip_path", tmp_path)
    assert "4 of 6 images" in refused(*words) and "are of no prompt (2.png, 3.png" in refused(*words)
    (run_folder / "img" / "prompt_1.png").write_bytes(b"")
    assert "are both of prompt '1'" in refused("eval_fid_clip", *fake, "--how_many", 2)
    (run_folder / "img" / "prompt_1.png").unlink()
    (run_folder / "img" / "3.png").write_bytes(b"no image")
    assert "3.png: cannot be read" in refused("eval_quality", *fake, "--ref_dir", real)
    for damaged in ("[1]", '{"0": {"prompt": 5}}'):
        (run_folder / "global_statistics_0_10000.json").write_text(damaged)
        assert "name the prompts by --prompt_path" in refused("eval_hpsv2", "--image_path", run_folder)


def test_a_damaged_record_is_left_alone(command: Command, run_folder: Path) -> None:
    (run_folder / "scores.json").write_text('[{"scores": ')
    status, _, err = command("eval_quality", "--fake_dir", run_folder, "--ref_dir", run_folder / "img")
    assert status == 2 and "is damaged" in err
    assert (run_folder / "scores.json").read_text() == '[{"scores": '


def _append(path: Path, number: int) -> None:
    scores.append(path, {"n": number})


def test_scores_of_programs_at_once_all_get_in(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, get_context("fork")) as pool:
        list(pool.map(partial(_append, tmp_path / "scores.json"), range(24)))
    assert sorted(entry["n"] for entry in scores.read(tmp_path / "scores.json")) == list(range(24))
    assert {path.name for path in tmp_path.iterdir()} == {"scores.json", ".scores.json.lock"}


def test_a_runs_maps_are_no_images_to_compare_with(tmp_path: Path) -> None:
    for name in ("img/b/0.png", "img/1.png", "heatmap_0.png", "contact_sheet.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        tiny.picture(8, 8).save(path)
    options = ("--ref_dir", "--num_samples")
    found = pictures.images_of(str(tmp_path), -1, options, deep=True)
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["img/1.png", "img/b/0.png"]
    with pytest.raises(UserError, match="--num_samples 3: --ref_dir .* holds 2 images"):
        pictures.images_of(str(tmp_path), 3, options, deep=True)
