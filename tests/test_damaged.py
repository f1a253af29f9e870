"""Every family's damaged, truncated and mistaken inputs: drawing refuses them in one line that says what to
do; check_ckpts names all that is wrong and reads no weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from adt_tree.errors import CheckpointError
from models.checkpoint.weights import Stored
from models.inspection import inspect
from models.spec import LoadOptions, home_of
from tests import tiny_llamagen
from tests.checkpoints import SIDE, Checkpoints, Tiny, load
from tests.conftest import Refused, Run
from tests.published import edit, rewrite

Damage = Callable[[Tiny], Any]
Check = Callable[..., tuple[list[str], str]]


def part(files: Tiny, name: str) -> Path:
    """A file beside the target, or drafter/... in its drafter; weights: the target's, or their last shard."""
    if name == "weights":
        return files.path if files.path.is_file() else max(files.path.glob("model*.safetensors"))
    folder, _, inner = name.partition("/")
    return files.drafter / inner if folder == "drafter" else home_of(files.path) / name


def gone(*names: str) -> Damage:
    """Without these files or folders."""

    def damage(files: Tiny) -> None:
        for path in (part(files, name) for name in names):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def cut(name: str) -> Damage:
    """A file without its end."""
    return lambda files: part(files, name).write_bytes(part(files, name).read_bytes()[:-200])


def text(name: str, content: str) -> Damage:
    """Another content of a file."""
    return lambda files: part(files, name).write_text(content)


def fields(name: str = "config.json", **values: object) -> Damage:
    """Other values in a JSON file; a dict changes a section."""

    def change(config: dict[str, Any]) -> None:
        for key, value in values.items():
            config[key] = config[key] | value if isinstance(value, dict) and key in config else value

    return lambda files: edit(part(files, name), change)


def swapped(table: tuple[str, ...], one: str, other: str, name: str = "config.json") -> Damage:
    """Two words of a vocabulary in each other's place; table: the keys that lead to it."""

    def change(config: dict[str, Any]) -> None:
        for key in table:
            config = config[key]
        config[one], config[other] = config[other], config[one]

    return lambda files: edit(part(files, name), change)


