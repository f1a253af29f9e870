"""LlamaGen from its files: both layouts, texts and classes, text features, what is wrong with a file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from adt_tree.pipeline import Pipeline
from adt_tree.sampling import Sampling
from models.errors import CheckpointError
from models.layouts.captions import clean
from models.layouts.llamagen_prompts import T5Text
from models.model import Model
from models.spec import LoadOptions
from tests import tiny_llamagen
from tests.checkpoints import LOAD, Checkpoints, load
from tests.conftest import Refused, Run
from tests.methods import check_exact

TEXTS = ["a red heart", "pizza", "a blue cat face with a red hat on the sea with the sun", "sun", "the sea"]


@pytest.fixture(scope="module")
def folder(checkpoints: Checkpoints) -> Path:
    """An HF-style checkpoint with everything beside it."""
    return checkpoints["llamagen"].path


def opened(path: Path, options: LoadOptions = LOAD) -> Model:
    """The model in a path, the drafter beside it."""
    return load("llamagen", path, options=options)


@pytest.mark.parametrize("wrapper", ["model", "module", "state_dict", ""])
def test_the_original_file_holds_the_same_model(folder: Path, tmp_path: Path, wrapper: str) -> None:
    """Whatever its weights lie under; codes, pictures and text features are the folder's."""
    theirs, ours = opened(tiny_llamagen.build(tmp_path / "pt", wrapper=wrapper)), opened(folder)
    for module in ("decoder", "codec", "drafter_net"):
        got, expected = (getattr(model, module).state_dict() for model in (theirs, ours))
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in got)
    greedy = Sampling(temperature=0.0)
    codes = [Pipeline(model)(TEXTS[:2], "ar", sampling=greedy).codes for model in (theirs, ours)]
    assert codes[0] == codes[1]


def test_other_sizes(tmp_path: Path) -> None:
    """Shared keys and values, other widths, depths and rasters, from the files alone."""
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 3,
             "block_size": 36, "cls_token_num": 5}  # fmt: skip
    codes = []
    for wrapper in (None, "model"):
        model = opened(tiny_llamagen.build(tmp_path / f"x{wrapper}", 3, wrapper, **sizes))
        assert (model.grid.size, model.decoder.config.num_kv_heads) == (36, 2)
        codes.append(check_exact(model, TEXTS[:2], Sampling(), methods=["eagle-2"]))
    assert codes[0] == codes[1]


def test_text_features(folder: Path) -> None:
    """Those of the padded and masked batch of the published code; loaded late, cut, freed."""
    from transformers import T5EncoderModel

    home = folder / "t5" / "flan-t5-xl"
    text = T5Text(home, tiny_llamagen.FEATURES, tiny_llamagen.ROWS, torch.device("cpu"))
    assert text._encoder is None
    ids = text.tokenizer.encode(clean(TEXTS[0])).ids
    assert ids == [tiny_llamagen.WORDS.index(word) for word in ("a", "red", "heart", "</s>")]
    padded = torch.tensor([ids + [0] * (tiny_llamagen.ROWS - len(ids))])
    theirs = T5EncoderModel.from_pretrained(home, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(padded, attention_mask=(padded > 0).long()).last_hidden_state[0, : len(ids)]
    torch.testing.assert_close(text.encode(TEXTS[0].upper()), expected, atol=1e-5, rtol=1e-5)
    assert len(text.encode(TEXTS[2])) == tiny_llamagen.ROWS
    text.release()
    assert text._encoder is None


@pytest.mark.parametrize("keep", [False, True])
def test_the_text_encoder_goes_when_prompts_are_encoded(
    folder: Path, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, load_encoder = [], T5Text._load
    monkeypatch.setattr(T5Text, "_load", lambda self: (loaded.append(self), load_encoder(self))[1])
    model = opened(folder, LoadOptions(keep_text_encoder=keep))
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


def lose_unconditional(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(tiny_llamagen.FIELDS | {"cls_token_num": 9}))
    return "uncond_embedding has 12 rows, config.json's cls_token_num is 9"


def lose_vq(folder: Path) -> str:
    (folder / "vq_ds16_t2i.pt").unlink()
    return "put it there or say where by --vq_path"


def lose_text_encoder(folder: Path) -> str:
    shutil.rmtree(folder / "t5")
    return "put it there or say where by --text_encoder"


def other_text_encoder(folder: Path) -> str:
    shutil.rmtree(folder / "t5")
    tiny_llamagen.text_encoder(folder / "t5" / "flan-t5-xl", 40)
    return "a text encoder 40 wide, the target takes 24"


def empty_text_encoder(folder: Path) -> str:
    from safetensors.torch import load_file, save_file

    path = folder / "t5" / "flan-t5-xl" / "model.safetensors"
    state = load_file(path)
    del state["encoder.final_layer_norm.weight"]
    save_file(state, path, metadata={"format": "pt"})
    return "the text encoder lacks 1 tensors, first encoder.final_layer_norm.weight"


def truncate_text_encoder(folder: Path) -> str:
    path = folder / "t5" / "flan-t5-xl" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return "the text encoder cannot be loaded"


def other_stage(folder: Path) -> str:
    config = json.loads((folder / "drafter" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tiny_llamagen.FIELDS | {"block_size": 256}))
    (folder / "drafter" / "config.json").write_text(json.dumps(config | {"input_type": "t2i2"}))
    return "give the drafter of its stage"


def wrong_stage(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(tiny_llamagen.FIELDS | {"block_size": 1024}))
    return "say --model llamagen2, not llamagen"


def oblong(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(tiny_llamagen.FIELDS | {"block_size": 18}))
    return "block_size 18: an image is a square of codes"


def plain_llama(folder: Path) -> str:
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in state.items() if "cls_" not in n}, folder / "model.safetensors")
    return "it is no LlamaGen"


