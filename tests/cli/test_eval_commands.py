"""The commands of quality metrics on tiny checkpoints: scores, matching of images and prompts, the record,
refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from eval.metrics import networks, pictures
from eval.metrics.clip import aesthetic, load_clip
from eval.metrics.distances import frechet
from eval.metrics.measures import MEASURES
from eval.metrics.scores import newest_scores
from models.checkpoint.files import read_json_lines
from tests.conftest import Refused, Result, Run
from tests.support import metric_checkpoints as tiny
from tests.support.metric_checkpoints import narrow

__all__ = ["narrow"]  # a fixture that every test uses
from tests.support.decoding import CPU

TEXTS = ("a cat", "photo", "a b c", "cat photo", "x y", "z")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Returns the folder of a run of six prompts, as generate_images leaves it, with a picture beside its
    images."""
    folder = tmp_path / "run"
    (folder / "img").mkdir(parents=True)
    for row in range(6):
        tiny.picture(48 + 3 * row, 40 + row).save(folder / "img" / f"{row}.png")
    tiny.picture(20, 20).save(folder / "contact_sheet.png")
    records = {str(row): {"prompt": text, "ann_id": row} for row, text in enumerate(TEXTS)}
    (folder / "global_statistics_0_10000.json").write_text(json.dumps(records))
    return folder


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """Returns a folder of seven reference pictures in subfolders by class."""
    for row in range(7):
        path = tmp_path / "real" / f"class{row % 2}" / f"{row}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        tiny.picture(40 + row, 50 + 2 * row).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(path)
    return tmp_path / "real"


def test_fid_and_clip_score(result: Result, run_folder: Path, real: Path, tmp_path: Path) -> None:
    """Both scores equal those computed image by image, and the entry names the files that they are computed
    from."""
    folder, inception = tiny.clip(tmp_path), tiny.inception(tmp_path)
    entry = result(
        "eval_fid_clip", "--fake_dir", run_folder, "--ref_dir", real, "--how_many", 5, "--eval_res", 32,
        "--clip_path", folder, "--inception_path", inception, "--batch_size", 3, "--device", "cpu",
    )  # fmt: skip
    fakes = [run_folder / "img" / f"{row}.png" for row in range(5)]
    net, _ = networks.inception(inception, 32, CPU)
    fid = frechet(*(networks.features(net, paths, 1) for paths in (fakes, sorted(real.rglob("*.jpg")))))
    assert entry["scores"]["fid_32px"] == pytest.approx(fid, rel=1e-3)
    clip = load_clip(str(folder), "--clip_path", CPU)
    cosines = []
    for path, text in zip(fakes, TEXTS, strict=False):
        pixels = clip.network.prepare(pictures.reference_crop(Image.open(path), 32))[None]
        words = clip.model.encode_text(clip.tokenize([f"A photo depicts {text}"]))
        cosines.append(F.cosine_similarity(clip.model.encode_image(pixels), words).item())
    assert entry["scores"]["clip_score"] == pytest.approx(np.mean(cosines), abs=1e-5)
    assert entry["images"] == 5 and entry["real_images"] == 7
    assert set(entry["weights"]) == {"clip", "inception"} and entry["commit"] and entry["device"]
    assert read_json_lines(run_folder / "scores.jsonl", "") == [entry]


def test_pairs_go_by_name_and_not_by_rank(run_folder: Path, tmp_path: Path, refused: Refused) -> None:
    """If an image is missing, the others keep their prompts; a score over all prompts is refused."""
    (run_folder / "img" / "1.png").unlink()
    pairs = pictures.pairs_of(str(run_folder), None, 5, ("", ""))
    assert [(p.text, p.path.stem) for p in pairs] == [(TEXTS[row], str(row)) for row in (0, 2, 3, 4, 5)]
    for count in (-1, 6):
        line = refused("evaluate", "--metrics", "clip", "--fake_dir", run_folder, "--how_many", count)
        assert f"--how_many {count}" in line and "5 of 6" in line


@pytest.mark.parametrize("name", ["prompt_3.png", "903.png", "image_3.png", "0903.jpg"])
def test_file_names_of_the_published_codes(tmp_path: Path, name: str) -> None:
    """LANTERN names images by the row of the prompt file, ADT-Tree by the annotation."""
    notes = [{"id": 900 + n, "image_id": n, "caption": text} for n, text in enumerate(TEXTS)]
    source, folder = tmp_path / "coco.json", tmp_path / "images"
    source.write_text(json.dumps({"annotations": notes, "images": [{"id": n} for n in range(6)]}))
    folder.mkdir()
    tiny.picture(8, 8).save(folder / name)
    (pair,) = pictures.pairs_of(str(folder), str(source), 1, ("--fake_dir", "--caption_path"))
    assert pair.text == TEXTS[3]


