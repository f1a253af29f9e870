"""What people give to the Python API: numbers, paths and texts of every type, models of every kind, defaults
of torch, several threads. It works, or one line names the thing and the value."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from adt_tree import METHODS, Lantern, Method, Pipeline, Sampling
from models.family import LoadOptions, home_of
from models.layouts.adopted import adopt
from models.loading import find_files, load
from models.model import Model
from models.registry import spec_of
from tests.support import tiny_transformers
from tests.support.checkpoints import SIDE, Checkpoints, Tiny
from tests.support.refusal import refusal as refused
from tests.support.tiny_glm_image import SOURCE

CPU = LoadOptions(device="cpu", precision="fp32")


def loaded(files: Tiny, **options: Any) -> Model:
    """Loads a tiny checkpoint by its path alone."""
    sides = {"height": 64, "width": 96} if files.family == "glm_image" else {}
    sides["target_size"] = SIDE.get(files.family)
    return load(files.family, replace(CPU, model_path=str(files.path), **sides, **options))


def test_one_seed_or_one_for_each_prompt(pipe: Pipeline) -> None:
    for seed in (7, [7, 8], np.array([7, 8]), torch.tensor([7, 8]), (n for n in (7, np.int16(8)))):
        assert [request.seed for request in pipe.requests(["sun", "sea"], seed)] == [7, 8]
    assert "'x'" in refused(lambda: pipe.requests(["sun", "sea"], [1, "x"]))
    last = pipe.requests(["sun", "sea"], 2**63 - 1)
    assert [request.seed for request in last] == [2**63 - 1, -(2**63)]
    assert len(pipe(["sun", "sea"], seed=2**63 - 1).codes) == 2


def test_prompts_of_every_iterable(pipe: Pipeline) -> None:
    pandas = pytest.importorskip("pandas")
    texts = ["sun", "sea"]
    expected = [request.prompt for request in pipe.requests(texts, 0)]
    column = pandas.DataFrame({"prompt": texts})["prompt"]
    for prompts in (np.array(texts), np.array(texts, dtype=object), column, iter(texts), tuple(texts)):
        assert [request.prompt for request in pipe.requests(prompts, 0)] == expected
    gap = pandas.Series(["sun", None])
    for bad, word in (
        (gap, "prompt 1"),
        (["sun", 3], "prompt 1 is 3"),
        (None, "None"),
        (3, "3"),
        ([b"x"], "b'x'"),
    ):
        assert word in refused(lambda bad=bad: pipe.requests(bad, 0))


def test_paths_and_devices_of_every_type(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tiny_checkpoint.parent))
    home = f"~/{tiny_checkpoint.name}"
    codes = [
        Pipeline.from_pretrained(model, drafter=drafter, device=device, precision="fp32")("sun").codes
        for model, drafter, device in (
            (str(tiny_checkpoint), None, "cpu"),
            (tiny_checkpoint, tiny_checkpoint / "drafter", torch.device("cpu")),
            (home, f"{home}/drafter", "cpu"),
        )
    ]
    assert codes[0] == codes[1] == codes[2]
    options = LoadOptions(
        model_path=Path("~/x"), vq_path="~/y", text_encoder=Path("a/b"), tokenizer_base_path="~"
    )
    root = str(tiny_checkpoint.parent)
    found = (options.model_path, options.vq_path, options.text_encoder, options.tokenizer_base_path)
    assert found == (f"{root}/x", f"{root}/y", "a/b", root)
    assert "nowhere.npy" in refused(
        lambda: Pipeline.from_pretrained(home, device="cpu", precision="fp32")(
            "sun", "eagle-2", lantern=Lantern(table=Path("~/nowhere.npy"))
        )
    )
    assert Lantern(table=tmp_path) == Lantern(table=str(tmp_path))
    assert "--device 0" in refused(lambda: load(tiny_checkpoint, LoadOptions(device=0)))


@pytest.mark.parametrize("name", ["emoji", "llamagen classes", "glm_image"])
def test_a_model_loads_without_a_drafter(checkpoints: Checkpoints, tmp_path: Path, name: str) -> None:
    """Methods that need a drafter network say so when they are asked for. The default method is one that the
    model has."""
    files = checkpoints[name].copied(tmp_path / "copy")
    shutil.rmtree(files.drafter)
    pipe = Pipeline(loaded(files))
    assert pipe.model.drafter_net is None and pipe.method().exact and pipe.default_method in pipe.methods
    for method in (name for name, row in METHODS.items() if row.network):
        line = refused(lambda method=method: pipe("1", method))
        assert f"method '{method}'" in line and "self-draft" in line
        whole = Method(method, Sampling(), pipe.model.spec.default_tree(method))
        assert "drafter" in refused(lambda whole=whole: pipe.method(whole))
    assert "--drafter_path" in refused(lambda: loaded(files, need_drafter=True))


def test_nobodys_drafter_is_taken_for_anothers(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """The embedded model's drafter belongs to it alone, and a drafter beside a target to that target."""
    files = checkpoints["emoji"].copied(tmp_path / "copy")
    emoji = spec_of("emoji")
    assert find_files(emoji, LoadOptions(), "cpu", "fp32").drafter == emoji.home / "drafter"
    options = LoadOptions(model_path=files.path)
    assert find_files(emoji, options, "cpu", "fp32").drafter == home_of(files.path) / "drafter"
    shutil.rmtree(files.drafter)
    assert find_files(emoji, options, "cpu", "fp32").drafter is None


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Sets torch's defaults for a block."""
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.parametrize("name", ["emoji", "llamagen", "janus_pro", "emu3", "glm_image"])
def test_defaults_of_torch_change_nothing(checkpoints: Checkpoints, name: str) -> None:
    """A tensor that follows the default device would have no numbers here. Loading, all methods, relaxation
    and pixels are tried. T5 is loaded by transformers, which itself refuses such a device."""
    files, texts = checkpoints[name], ["1", "2"]

    def images() -> list[object]:
        pipe = Pipeline(loaded(files, drafter_path=str(files.drafter)))
        guidance = 1.0 if not pipe.model.prompts.guided else 2.0
        results: list[object] = []
        for method in pipe.methods if name == "emoji" else ["self-draft"]:
            lantern = Lantern(0.5, 4) if method == "eagle-2" else None
            sampling = Sampling(1.0, 30, 0.9, guidance)
            out = pipe(texts, method, sampling=sampling, lantern=lantern, seed=3, batch_size=2)
            results += [out.codes, [image.tobytes() for image in out.images]]
        return results

    expected = images()
    with defaults(torch.bfloat16, "cpu" if files.family.startswith("llamagen") else "meta"):
        assert images() == expected