DAMAGES = [lose_unconditional, lose_vq, lose_text_encoder, other_text_encoder, empty_text_encoder,
           truncate_text_encoder, other_stage, wrong_stage, oblong, plain_llama]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_inputs_say_what_to_do(
    folder: Path, tmp_path: Path, damage: Callable[[Path], str], refused: Refused
) -> None:
    copy = shutil.copytree(folder, tmp_path / "inner" / "copy")
    message = damage(copy)
    words = ["--model", "llamagen", "--model_path", copy, "--drafter_type", "eagle", "--prompt", "sun"]
    words += ["--drafter_alignment", "published", "--output_dir", tmp_path / "out"]
    assert message in refused("generate_images", *words)


def test_unknown_widths_need_the_number_of_heads(tmp_path: Path) -> None:
    path = tiny_llamagen.build(tmp_path / "x", wrapper="")
    (path.parent / "config.json").unlink()
    with pytest.raises(CheckpointError, match="put a config.json with n_head beside it"):
        opened(path)


def test_class_conditional_files_need_a_size(checkpoints: Checkpoints, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoints["llamagen classes"].path.parent, tmp_path / "copy")
    (copy / "config.json").write_text('{"n_head": 4}')
    with pytest.raises(CheckpointError, match="give --target_size 256 or 384"):
        opened(copy / "t2i.pt")
    assert opened(copy / "t2i.pt", LoadOptions(target_size=12)).grid.size == 36


def test_texts_and_classes_on_the_command_line(run: Run, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A text and two classes leave their images."""
    words = ["--prompt", "a red heart", "--num_images", "1", "--output_dir", tmp_path / "text"]
    assert run("generate_images", *checkpoints["llamagen"].words(), *words)[0] == 0
    with Image.open(tmp_path / "text" / "img" / "0.png") as image:
        assert image.size == (8, 8)
    words = ["--class_labels", "3,5", "--drafter_type", "eagle", "--drafter_alignment", "auto"]
    words += ["--output_dir", tmp_path / "classes"]
    status, _, err = run("generate_images", *checkpoints["llamagen classes"].words(), *words)
    assert status == 0 and "drafter alignment: " in err
    assert sorted(path.name for path in (tmp_path / "classes" / "img").iterdir()) == ["3.png", "5.png"]


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("llamagen", "--class_labels 1,2", "draws texts; give --prompt"),
        ("llamagen", "--class_labels 1,2 --prompt sun", "choose one"),
        ("llamagen", "--tokenizer_base_path x", "belongs to --model anole or lumina_mgpt"),
        ("llamagen", "--target_size 16", "this model draws 8 px and no other size"),
        ("llamagen classes", "--prompt sun", "give ids from 0 to 6 by --class_labels"),
        ("llamagen classes", "--class_labels 7", "give ids from 0 to 6 by --class_labels"),
        ("llamagen classes", "--class_labels 1,1", "stands twice"),
        ("llamagen classes", "--class_labels 1;2", "is not a list of class ids"),
        ("emoji", "--vq_path x", "belongs to --model llamagen or llamagen2"),
    ],
)
def test_options_of_the_other_kind_are_refused(
    refused: Refused, checkpoints: Checkpoints, tmp_path: Path, name: str, words: str, says: str
) -> None:
    fixed = ["generate_images", *checkpoints[name].words(), "--output_dir", tmp_path / "o"]
    assert says in refused(*fixed, *words.split())
