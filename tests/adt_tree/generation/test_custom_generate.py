"""model.generate(..., custom_generate=...): the tokens of transformers' own generate, in both forms."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adt_tree import Method, Sampling, TreeShape, generate
from adt_tree.errors import UserError
from adt_tree.generation.adopted import ADOPTED
from adt_tree.grid import Grid
from adt_tree.pipeline import Pipeline
from models.family import LoadOptions
from models.layouts.emu3 import CLOSING, NEGATIVE
from tests.support import tiny_transformers as tiny
from tests.support.checkpoints import Checkpoints
from tests.support.refusal import refusal
from tests.support.runs import ROOT

TEXTS = ["a red heart", "sea", "a very long prompt, longer than the others"]
IDS = tiny.emu3_vocabulary()
FIRST = IDS["<|visual token 000000|>"]
CODES = list(range(FIRST, FIRST + tiny.CODES))
ROWS, COLUMNS = 3, 5
LENGTH = ROWS * (COLUMNS + 1)  # token ids of an image
FORMS: dict[str, dict[str, Any]] = {
    "callable": {"custom_generate": generate},
    "folder": {"custom_generate": str(ROOT), "trust_remote_code": True},
}
WRAPPED: dict[str, Any] = {"custom_generate": lambda *inputs, **more: generate(*inputs, **more)}


@pytest.fixture(scope="module")
def folder(checkpoints: Checkpoints) -> Path:
    """Returns the folder of a tiny Emu3, as transformers saves it."""
    return checkpoints["emu3"].path


@pytest.fixture(scope="module")
def model(load_emu3: Callable[[], Any]) -> Any:
    """Returns a model that the tests share."""
    return load_emu3()


@pytest.fixture(autouse=True)
def module_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives transformers, which copies the file of the folder form, a cache in place of the user's."""
    cache = str(tmp_path_factory.mktemp("modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.syspath_prepend(cache)


@pytest.fixture(scope="module")
def encode(folder: Path) -> Callable[..., dict[str, Tensor]]:
    """Returns a function that encodes texts, padded on the left, each with the request for an image of ROWS x
    COLUMNS or of other sides."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")

    def call(texts: list[str], rows: int = ROWS, columns: int = COLUMNS) -> dict[str, Tensor]:
        opening = f"{tokenizer.boi_token}{rows}*{columns}{tokenizer.image_wrapper_token}"
        ids = tokenizer([f"{tokenizer.bos_token}{text}{opening}" for text in texts], padding=True)
        return {name: torch.tensor(ids[name]) for name in ("input_ids", "attention_mask")}

    return call


def allowed(row: int, ids: Tensor) -> list[int]:
    """Returns the tokens that may come next, as transformers documents them for Emu3."""
    offset = len(ids) - int((ids == IDS[tiny.IMAGE_TOKEN]).nonzero()[0, 0])
    if offset > LENGTH:
        return [IDS[CLOSING[min(offset - LENGTH, 3) - 1]]]
    return [IDS[tiny.ROW_END]] if offset % (COLUMNS + 1) == 0 else CODES


def arguments(encode: Callable[..., dict[str, Tensor]], count: int, **more: Any) -> dict[str, Any]:
    """Returns the arguments of a greedy, guided call that makes whole images."""
    negative = encode([NEGATIVE] * count)
    return {
        **encode(TEXTS[:count]),
        "negative_prompt_ids": negative["input_ids"],
        "negative_prompt_attention_mask": negative["attention_mask"],
        "guidance_scale": 3.0,
        "do_sample": False,
        "max_new_tokens": LENGTH + 3,
        **more,
    }


@pytest.mark.parametrize(
    ("form", "count", "method", "more"),
    [
        ("callable", 1, None, {}),
        ("folder", 3, "self-draft", {"prefix_allowed_tokens_fn": allowed}),
        ("callable", 3, "adt-self-draft", {"max_new_tokens": LENGTH}),
        ("folder", 2, "ar", {"max_new_tokens": LENGTH + 1}),
        ("callable", 2, Method("self-draft", Sampling(1.0), TreeShape(6, 3, 12)), {"guidance_scale": None}),
        ("callable", 2, None, {"negative_prompt_ids": None, "negative_prompt_attention_mask": None}),
        ("callable", 2, None, {"max_new_tokens": 200}),
    ],
)
def test_tokens_of_generate(
    model: Any, encode: Callable[..., Any], form: str, count: int, method: Any, more: dict[str, Any]
) -> None:
    """All greedy tokens equal those of `generate`: padding and prompt, rows with their ends, and the tokens
    behind the image."""
    call = arguments(encode, count, **more)
    expected = model.generate(**(call | {"prefix_allowed_tokens_fn": allowed}))
    tokens = model.generate(**call, **FORMS[form], method=method)
    assert tokens.dtype == torch.int64 and torch.equal(tokens, expected)
    start = call["input_ids"].shape[1]
    assert tokens.shape[1] - start == min(call["max_new_tokens"], LENGTH + 3)
    assert len(set(tokens[0, start:].tolist())) > 4 and len({tuple(row) for row in tokens.tolist()}) == count
    if count == 3:
        assert call["attention_mask"][1, 0] == 0, "no padding was tested"


@pytest.mark.parametrize("form", FORMS)
def test_sampling_is_the_effective_configuration(
    model: Any, folder: Path, encode: Callable[..., Any], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled images are those of our pipeline at the same seeds, with the settings of the model's
    generation_config where the call has none."""
    import transformers

    monkeypatch.setattr(model.generation_config, "temperature", 0.8)
    monkeypatch.setattr(model.generation_config, "top_k", 20)
    settings = {"do_sample": True, "top_p": 0.9, "guidance_scale": 2.5}
    tokens = model.generate(**arguments(encode, 2, **settings), **FORMS[form], seed=5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    options = LoadOptions(target_size=8, ratio="5:3")
    pipe = Pipeline.from_transformers(model, tokenizer, options=options)
    assert pipe.model.grid == Grid(ROWS, COLUMNS, row_ends=True)
    sampling = Sampling(temperature=0.8, top_k=20, top_p=0.9, guidance=2.5)
    codes = pipe(TEXTS[:2], "ar", sampling=sampling, seed=5).codes
    rows = tokens[:, -LENGTH - 3 : -3].view(2, ROWS, COLUMNS + 1)[:, :, :-1]
    assert (rows.flatten(1) - FIRST).tolist() == codes
    torch.manual_seed(1)
    first, second = (model.generate(**arguments(encode, 1, **settings), **FORMS[form]) for _ in range(2))
    torch.manual_seed(1)
    again = model.generate(**arguments(encode, 1, **settings), **FORMS[form])
    assert torch.equal(first, again) and not torch.equal(first, second)


class Streamer:
    """A streamer that takes everything."""

    def put(self, value: Tensor) -> None:
        pass

    def end(self) -> None:
        pass


def custom(ids: Tensor, scores: Tensor) -> Tensor:
    """Stands for a logits processor or a stopping criterion of the caller."""
    return scores


def fewer(row: int, ids: Tensor) -> list[int]:
    """Allows all codes but one."""
    return [token for token in allowed(row, ids) if token != FIRST + 1]


def more_tokens(row: int, ids: Tensor) -> list[int]:
    """Allows a row to end early."""
    return [*allowed(row, ids), IDS[tiny.ROW_END]]


def no_repeats(row: int, ids: Tensor) -> list[int]:
    """Forbids the image's first code in the rest of the image. Only a finished image shows this."""
    start = int((ids == IDS[tiny.IMAGE_TOKEN]).nonzero()[0, 0]) + 1
    tokens = allowed(row, ids)
    return [
        token
        for token in tokens
        if len(tokens) == 1 or len(ids) == start or token != ids[start] or token == FIRST
    ]


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "streamer": {"streamer": Streamer()},
    "num_return_sequences": {"num_return_sequences": 2, "do_sample": True},
    "output_scores": {"return_dict_in_generate": True, "output_scores": True},
    "penalty_alpha": {"penalty_alpha": 0.5, "top_k": 4},
    "labels": {"labels": torch.ones(2, 4, dtype=torch.int64)},
    "seed 1.5": {"seed": 1.5},
    "seed 'x'": {"seed": "x"},
    "guidance 1000": {"guidance_scale": 1000.0},
    "guidance nan": {"guidance_scale": float("nan")},
    "function": {"logits_processor": [custom]},
    "MaxTimeCriteria": {"max_time": 9.0},
    "RepetitionPenalty": {"repetition_penalty": 1.2},
    "MinPLogitsWarper": {"min_p": 0.1, "do_sample": True},
    "max_new_tokens 17": {"max_new_tokens": LENGTH - 1},
    "prefix_allowed_tokens_fn: at token 0 of image 0": {"prefix_allowed_tokens_fn": fewer},
    "prefix_allowed_tokens_fn: at token 0": {"prefix_allowed_tokens_fn": more_tokens},
    "prefix_allowed_tokens_fn: at token": {"prefix_allowed_tokens_fn": no_repeats},
    "'eagle-2'": {"method": "eagle-2"},
    "'fastest'": {"method": "fastest"},
    "negative_prompt_ids": {
        "negative_prompt_ids": torch.ones(1, 4, dtype=torch.int64),
        "negative_prompt_attention_mask": None,
    },
    "eos_token_id": {"eos_token_id": FIRST + 3},
}


@pytest.mark.parametrize(
    ("word", "form"),
    [
        *((word, "callable") for word in REFUSED if word != "streamer"),
        ("streamer", "folder"),
        ("labels", "folder"),
        ("labels", ""),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    model: Any, encode: Callable[..., Any], form: str, word: str
) -> None:
    """A function of the caller around ours, the form without a name, changes nothing."""
    call = arguments(encode, 2) | REFUSED[word] | FORMS.get(form, WRAPPED)
    assert word in refusal(lambda: model.generate(**call))


def test_a_dictionary_of_sequences(model: Any, encode: Callable[..., Any]) -> None:
    """Transformers' own example of Emu3 asks for it."""
    call = arguments(encode, 2)
    expected = model.generate(**call, **FORMS["callable"])
    for form in (*FORMS.values(), WRAPPED):
        output = model.generate(**call, **form, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected) and output.past_key_values is None


def test_arguments_that_generate_itself_adds_are_harmless(model: Any, encode: Callable[..., Any]) -> None:
    """A new release may prepare more of them. A cache that holds a prefix is refused, whatever its name."""
    from transformers import DynamicCache

    call, full = arguments(encode, 1), DynamicCache()
    full.update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 0)

    def newer(*inputs: Any, added: Any = DynamicCache(), **more: Any) -> Any:  # noqa: B008
        return generate(*inputs, **more, added=added)

    assert torch.equal(
        model.generate(**call, custom_generate=newer), model.generate(**call, **FORMS["callable"])
    )
    with pytest.raises(UserError, match="added: a prompt"):
        model.generate(**call, custom_generate=newer, added=full)


def test_other_positions_are_refused(model: Any, encode: Callable[..., Any]) -> None:
    call = arguments(encode, 1) | FORMS["callable"]
    positions = torch.arange(call["input_ids"].shape[1])[None]
    model.generate(**call, position_ids=positions)
    with pytest.raises(UserError, match="position_ids"):
        model.generate(**call, position_ids=positions + 3)


def test_prompts_that_do_not_fit_are_refused(model: Any, encode: Callable[..., Any]) -> None:
    """A prompt is refused if it asks for no size or for two, or if its padding is on the right."""
    call = arguments(encode, 2) | FORMS["callable"]
    whole = {"negative_prompt_ids": None, "negative_prompt_attention_mask": None}
    right = {name: call[name].roll(-1, dims=1) for name in ("input_ids", "attention_mask")}
    sizes = [encode([text], 3, columns) for text, columns in (("sun", 5), ("sea", 4))]
    two = {name: torch.cat([part[name] for part in sizes]) for name in right}
    cases = {
        "attention_mask": right,
        "sizes": two | whole,
        "prompt 0": {"input_ids": call["input_ids"] * 0 + 1},
    }
    for word, changed in cases.items():
        with pytest.raises(UserError, match=word):
            model.generate(**(call | changed))


def test_other_models_are_refused(checkpoints: Any) -> None:
    """Chameleon's `generate` masks image tokens, so it cannot make images."""
    import transformers

    path = checkpoints["emoji"].path
    other = transformers.ChameleonForConditionalGeneration.from_pretrained(path)
    with pytest.raises(UserError, match="'chameleon'"):
        other.generate(
            torch.tensor([[1, 2, 3]]), max_new_tokens=300, do_sample=False, custom_generate=generate
        )


def test_new_weights_are_adopted_anew(load_emu3: Callable[[], Any], encode: Callable[..., Any]) -> None:
    model = load_emu3()
    call = arguments(encode, 1)
    model.generate(**call, **FORMS["callable"])
    pipe = ADOPTED[model].pipe
    model.generate(**call, **FORMS["callable"])
    assert ADOPTED[model].pipe is pipe
    with torch.no_grad():
        model.model.text_model.layers[0].self_attn.q_proj.weight.mul_(-1.0)
    expected = model.generate(**call, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(model.generate(**call, **FORMS["callable"]), expected)
    assert ADOPTED[model].pipe is not pipe


def test_a_model_is_freed(load_emu3: Callable[[], Any], encode: Callable[..., Any]) -> None:
    """Once its owner drops a model, neither the model nor its engines stay in memory."""
    model, before = load_emu3(), len(ADOPTED)
    model.generate(**arguments(encode, 1), **FORMS["callable"])
    watched = [weakref.ref(model), weakref.ref(ADOPTED[model].pipe.model.decoder)]
    assert len(ADOPTED) == before + 1
    del model
    gc.collect()
    assert [ref() for ref in watched] == [None, None] and len(ADOPTED) <= before


CHILD = """
import json, site, sys
target, folder, root, ids, settings = json.loads(sys.argv[1])
site.addsitedir(target)
import torch
from transformers import Emu3ForConditionalGeneration
model = Emu3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
tokens = model.generate(torch.tensor(ids), custom_generate=root, trust_remote_code=True, **settings)
import adt_tree
print(json.dumps([tokens.tolist(), adt_tree.__file__]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder that holds what `pip install -e .` installs."""
    pytest.importorskip("setuptools")
    target = tmp_path_factory.mktemp("site")
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-index"]
    words = [sys.executable, "-m", "pip", "install", *quiet, "--target", str(target), "-e", str(ROOT)]
    subprocess.run(words, check=True, capture_output=True, text=True)
    return target


def test_the_folder_form_elsewhere(
    model: Any, folder: Path, encode: Callable[..., Any], installed: Path, tmp_path: Path
) -> None:
    """The folder form works in a process in another folder, which finds the package by the editable
    installation alone."""
    settings = {"do_sample": False, "max_new_tokens": LENGTH + 3}
    ids = encode(TEXTS[:1])["input_ids"]
    words = json.dumps(
        [str(installed), str(folder), str(ROOT), ids.tolist(), settings | {"method": "self-draft"}]
    )
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    tokens, file = json.loads(done.stdout.splitlines()[-1])
    assert tokens == model.generate(ids, prefix_allowed_tokens_fn=allowed, **settings).tolist()
    assert Path(file) == ROOT / "adt_tree" / "__init__.py"


def test_without_an_installation_one_line_says_so(tmp_path: Path) -> None:
    """The file of the folder form runs alone, in a process that cannot import the package."""
    words = [sys.executable, "-I", str(ROOT / "custom_generate" / "generate.py")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "pip install -e ." in done.stderr.splitlines()[-1]
