"""LlamaGen from its files: both layouts, texts and classes, every exact method, what is wrong with a file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

import main
from adt_tree.method import Method, build
from adt_tree.policy import AdaptiveTree, TreeShape
from adt_tree.roles import Request
from models.errors import CheckpointError
from models.layouts.captions import clean
from models.layouts.llamagen_prompts import TextPrompts
from models.layouts.t5 import T5Text
from models.model import Model
from models.spec import LoadOptions
from tests import tiny_llamagen
from tests.loading import load
from tests.methods import method_of

LOAD = LoadOptions()
LAW = {"top_k": 0, "top_p": 1.0, "cfg": 3.0}
TEXTS = ["a red heart", "pizza", "a blue cat face with a red hat on the sea with the sun", "sun", "the sea"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HF-style checkpoint with everything beside it."""
    return tiny_llamagen.build(tmp_path_factory.mktemp("llamagen") / "LlamaGen-T2I")


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class-conditional .pt."""
    return tiny_llamagen.build(tmp_path_factory.mktemp("llamagen") / "c2i", wrapper="model", cls_token_num=1)


def opened(path: Path, drafter: bool = True, name: str = "llamagen", options: LoadOptions = LOAD) -> Model:
    """The model in a path."""
    return load(name, str(path), None, "fp32", "cpu", drafter, options)


def draw(model: Model, method: Method, slots: int, texts: list[str]) -> list[list[int]]:
    """Codes of the texts, in their order."""
    requests = [Request(str(n), o, 100 + n) for n, o in enumerate(model.encode_all(texts))]
    arm = build(model, method, slots, max(model.prompt_length(r.prompt) for r in requests))
    images = sorted(arm.decode(requests), key=lambda image: int(image.name))
    return [image.codes for image in images]


def methods(law: dict[str, float]) -> list[Method]:
    """Every kind of exact method."""
    return [
        method_of(**law, shape=TreeShape(4, 3, 10)),
        method_of(**law, static="mc_sim_7b_63"),
        method_of(**law, adapt=AdaptiveTree()),
        method_of(**law, shape=TreeShape(6, 3, 12), drafter="self-draft"),
        method_of(**law, shape=TreeShape(6, 3, 12), drafter="hybrid"),
    ]


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_exact_method_draws_the_image_of_plain_decoding(
    folder: Path, temperature: float, slots: int
) -> None:
    """Under guidance, prompts of 2 to 12 rows, one of them longer than is taken."""
    model, law = opened(folder), {**LAW, "temperature": temperature}
    plain = draw(model, method_of(**law), 1, TEXTS)
    assert len({tuple(codes) for codes in plain}) > 3
    for method in methods(law):
        assert draw(model, method, slots, TEXTS) == plain, method


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_classes_too(classes: Path, temperature: float) -> None:
    model, law = opened(classes), {**LAW, "temperature": temperature}
    labels = ["0", "3", "6", "2"]
    plain = draw(model, method_of(**law), 3, labels)
    assert len({tuple(codes) for codes in plain}) == len(labels)
    for method in methods(law):
        assert draw(model, method, 3, labels) == plain, method


@pytest.mark.parametrize("wrapper", ["model", "module", "state_dict", ""])
def test_the_original_file_holds_the_same_model(folder: Path, tmp_path: Path, wrapper: str) -> None:
    """Whatever its weights lie under; codes, pictures and text features are the folder's."""
    theirs, ours = opened(tiny_llamagen.build(tmp_path / "pt", wrapper=wrapper)), opened(folder)
    for module in ("decoder", "codec", "drafter_net"):
        got, expected = (getattr(model, module).state_dict() for model in (theirs, ours))
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in got)
    method = method_of(**LAW, temperature=0.0)
    assert draw(theirs, method, 1, TEXTS[:2]) == draw(ours, method, 1, TEXTS[:2])