def test_models_of_transformers_that_cannot_be_adopted(load_emu3: Callable[[], Any]) -> None:
    emu3 = load_emu3()

    def line(model: Any, options: LoadOptions = CPU) -> str:
        return refused(lambda: Pipeline.from_transformers(model, None, options=options))

    assert "precision bf16" in line(emu3, LoadOptions(precision="bf16"))
    for name, value in (("model_path", "x"), ("attention", "flash"), ("height", 64)):
        assert f"{name} {value}" in line(emu3, LoadOptions(**{name: value}))
    assert "'NoneType'" in line(None) or "None" in line(None)
    emu3.config.quantization_config = {"quant_method": "bitsandbytes"}
    assert "quantised by bitsandbytes" in line(emu3)
    del emu3.config.quantization_config
    for dtype in (torch.float64, torch.float8_e4m3fn):
        assert str(dtype) in line(emu3.to(dtype)) and "torch.bfloat16" in line(emu3)
    assert "meta" in line(emu3.to("meta"))


def test_the_callers_tokenizer_stays_as_it_is(checkpoints: Checkpoints) -> None:
    """A processor may hold the chat template that its tokenizer lacks."""
    from types import SimpleNamespace

    import transformers

    path = checkpoints["janus_pro"].path
    model = transformers.JanusForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    template, tokenizer.chat_template = tokenizer.chat_template, None
    processor = SimpleNamespace(tokenizer=tokenizer, chat_template=template)
    prompt = Pipeline.from_transformers(model, processor).model.encode("sun")
    assert tokenizer.chat_template is None
    assert prompt == loaded(checkpoints["janus_pro"]).encode("sun")


def test_threads_adopt_one_model_one_after_the_other(load_emu3: Callable[[], Any]) -> None:
    emu3 = load_emu3()
    at_once: list[int] = []
    running = [0]

    def watched(*arguments: Any) -> Model:
        running[0] += 1
        at_once.append(running[0])
        try:
            return adopt(*arguments)
        finally:
            running[0] -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.layouts.adopted.adopt", watched)
        threads = [Thread(target=Pipeline.from_transformers, args=(emu3, None)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert at_once == [1, 1, 1]


def test_an_engine_makes_the_images_of_one_run_at_a_time(pipe: Pipeline) -> None:
    requests = pipe.requests(["sun", "sea"], 0)
    for method in ("ar", "self-draft"):
        engine = pipe.engine(pipe.method(method), requests)
        steps = engine.steps(requests)
        next(steps)
        lines: list[str] = []
        thread = Thread(
            target=lambda e=engine, out=lines: out.append(refused(lambda: list(e.decode(requests))))
        )
        thread.start()
        thread.join()
        assert "engine" in lines[0]
        steps.close()
        assert len(list(engine.decode(requests))) == 2


def test_a_model_without_pixels_says_so(checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]) -> None:
    out = Pipeline(loaded(checkpoints["glm_image"]))("sun", method="ar")
    assert not out.images and len(out.codes) == 1
    assert "no images, codes alone" in capsys.readouterr().err


CONTROL = {
    "emu3": [tiny_transformers.IMAGE_START, "<|visual token 000003|>", tiny_transformers.ROW_END],
    "janus_pro": [tiny_transformers.BEGIN_OF_IMAGE, "<bos>"],
    "glm_image": [SOURCE, "<|dit_token_65|>", "[gMASK]"],
    "emoji": ["<racm3:break>", "<s>"],
}


@pytest.mark.parametrize("name", CONTROL)
def test_texts_that_are_no_prompts(checkpoints: Checkpoints, tmp_path: Path, name: str) -> None:
    """The rule stands in the core, so every door has it. A tokenizer may also add letters."""
    files = checkpoints[name].copied(tmp_path / "copy")
    if name == "emoji":
        path = str(files.path / "text_tokenizer.json")
        tokenizer = Tokenizer.from_file(path)
        tokenizer.add_tokens([AddedToken("é", special=False), *map(AddedToken, CONTROL[name])])
        tokenizer.save(path)
    model = loaded(files)
    for token in CONTROL[name]:
        assert token in refused(lambda token=token: model.encode(f"a {token} hat"))
    for text, word in (("", "blank"), (" \n\t", "blank"), ("\ud800 hat", "Unicode")):
        assert word in refused(lambda text=text: Pipeline(model)(["sun", text]))
    for text in ("a < b > c", "café", "[mask] <i>"):
        assert model.encode(text).length > 1
