"""SimpleAR's pixels: its decoder is TorchScript, which runs only where the user trusts it. A tiny one, whose
pixels are the codes' own numbers, stands in for Cosmos' decoder.jit."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from adt_tree.errors import UserError
from models.codecs.cosmos import LEVELS, code_vectors
from models.codecs.vq import to_uint8
from models.family import LoadOptions
from storage.run_folder import read_records
from tests.conftest import Refused, Result, Run
from tests.support.checkpoints import Checkpoints, Tiny, load

TRUSTED = LoadOptions(target_size=64, trust_torchscript=True)


class Cells(nn.Module):
    """Paints every cell of 16 x 16 pixels in three of its code's digits."""

    def __init__(self, frames: int) -> None:
        super().__init__()
        self.frames = frames

    def forward(self, codes: Tensor) -> Tensor:
        """[B, 1, h, w] -> [B, 3, frames, 16 h, 16 w] in bf16."""
        digits = torch.stack((codes % 8, codes // 8 % 8, codes // 64 % 8), dim=1) / 3.5 - 1
        wide = digits.repeat_interleave(16, dim=3).repeat_interleave(16, dim=4)
        return wide.repeat_interleave(self.frames, dim=2).to(torch.bfloat16)


def write(path: Path, frames: int = 1) -> None:
    """Writes a decoder of one frame, as SimpleAR's is, or of more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(Cells(frames)), str(path))


@pytest.fixture(scope="module")
def files(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Returns a checkpoint with the decoder beside it, where get_ckpts.sh puts it."""
    tiny = checkpoints["simplear"].copied(tmp_path_factory.mktemp("simplear") / "copy")
    write(tiny.path.parent / "Cosmos-1.0-Tokenizer-DV8x16x16" / "decoder.jit")
    return tiny


def test_code_vectors() -> None:
    """Their numbers are (digit - half) / half, as in the published quantiser."""
    vectors, code = code_vectors(torch.device("cpu")), 3 + 8 * (7 + 8 * (4 + 8 * (2 + 5 * (0 + 5 * 4))))
    assert vectors.shape == (64_000, 6) and len(vectors.unique(dim=0)) == 64_000
    assert vectors[code].tolist() == [-0.25, 0.75, 0, 0, -1, 1] and vectors[0].tolist() == [-1] * 6
    assert vectors.max() == 1 and torch.prod(torch.tensor(LEVELS)) == 64_000


def test_pixels_need_trust(files: Tiny, run: Run, result: Result, tmp_path: Path) -> None:
    """Without it the codes are stored, and the file is not opened. With it the same command makes the pixels
    of these codes."""
    words = ["generate_images", *files.words(), "--prompt", "sun", "--num_images", 2, "--method", "ar"]
    words += ["--output_dir", tmp_path / "o"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.jit, "load", None)
        status, out, err = run(*words)
        assert status == 0 and "--trust_torchscript" in out, err
    codes = np.array(list(read_records(tmp_path / "o"))[1].codes)
    assert codes.shape == (16,) and not (tmp_path / "o" / "img" / "1.png").exists()
    assert run("report", tmp_path / "o", "--check")[0] == 0
    assert result(*words, "--trust_torchscript")["skipped"] == 0
    digits = np.stack((codes % 8, codes // 8 % 8, codes // 64 % 8), axis=-1).reshape(4, 4, 3)
    expected = to_uint8(torch.from_numpy(digits / 3.5 - 1).bfloat16().float().permute(2, 0, 1)[None], True)[0]
    with Image.open(tmp_path / "o" / "img" / "1.png") as image:
        assert image.size == (64, 64) and np.array_equal(np.asarray(image)[8::16, 8::16], expected)


def test_what_is_refused(files: Tiny, refused: Refused, tmp_path: Path) -> None:
    """Commands that show pixels need the option, and a decoder that is missing or another file is named."""
    for command in ("demo", "serve"):
        assert "--trust_torchscript" in refused(command, *files.words())
    copy, trust = files.copied(tmp_path / "copy"), ("--trust_torchscript", "--output_dir", tmp_path / "o")
    words = ["generate_images", *copy.words(), "--prompt", "sun", "--method", "ar", *trust]
    path = copy.path.parent / "Cosmos-1.0-Tokenizer-DV8x16x16" / "decoder.jit"
    torch.save({"weight": torch.ones(1)}, path)
    assert f"{path}: is damaged" in refused(*words)
    path.write_text("<!doctype html>")
    assert f"{path}: is a web page" in refused(*words)
    path.unlink()
    assert "--vq_path" in refused(*words)
    assert "--target_size 72" in refused(*words, "--target_size", 72)


def test_a_model_with_pixels_is_like_any_other(files: Tiny, result: Result) -> None:
    model = load("simplear", files.path, options=TRUSTED)
    assert model.image(list(range(16))).size == (64, 64) and not model.missing_for_pixels
    assert torch.equal(model.codebook, code_vectors(torch.device("cpu")))
    words = ("check_ckpts", "simplear", "--model_path", files.path, "--trust_torchscript")
    assert result(*words)["ok"]
    with pytest.raises(UserError, match="encoder"):
        model.codec.encode(torch.zeros(1, 3, 64, 64))