def test_other_sizes(tmp_path: Path) -> None:
    """Shared keys and values, other widths, depths and rasters, from the files alone."""
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 3,
             "block_size": 36, "cls_token_num": 5}  # fmt: skip
    law = {**LAW, "temperature": 1.0}
    drawn = []
    for wrapper in (None, "model"):
        model = opened(tiny_llamagen.build(tmp_path / f"x{wrapper}", 3, wrapper, **sizes))
        assert (model.grid.size, model.decoder.config.num_kv_heads) == (36, 2)
        drawn.append(draw(model, method_of(**law), 1, TEXTS[:2]))
        assert draw(model, methods(law)[0], 2, TEXTS[:2]) == drawn[-1]
    assert drawn[0] == drawn[1]


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
def test_the_text_encoder_goes_when_prompts_are_encoded(folder: Path, keep: bool) -> None:
    model = opened(folder, drafter=False, options=LoadOptions(keep_text_encoder=keep))
    assert isinstance(model.prompts, TextPrompts) and isinstance(model.prompts.text, T5Text)
    model.encode_all(TEXTS)
    assert (model.prompts.text._encoder is not None) == keep


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
    folder: Path, tmp_path: Path, damage: Callable[[Path], str], capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(folder, tmp_path / "inner" / "copy")
    message = damage(copy)
    capsys.readouterr()
    words = ["--model", "llamagen", "--model_path", str(copy), "--drafter_type", "eagle", "--prompt", "sun"]
    assert main.main(["generate_images", *words, "--output_dir", str(tmp_path / "out")]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert message in line and line.startswith("error: ")


def test_unknown_widths_need_the_number_of_heads(tmp_path: Path) -> None:
    path = tiny_llamagen.build(tmp_path / "x", wrapper="")
    (path.parent / "config.json").unlink()
    with pytest.raises(CheckpointError, match="put a config.json with n_head beside it"):
        opened(path)


def test_class_conditional_files_need_a_size(classes: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(classes.parent, tmp_path / "copy")
    (copy / "config.json").write_text('{"n_head": 4}')
    with pytest.raises(CheckpointError, match="give --target_size 256 or 384"):
        opened(copy / "t2i.pt")
    assert opened(copy / "t2i.pt", options=LoadOptions(target_size=12)).grid.size == 36


def test_command_line(
    folder: Path, classes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text and two classes leave their images; options of the other kind are refused."""

    def run(*words: str) -> tuple[int, str]:
        given = ["generate_images", "--precision", "fp32", "--output_dir", str(tmp_path / "out"), *words]
        status = main.main(given)
        return status, capsys.readouterr().err

    text, label = (
        ("--model", "llamagen", "--model_path", str(folder)),
        ("--model", "llamagen", "--model_path"),
    )
    assert run(*text, "--prompt", "a red heart", "--num_images", "1")[0] == 0
    with Image.open(tmp_path / "out" / "img" / "0.png") as image:
        assert image.size == (8, 8)
    refused = {
        (*text, "--class_labels", "1,2"): "draws texts; give --prompt",
        (*text, "--class_labels", "1,2", "--prompt", "sun"): "choose one",
        (*text, "--tokenizer_base_path", "x"): "belongs to --model anole or lumina_mgpt",
        (*text, "--target_size", "16"): "this model draws 8 px and no other size",
        (*label, str(classes), "--prompt", "sun"): "give ids from 0 to 6 by --class_labels",
        (*label, str(classes), "--class_labels", "7"): "give ids from 0 to 6 by --class_labels",
        (*label, str(classes), "--class_labels", "1,1"): "stands twice",
        (*label, str(classes), "--class_labels", "1;2"): "is not a list of class ids",
        ("--vq_path", "x"): "belongs to --model llamagen or llamagen2",
    }
    for words, message in refused.items():
        status, line = run(*words)
        assert status == 2 and message in line, line
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    measured = ("--drafter_type", "eagle", "--drafter_alignment", "auto")
    status, line = run(*label, str(classes), "--class_labels", "3,5", *measured)
    assert status == 0 and "drafter alignment: " in line
    assert sorted(path.name for path in (tmp_path / "out" / "img").iterdir()) == ["3.png", "5.png"]