def tensors(name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    """Other tensors in a file of weights."""

    def damage(files: Tiny) -> None:
        path = part(files, name)
        pickled = path.suffix != ".safetensors"
        content = torch.load(path, weights_only=True) if pickled else load_file(path)
        change(content.get("state_dict", content))
        torch.save(content, path) if pickled else save_file(content, path, metadata={"format": "pt"})

    return damage


def lost(tensor: str, name: str = "weights") -> Damage:
    """Weights without one tensor."""
    return tensors(name, lambda state: state.pop(tensor))


def table(files: Tiny) -> None:
    np.save(part(files, "top_63_indices.npy"), np.zeros((32, 31), dtype=np.uint16))


def no_prompts(state: dict[str, torch.Tensor]) -> None:
    for name in [name for name in state if "cls_" in name]:
        del state[name]


def wide_text_encoder(files: Tiny) -> None:
    shutil.rmtree(files.path / "t5")
    tiny_llamagen.text_encoder(files.path / "t5" / "flan-t5-xl", 40)


def other_stage(files: Tiny) -> None:
    fields(block_size=256)(files)
    fields("drafter/config.json", input_type="t2i2")(files)


FILE = ("llamagen file",)
FOLDERS = ("anole", "lumina_mgpt", "llamagen")
RELEASED = (*FOLDERS, *FILE)
SAVED = ("janus_pro", "emu3")  # by transformers
EMOJI, ANOLE, LLAMAGEN, JANUS, EMU3 = ("emoji",), FOLDERS[:1], FOLDERS[2:], SAVED[:1], SAVED[1:]
VQGAN, T5 = "../chameleon/tokenizer", "t5/flan-t5-xl"
W3 = "layers.1.feed_forward.w3.weight"
NORM = "layers.0.input_layernorm.weight"  # LlamaGen's drafters have none
IDS = ("model", "vocab")  # of a tokenizer

# Checkpoints, what is done to them, words of the line.
DAMAGES: list[tuple[Iterable[str], Damage, tuple[str, ...]]] = [
    (("anole", "lumina_mgpt", *FILE), gone("weights"), ("{weights}", "does not exist")),
    ((*LLAMAGEN, *SAVED), gone("model.safetensors"), ("{home}", "no model.safetensors")),
    ((*RELEASED, *SAVED), cut("weights"), ("{weights}", "truncated", "fetch it again")),
    ((*RELEASED, *SAVED), text("config.json", "[1]"), ("config.json", "not a JSON object", "fetch it again")),
    (RELEASED, fields("drafter/config.json", vocab_size=9, hidden_size=64), ("{drafter}", "another target")),
    (RELEASED, cut("drafter/pytorch_model.bin"), ("pytorch_model.bin", "truncated", "fetch it again")),
    (RELEASED, table, ("top_63_indices.npy has 32 rows", "another codebook", "leave it out")),
    (FOLDERS, fields(intermediate_size=40), ("mlp", "config.json asks for [40, 32]", "fetch it again")),
    (FOLDERS, fields(vocab_size=400), ("config.json asks for [400, 32]", "fetch it again")),
    (("anole", "llamagen"), fields(rope_scaling={"type": "linear"}), ("of type 'linear'",)),
    (("anole", "llamagen"), fields(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), ("'yarn'",)),
    (("anole", "llamagen"), fields(head_dim=16), ("head_dim is 16",)),
    (("anole", "llamagen"), fields(hidden_act="gelu"), ("hidden_act is 'gelu'",)),
    (("anole", "llamagen"), fields(attention_bias=True), ("attention_bias is True",)),
    (EMOJI, swapped(("vocabulary_map",), "IMGIMGBAZ", "IMGIMGJZ"), ("not in the order of their codes",)),
    (EMOJI, swapped(IDS, "<racm3:break>", "<eoss>", "text_tokenizer.json"), ("tokenizer has <racm3:break>",)),
    (EMOJI, fields("text_tokenizer.json", model={"vocab": {"x": 9999}}), ("token ids up to 9999",)),
    (EMOJI, lost(NORM, "drafter/model.safetensors"), (NORM, "give the drafter of this model")),
    (ANOLE, gone("../chameleon"), ("vqgan.ckpt",)),
    (ANOLE, gone(f"{VQGAN}/vqgan.yaml"), ("vqgan.yaml",)),
    (ANOLE, text(f"{VQGAN}/vqgan.yaml", "model: []"), ("does not describe a VQGAN",)),
    (ANOLE, tensors(f"{VQGAN}/vqgan.ckpt", lambda s: s["quantize.embedding.weight"].add_(1)), ("codebook",)),
    (FILE, tensors("weights", lambda s: s.update({W3: torch.zeros(40, 32)})), (W3, "is [40, 32]", "fetch")),
    (FILE, tensors("weights", lambda s: s.update(
        {name: torch.zeros(67, 32) for name in ("tok_embeddings.weight", "output.weight")}
    )), ("67 codes", "VQ decoder has 64", "different models")),
    (FILE, gone("config.json"), ("put a config.json with n_head beside it",)),
    (("llamagen classes",), text("config.json", '{"n_head": 4}'), ("give --target_size 256 or 384",)),
    (LLAMAGEN, fields(cls_token_num=9), ("uncond_embedding has 12 rows", "cls_token_num", "config.json")),
    (LLAMAGEN, gone("vq_ds16_t2i.pt"), ("vq_ds16_t2i.pt", "--vq_path")),
    (LLAMAGEN, gone("t5"), ("flan-t5-xl", "--text_encoder")),
    (LLAMAGEN, wide_text_encoder, ("text encoder", "40 wide", "takes 24")),
    (LLAMAGEN, lost("encoder.final_layer_norm.weight", f"{T5}/model.safetensors"),
        ("the text encoder lacks", "encoder.final_layer_norm.weight")),
    (LLAMAGEN, cut(f"{T5}/model.safetensors"), ("the text encoder cannot be loaded",)),
    (LLAMAGEN, other_stage, ("give the drafter of its stage",)),
    (LLAMAGEN, fields(block_size=1024), ("say --model llamagen2, not llamagen",)),
    (LLAMAGEN, fields(block_size=18), ("block_size 18: an image is a square of codes",)),
    (LLAMAGEN, tensors("weights", no_prompts), ("it is no LlamaGen",)),
    (SAVED, fields(text_config={"intermediate_size": 40}),
        ("mlp.gate_proj.weight", "config.json asks for [40, 32]", "fetch it again")),
    (SAVED, fields(text_config={"num_hidden_layers": -1}), ("config.json", "num_hidden_layers is -1")),
    (SAVED, fields(vq_config=[3]), ("config.json", "vq_config is [3]")),
    (SAVED, gone("tokenizer.json", "tokenizer_config.json"), ("{home}", "no tokenizer.json", "fetch")),
    (SAVED, text("tokenizer.json", "{"), ("{home}", "tokenizer cannot be read")),
    (JANUS, lost("model.generation_head.vision_head.weight"), ("vision_head.weight", "missing", "fetch it")),
    (JANUS, lost("model.vqmodel.decoder.conv_in.weight"), ("decoder.conv_in.weight", "missing", "fetch it")),
    (JANUS, gone("chat_template.jinja"), ("no chat template",)),
    (JANUS, text("chat_template.jinja", "{% for %}"), ("chat template fails",)),
    (JANUS, fields("generation_config.json", pad_token_id=10**6), ("pad_token_id is 1000000",)),
    (JANUS, fields(vq_config={"projection_dim": 48}), ("vq_config.projection_dim is 48",)),
    (EMU3, lost("text_model.lm_head.weight"), ("text_model.lm_head.weight", "is missing", "fetch it again")),
    (EMU3, lost("vqmodel.decoder.conv_in.weight"), ("decoder.conv_in.weight", "missing", "fetch it again")),
    (EMU3, lambda files: edit(files.path / "config.json", lambda c: c["vocabulary_map"].pop("<|extra_200|>")),
        ("<|extra_200|> is missing",)),
    (EMU3, swapped(("vocabulary_map",), "<|visual token 000003|>", "<|visual token 000004|>"),
        ("out of order",)),
    (EMU3, fields(vocabulary_map={"<|extra_200|>": 5}), ("the tokenizer has <|extra_200|> at",)),
]  # fmt: skip
CASES = [
    pytest.param(name, damage, says, id=f"{name}-{says[-1]}")
    for names, damage, says in DAMAGES
    for name in names
]


@pytest.mark.parametrize(("name", "damage", "says"), CASES)
def test_damaged_files(
    name: str, damage: Damage, says: list[str], checkpoints: Checkpoints, tmp_path: Path, refused: Refused
) -> None:
    files = checkpoints[name].copied(tmp_path / "copy")
    known = {"weights": part(files, "weights").name, "home": home_of(files.path), "drafter": files.drafter}
    damage(files)
    words = [word.format(**known) for word in says]
    how = "--drafter_type eagle --drafter_alignment published --lantern --lantern_k 9 --prompt sun".split()
    how += ["--drafter_path", files.drafter, "--output_dir", tmp_path / "out"]
    line = refused("generate_images", *files.words(), *how)
    assert all(word in line for word in words), line
    options = LoadOptions(str(files.path), str(files.drafter), target_size=SIDE.get(files.family))
    faults = [fault for found in inspect(files.family, options) for fault in found.faults]
    late = line.count(": the text encoder ")  # loaded when the first text is encoded
    assert late or words[0] in faults[0], faults


# Checkpoints, what else is said, words of the line; @: the path of another checkpoint.
MISTAKEN = [
    ("janus_pro", "--prompt sun --model_path @emu3", "config.json"),
    ("emu3", "--prompt sun --model_path @janus_pro", "config.json"),
    ("janus_pro", "--prompt sun --model_path @anole", "config.json"),
    ("anole", "--prompt sun --model_path @emu3", "config.json"),
    ("anole", "--prompt sun --model_path @lumina_mgpt", "no checkpoint of anole, try --model lumina_mgpt"),
    ("lumina_mgpt", "--prompt sun --model_path @anole", "no checkpoint of lumina_mgpt, try --model anole"),
    ("llamagen", "--class_labels 1,2", "give --prompt"),
    ("llamagen", "--class_labels 1,2 --prompt sun", "choose one"),
    ("llamagen", "--tokenizer_base_path x", "belongs to --model anole or lumina_mgpt"),
    ("llamagen", "--target_size 16", "this model draws 8 px and no other size"),
    ("llamagen classes", "--prompt sun", "give ids from 0 to 6 by --class_labels"),
    ("llamagen classes", "--class_labels 7", "give ids from 0 to 6 by --class_labels"),
    ("llamagen classes", "--class_labels 1,1", "stands twice"),
    ("llamagen classes", "--class_labels 1;2", "is not a list of class ids"),
    ("emoji", "--vq_path x", "belongs to --model llamagen or llamagen2"),
    ("lumina_mgpt", "--prompt sun --target_size 10", "multiple of 4"),
    ("lumina_mgpt", "--prompt sun --target_size 20", "<reserved08805>"),
    ("janus_pro", "--prompt sun --target_size 16", "draws 8 px"),
    ("janus_pro", "--prompt sun --ratio 1:1", "--ratio"),
    ("emu3", "--prompt sun --ratio 0:3", "--ratio 0:3"),
    ("emu3", "--prompt sun --target_size 1 --ratio 9:1", "no whole cell"),
]


@pytest.mark.parametrize(("name", "words", "says"), MISTAKEN)
def test_options_that_do_not_fit(
    name: str, words: str, says: str, checkpoints: Checkpoints, tmp_path: Path, refused: Refused
) -> None:
    given = [checkpoints[word[1:]].path if word[0] == "@" else word for word in words.split()]
    line = refused("generate_images", *checkpoints[name].words(), "--output_dir", tmp_path / "o", *given)
    assert says in line


@pytest.fixture
def copy(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, its weights in three shards."""
    folder = checkpoints["emoji"].copied(tmp_path / "copy").path
    rewrite(folder, torch.float32, 3)
    return folder


@pytest.fixture
def check(run: Run, copy: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """check_ckpts on the copy, no weights to be read: faults and standard error."""

    def call(*words: object) -> tuple[list[str], str]:
        with monkeypatch.context() as patch:
            patch.setattr(Stored, "read", None)
            status, out, err = run("check_ckpts", "--model_path", copy, *words)
        document = json.loads(out.splitlines()[-1])
        faults = [fault for part in document["models"]["emoji"] for fault in part["faults"]]
        assert (document["ok"], status) == ((False, 2) if faults else (True, 0))
        return faults, err

    return call


def not_loaded(folder: Path) -> str:
    """The one line in which loading refuses."""
    with pytest.raises(CheckpointError) as caught:
        load("emoji", folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_wrong_and_nothing_read(check: Check, copy: Path, tmp_path: Path) -> None:
    assert check() == ([], "")
    shutil.move(copy / "drafter", tmp_path / "away")
    assert check("--drafter_path", tmp_path / "away") == ([], "")
    assert check("--drafter_path", copy / "nowhere")[0]
    assert load("emoji", copy, need_drafter=False).codec


def test_every_shard_at_fault_is_named(check: Check, copy: Path) -> None:
    first, second, third = sorted(copy.glob("model-*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-9])
    faults, err = check()
    assert len(faults) == 2 and "2 in all" in err
    assert "does not exist" in faults[0] and first.name in faults[0]
    assert "truncated" in faults[1] and second.name in faults[1]
    assert first.name in not_loaded(copy) and "1 more" in not_loaded(copy)
    third.unlink()
    assert len(check()[0]) == 3


def test_every_tensor_at_fault_is_named(check: Check, copy: Path) -> None:
    edit(copy / "config.json", lambda config: config.update(intermediate_size=32))
    faults, _ = check()
    assert len(faults) == 6  # three projections in two layers
    assert all("mlp" in fault and "config.json asks for" in fault for fault in faults)
    assert "mlp" in not_loaded(copy) and "(and 5 more of" in not_loaded(copy)
    edit(copy / "config.json", lambda config: config.update(intermediate_size=64, num_hidden_layers=3))
    assert all("model.layers.2." in fault and "missing" in fault for fault in check()[0])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("chameleon", "chameleon: there is no such model"),
        ("emoji anole --model_path x", "--model_path x: it is of one model"),
    ],
)
def test_what_the_user_can_put_right(refused: Refused, words: str, says: str) -> None:
    assert says in refused("check_ckpts", *words.split())
