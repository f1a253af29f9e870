"""bench --quality: the AR baseline at other seeds is near the floor of every score, other images are not."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from eval.columns import interval
from eval.metrics.recogniser import GALLERY, Recogniser, write_gallery
from models.registry import EMOJI
from storage.prompts import BENCH_FILE
from tests.conftest import Refused, Result
from tests.support.checkpoints import Checkpoints, load
from tests.support.golden import tensors

SEEDS = 4
PROMPTS = BENCH_FILE.read_text().splitlines()[:8]


def test_recognition_sees_what_it_should() -> None:
    """Stored images of the AR baseline at two seeds, against noise and against images of other prompts."""
    model, stored = load("emoji", need_drafter=False), tensors("quality")
    recognised = Recogniser(EMOJI.target_folder / GALLERY).recognised
    noise = torch.randint(model.num_codes, stored["ar"].shape, generator=torch.Generator().manual_seed(0))
    pixels = {
        name: np.stack([np.asarray(model.image(row)) for row in codes.tolist()])
        for name, codes in {**stored, "noise": noise}.items()
        if not name.endswith("nll")
    }
    found = {name: recognised(images, PROMPTS * SEEDS) for name, images in pixels.items()}
    wrong = recognised(pixels["ar"], (PROMPTS[1:] + PROMPTS[:1]) * SEEDS)
    unknown = recognised(pixels["ar"][:2], ["noto emoji of nothing known", "cat"])
    assert np.mean(found["ar"]) > 0.7 and np.mean(found["noise"]) < 0.2 and np.mean(wrong) < 0.2
    assert unknown == [None, None]


def test_paired_intervals_are_narrower() -> None:
    """Stored values of gsd and of the AR baseline for the same prompts and seeds."""
    ar, gsd = (tensors("quality")[name].numpy() for name in ("ar_nll", "gsd_nll"))

    def width(values: np.ndarray) -> float:
        low, high = interval((values,), np.mean)
        return high - low

    assert width(gsd - ar) < 0.8 * (width(gsd) ** 2 + width(ar) ** 2) ** 0.5
    assert interval((gsd - ar,), np.mean)[0] > 0


@pytest.fixture
def words(checkpoints: Checkpoints, tmp_path: Path) -> list[str]:
    """Returns the words of bench for a tiny checkpoint with a gallery of two originals, of which two of three
    prompts name one."""
    tiny = checkpoints["emoji"].copied(tmp_path / "tiny")
    originals = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)
    write_gallery(tiny.path / GALLERY, originals, ["red heart", "pizza"])
    (tmp_path / "p.txt").write_text("noto emoji of red heart\nfluent emoji of pizza, round\ncat\n")
    fixed = [*tiny.words(), "--prompt", str(tmp_path / "p.txt"), "--output_dir", str(tmp_path / "o")]
    return ["bench", *fixed, "--quality"]


def test_bench(result: Result, words: list[str]) -> None:
    words += "--methods eagle-2 gsd eagle-2-lantern --images_per_prompt 2 --warmup 0".split()
    rows = {(row["method"], row["temperature"]): row for row in result(*words)["rows"]}
    assert len(rows) == 2 * 4 + 1 and ("ar, other seeds", 0.0) not in rows
    floor, ar, eagle = (rows[name, 1.0] for name in ("ar, other seeds", "ar", "eagle-2"))
    for key in ("nll", "recognised"):
        assert ar[key] == eagle[key] and ar[f"{key}_95"] == eagle[f"{key}_95"], key
    assert eagle["nll_over_ar"] == 0 == max(eagle["nll_over_ar_95"])
    assert floor["nll_over_ar"] != 0


def test_a_missing_network_is_refused(
    refused: Refused, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    assert "setup.sh requirements-eval.txt" in refused(*words)