def test_hps(result: Result, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The score is the mean over whole images, prepared one at a time. No words are put before the
    prompts."""
    name, path = tiny.hps(tmp_path)
    monkeypatch.setattr("eval.metrics.measures.HPS_CLIP", name)
    entry = result("eval_hpsv2", "--image_path", run_folder, "--hps_path", path, "--how_many", 4)
    clip, cosines = load_clip(name, "--hps_path", CPU, path), []
    mean, std = (torch.tensor(clip.model.visual.preprocess_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    for row in range(4):
        pixels = pictures.long_side(Image.open(run_folder / "img" / f"{row}.png"), 32) / 255
        image = clip.model.encode_image(((pixels - mean) / std)[None])
        cosines.append(F.cosine_similarity(image, clip.model.encode_text(clip.tokenize([TEXTS[row]]))).item())
    assert entry["scores"]["hpsv2"] == pytest.approx(np.mean(cosines), abs=1e-6) and entry["images"] == 4


def test_scores_that_cannot_be_stored_are_printed(
    run: Run, run_folder: Path, real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's folder is read-only, the place of the scores is a folder, or that of the features is none."""
    (tmp_path / "folder").mkdir()
    score = ("eval_quality", "--fake_dir", run_folder, "--ref_dir", real)
    recall = ("eval_prec_recall", "--vgg_path", tiny.vgg(tmp_path), "--fake_dir", run_folder)
    with monkeypatch.context() as patch:

        def read_only(path: Path, mode: str = "r", *, opened: Any = Path.open, **more: Any) -> Any:
            if mode == "ab":
                raise OSError(30, "Read-only file system", str(path))
            return opened(path, mode, **more)

        patch.setattr(Path, "open", read_only)
        read_only_run = run(*score)
    features = ("--ref_dir", real, "--fname_precalc", tmp_path / "none" / "real.safetensors")
    for status, out, err in (
        read_only_run, run(*score, "--scores", tmp_path / "folder"), run(*recall, *features)
    ):  # fmt: skip
        assert status == 0 and json.loads(out.splitlines()[-1])["scores"]
        assert err.startswith("warning: what was computed is not stored: ") and err.count("\n") == 1


def test_quality(result: Result, run_folder: Path, real: Path, tmp_path: Path) -> None:
    fakes, clip = sorted((run_folder / "img").iterdir()), tiny.clip(tmp_path)
    head, inception = tiny.aesthetic(tmp_path, 24)[1], tiny.inception(tmp_path)
    words = ("evaluate", "--fake_dir", run_folder, "--ref_dir", real, "--metrics")
    places = ("--aesthetic_clip", clip, "--aesthetic_path", head, "--inception_path", inception)
    entry = result(*words, "aesthetic", "is", "kid", "fid", *places, "--eval_res", 40, "--splits", 2)
    values = entry["scores"]
    assert set(values) == {"aesthetic", "is", "is_std", "kid", "kid_std", "fid_40px"}
    network = aesthetic(load_clip(str(clip), "--clip_path", CPU), head)
    assert values["aesthetic"] == pytest.approx(networks.features(network, fakes, 1).mean().item(), abs=1e-5)
    assert values["is"] >= 1 and values["fid_40px"] > 0
    other = result(*words, "effnet_fd")
    same = result("eval_quality", "--image_path", run_folder, "--ref_dir", run_folder / "img")
    assert abs(same["scores"]["effnet_fd"]) < 1e-3 < 0.1 < other["scores"]["effnet_fd"]
    assert read_json_lines(run_folder / "scores.jsonl", "") == [entry, other, same]


def test_reference_pictures_are_all_that_pillow_reads(
    result: Result, run: Run, run_folder: Path, real: Path, tmp_path: Path
) -> None:
    """Links are followed, a folder twice at most; img/ is a folder like others, unless it is a run's. What is
    skipped is named."""
    (tmp_path / "elsewhere").mkdir()
    for name in "a.bmp B.TIF c.gif d.jfif e.WebP f.JPG".split():
        tiny.picture(40, 40).convert("RGB").save(tmp_path / "elsewhere" / name)
    (real / "class2").symlink_to(tmp_path / "elsewhere")
    (real / "class3").symlink_to(tmp_path / "elsewhere")
    (real / "class1" / "up").symlink_to(real)
    (real / "img").mkdir()
    for folder in (".ipynb_checkpoints", ".thumbnails", "__MACOSX", "class1/@eaDir"):
        (real / folder).mkdir()
        tiny.picture(9, 9).save(real / folder / "copy.png")
    for name in ("img/10.png", "9.png", "._9.png"):
        tiny.picture(41, 42).save(real / name)
    (real / "class0" / "notes.txt").touch()
    words = ("evaluate", "--metrics", "effnet_fd", "--fake_dir", run_folder, "--ref_dir")
    status, out, _ = run(*words, real)
    assert status == 0 and json.loads(out.splitlines()[-1])["real_images"] == 7 + 6 + 2
    assert f"{real}: 15 pictures; 6 skipped: ._9.png, .ipynb_checkpoints, .thumbnails and 3 more" in out
    assert result(*words, run_folder)["real_images"] == 6
    (real / "class0" / "gone.png").symlink_to(tmp_path / "nowhere")
    assert "gone.png" in run(*words, real)[2]


def test_a_score_that_is_not_finite_is_null(
    run: Run, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line is JSON for readers that take no NaN, and so is the record."""
    monkeypatch.setitem(MEASURES, "effnet_fd", lambda *_: {"effnet_fd": float("nan"), "x": 1.5})
    status, out, _ = run("eval_quality", "--image_path", run_folder, "--ref_dir", run_folder)
    line, record = out.splitlines()[-1], (run_folder / "scores.jsonl").read_text()
    for text in (line, record):
        assert json.loads(text, parse_constant=pytest.fail)["scores"] == {"effnet_fd": None, "x": 1.5}
    assert status == 0 and newest_scores(run_folder / "scores.jsonl") == {"x": 1.5}


def test_precision_and_recall_with_stored_features(
    result: Result, refused: Refused, run: Run, run_folder: Path, real: Path, tmp_path: Path
) -> None:
    vgg, store = tiny.vgg(tmp_path), tmp_path / "real.safetensors"
    plain, fake = ("eval_prec_recall", "--vgg_path", vgg), ("--fake_dir", run_folder)
    storing = (*plain, "--fname_precalc", store)
    assert run(*storing, "--ref_dir", real)[0] == 0 and store.is_file()
    entry = result(*storing, *fake, "--k", 2)
    assert (entry["images"], entry["real_images"]) == (6, 7)
    assert entry["scores"] == result(*plain, *fake, "--ref_dir", real, "--k", 2)["scores"]
    same = result(*plain, *fake, "--ref_dir", run_folder)  # of which img/ alone is read
    assert same["scores"] == {"precision": 1.0, "recall": 1.0} and same["real_images"] == 6
    fewer = result(*storing, *fake, "--num_samples", 5, "--k", 1)
    assert (fewer["images"], fewer["real_images"]) == (5, 5)
    assert "--k 6" in refused(*storing, *fake, "--k", 6)
    assert "--ref_dir" in refused(*storing, *fake, "--ref_dir", real)
    weights = torch.load(vgg, weights_only=True)
    torch.save({name: tensor + 1 for name, tensor in weights.items()}, vgg)
    assert str(store) in refused(*storing, *fake)
    store.write_bytes(b"damaged")
    assert str(store) in refused(*storing, *fake)
    torch.save({name: tensor * float("nan") for name, tensor in weights.items()}, vgg)
    assert "not finite" in refused(*plain, *fake, "--ref_dir", real)


def test_refusals_name_what_is_wrong(refused: Refused, run_folder: Path, real: Path, tmp_path: Path) -> None:
    prompts, empty, missing = tmp_path / "prompts.txt", tmp_path / "empty", tmp_path / "missing"
    prompts.write_text("one\ntwo\n")
    empty.mkdir()
    clip = ("evaluate", "--metrics", "clip", "--fake_dir", run_folder)
    quality = ("evaluate", "--metrics", "effnet_fd", "--ref_dir", real, "--fake_dir", run_folder)
    for names, words in (
        (("--how_many 5000",), ("eval_fid_clip", "--fake_dir", run_folder, "--ref_dir", real)),
        (("--how_many 7", "6 images"), (*quality, "--how_many", 7)),
        (("--ref_how_many 8", "7 images"), (*quality, "--ref_how_many", 8)),
        (("--splits 9",), (*quality[:2], "is", *quality[5:], "--splits", 9)),
        (("--ref_dir",), ("evaluate", "--metrics", "kid", "--fake_dir", run_folder)),
        (("--fake_dir", str(missing)), (*quality[:-1], missing)),
        (("--fake_dir", str(empty)), (*quality[:-1], empty)),
        (("--scores", str(missing)), (*quality, "--scores", missing / "scores.jsonl")),
        (("2.png", "3.png"), (*clip, "--how_many", 2, "--caption_path", prompts)),
    ):
        line = refused(*words)
        assert all(name in line for name in names), line
    image = run_folder / "img" / "prompt_1.png"
    image.write_bytes(b"")
    line = refused(*clip, "--how_many", 2)
    assert "prompt_1.png" in line and " 1.png" in line
    image.unlink()
    (run_folder / "img" / "3.png").write_bytes(b"no image")
    assert "3.png" in refused(*quality)
    for damaged in ("[1]", '{"0": {"prompt": 5}}'):
        (run_folder / "global_statistics_0_10000.json").write_text(damaged)
        assert "--caption_path" in refused("eval_hpsv2", "--image_path", run_folder)
