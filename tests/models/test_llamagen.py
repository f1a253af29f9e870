"""LlamaGen from its files: both layouts, texts and classes, text features, captions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adt_tree.errors import CheckpointError
from adt_tree.grid import Grid
from adt_tree.settings import Sampling
from models.codecs.vq import VQConfig
from models.family import LoadOptions
from models.layouts.captions import clean
from models.layouts.llamagen_prompts import T5Text
from tests.conftest import Refused, Result, Run
from tests.support import tiny_llamagen
from tests.support.checkpoints import Checkpoints, load
from tests.support.decoding import CPU
from tests.support.methods import check_exact

TEXTS = ["a red heart", "pizza", "a blue cat face with a red hat on the sea with the sun", "sun", "the sea"]


@pytest.fixture(scope="module")
def folder(checkpoints: Checkpoints) -> Path:
    """Returns an HF-style checkpoint with all files beside it."""
    return checkpoints["llamagen"].path


def test_other_sizes(tmp_path: Path) -> None:
    """Shared keys and values, other widths, depths and rasters follow from the files alone, and both layouts
    give the same images."""
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 3,
             "block_size": 36, "cls_token_num": 5}  # fmt: skip
    codes = []
    for wrapper in (None, "model"):
        model = load("llamagen", tiny_llamagen.build(tmp_path / f"x{wrapper}", 3, wrapper, **sizes))
        assert (model.grid.size, model.decoder.config.num_kv_heads) == (36, 2)
        codes.append(check_exact(model, TEXTS[:2], Sampling(), methods=["eagle-2"]))
    assert codes[0] == codes[1]


def test_text_features(folder: Path) -> None:
    """The features are those of the padded and masked batch of the published code, and long texts are cut
    off."""
    from transformers import T5EncoderModel

    home = folder / "t5" / "flan-t5-xl"
    text = T5Text(home, tiny_llamagen.FEATURES, tiny_llamagen.ROWS, CPU)
    ids = text.tokenizer.encode(clean(TEXTS[0])).ids
    assert ids == [tiny_llamagen.WORDS.index(word) for word in ("a", "red", "heart", "</s>")]
    padded = torch.tensor([ids + [0] * (tiny_llamagen.ROWS - len(ids))])
    theirs = T5EncoderModel.from_pretrained(home, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(padded, attention_mask=(padded > 0).long()).last_hidden_state[0, : len(ids)]
    torch.testing.assert_close(text.encode(TEXTS[0].upper())[0], expected, atol=1e-5, rtol=1e-5)
    assert len(text.encode(TEXTS[2])[0]) == tiny_llamagen.ROWS


@pytest.mark.parametrize("keep", [False, True])
def test_the_text_encoder_is_freed_once_prompts_are_encoded(
    folder: Path, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, load_encoder = [], T5Text._load
    monkeypatch.setattr(T5Text, "_load", lambda self: (loaded.append(self), load_encoder(self))[1])
    model = load("llamagen", folder, options=LoadOptions(keep_text_encoder=keep))
    for _ in range(2):
        model.encode_all(TEXTS)
    assert len(loaded) == (1 if keep else 2)


CAPTIONS = {
    "A Photo of a CAT": "a photo of a cat",
    "see https://example.com/a?b=1 now": "see now",
    "<b>bold</b> &amp; fine": "bold fine",
    "caf%C3%A9+noir": "caf\u00e9 noir",
    "it\u2019s \u201cnice\u201d \u2014 really": 'it\'s "nice" - really',
    "red-and_blue_and-green words": "red and blue and green words",
    "wallpaper 1920x1080 free download": "wallpaper",
    "@someone draws img_001.png": "draws",
    "one.two": "one. two",
    "ends here... (maybe)": "ends here maybe",
}


@pytest.mark.parametrize("caption", CAPTIONS)
def test_captions_are_cleaned(caption: str) -> None:
    assert clean(caption) == CAPTIONS[caption]


def test_a_size_given_to_a_file_of_classes(checkpoints: Checkpoints, tmp_path: Path) -> None:
    files = checkpoints["llamagen classes"].copied(tmp_path / "copy")
    (files.path.parent / "config.json").write_text('{"n_head": 4}')
    assert load("llamagen", files.path, options=LoadOptions(target_size=12)).grid.size == 36


SIZED = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 64, "num_hidden_layers": 1}
VQ = VQConfig(32, (1, 1, 1, 1, 1), 1, 8, 32, tiny_llamagen.CODES, 256, (16,))  # with cells of 16 pixels


def test_the_size_in_a_published_name(run: Run, refused: Refused, result: Result, tmp_path: Path) -> None:
    """Files of 256 and 384 px have the same shapes. B's head count follows from its width."""
    path = tiny_llamagen.build(tmp_path / "x", 0, "model", VQ, cls_token_num=1, **SIZED)
    (path.parent / "config.json").unlink()
    for name, side in (("c2i_L_384.pt", 24), ("c2i_B_256.pt", 16)):
        path = path.rename(path.with_name(name))
        assert load("llamagen", path, need_drafter=False).grid == Grid(side, side)
    words = ["--model", "llamagen", "--model_path", path]
    assert result("check_ckpts", "llamagen", "--model_path", path)["ok"]
    images = ["generate_images", *words, "--class_labels", "5", "--precision", "fp32", "--output_dir"]
    for method in ("ar", "self-draft"):
        assert run(*images, tmp_path / method, "--method", method)[0] == 0
    pictures = [(tmp_path / method / "img" / "5.png").read_bytes() for method in ("ar", "self-draft")]
    assert pictures[0] == pictures[1]
    assert "--target_size 384" in refused(*images, tmp_path / "o", "--method", "ar", "--target_size", 384)
    with pytest.raises(CheckpointError, match="target_size 256 or 384"):
        load("llamagen", path.rename(path.with_name("mine.pt")), need_drafter=False)
