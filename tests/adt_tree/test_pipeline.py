"""The Python API: every exact method gives the same image in any batch, whatever the type of an argument,
torch's defaults and the thread."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pandas
import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from adt_tree import METHODS, Lantern, Method, Pipeline, Sampling, TreeShape
from adt_tree.errors import as_seed
from models.family import LoadOptions
from models.loading import load
from tests.support import tiny_transformers
from tests.support.checkpoints import SIDE, Checkpoints
from tests.support.refusal import refusal
from tests.support.tiny_glm_image import SOURCE

PROMPTS = ["sun", "red moon", "a"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_seed_one_image(pipe: Pipeline, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, guidance=2.0)
    expected = pipe(PROMPTS, method="ar", sampling=sampling, seed=5)
    assert expected.stats["tau"] == 1 and len(expected.codes[0]) == pipe.model.grid.size
    exact = {name for name in METHODS if pipe.method(name, sampling=sampling).exact}
    relaxed = {name for name in METHODS if pipe.method(name).relaxed_rule}
    assert exact == {
        name for name, spec in METHODS.items() if spec.exact or not (temperature or name in relaxed)
    }
    for name in exact:
        out = pipe(PROMPTS, method=name, sampling=sampling, seed=5, batch_size=2)
        assert out.codes == expected.codes, name
        assert [a.tobytes() for a in out.images] == [b.tobytes() for b in expected.images]


def test_a_prompt_alone_and_in_a_list(pipe: Pipeline) -> None:
    together = pipe(PROMPTS, seed=3)
    alone = [pipe(text, seed=3 + place).codes[0] for place, text in enumerate(PROMPTS)]
    assert together.codes == alone == pipe(PROMPTS, seed=[3, 4, 5]).codes


def test_statistics_are_of_the_steps(pipe: Pipeline) -> None:
    out = pipe(PROMPTS, method="eagle-2", tree=TreeShape(2, 2, 4))
    steps = [step for steps in out.steps for step in steps]
    assert len(out.images) == len(PROMPTS)
    assert out.stats["tau"] == sum(step.accepted + 1 for step in steps) / len(steps)
    assert out.stats["target_calls"] == len(steps) / len(PROMPTS)
    assert max(step.depth for step in steps) <= 2 and max(step.nodes for step in steps) <= 4


def test_the_fastest_method_is_exact_and_taken_by_default(pipe: Pipeline) -> None:
    method = pipe.method()
    assert method.exact and pipe("sun", seed=1).codes == pipe("sun", method=method, seed=1).codes


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("zipar", "pjd")])
def test_a_stream_is_the_image_as_it_grows(pipe: Pipeline, name: str) -> None:
    """Two images are in flight. The codes of each step follow the codes before it, its path is that of the
    accepted drafts in its tree, and confidence falls along paths."""
    expected = pipe(PROMPTS, method=name, seed=5, batch_size=2)
    codes: dict[int, list[int]] = {}
    for step in pipe.stream(PROMPTS, method=name, seed=5, batch_size=2):
        tree, before = step.tree, codes.setdefault(step.image, [step.tree.codes[0]])
        assert step.position == len(before) and tree.codes[0] == before[-1]
        assert [tree.parents[node] for node in tree.path] == [0, *tree.path][: len(tree.path)]
        assert [tree.codes[node] for node in tree.path] == step.codes[:-1]
        assert all(tree.depths[n] == tree.depths[p] + 1 for n, p in enumerate(tree.parents) if n)
        assert tree.confidence[0] == 0 and len(tree.codes) == step.step.nodes + 1
        assert all(tree.confidence[n] <= tree.confidence[p] + 1e-6 for n, p in enumerate(tree.parents))
        before += step.codes
    assert [codes[place] for place in range(len(PROMPTS))] == expected.codes


def test_a_static_tree_has_no_node_below_a_filtered_one(pipe: Pipeline) -> None:
    """Two codes pass the filter, and the tree asks for more children of a node than these."""
    for step in pipe.stream("sun", method="eagle-1", sampling=Sampling(top_k=2, guidance=2.0)):
        assert len(step.tree.codes) == step.step.nodes + 1


def test_options_of_loading_are_read(tiny_checkpoint: Path) -> None:
    options = LoadOptions(device="cpu", precision="bf16")
    assert Pipeline.from_pretrained(str(tiny_checkpoint), options=options).model.precision == "bf16"
    full = Pipeline.from_pretrained(str(tiny_checkpoint), precision="fp32", options=options)
    assert full.model.precision == "fp32"


def test_one_seed_or_one_for_each_prompt(pipe: Pipeline) -> None:
    for seed in (7, [7, 8], np.array([7, 8]), torch.tensor([7, 8]), (n for n in (7, np.int16(8)))):
        assert [request.seed for request in pipe.requests(["sun", "sea"], seed)] == [7, 8]
    last = pipe.requests(["sun", "sea"], 2**63 - 1)
    assert [request.seed for request in last] == [2**63 - 1, -(2**63)]
    assert len(pipe(["sun", "sea"], seed=2**63 - 1).codes) == 2


def test_seeds_are_whole_numbers_of_64_bits() -> None:
    whole = (7, np.int64(7), np.uint8(7), torch.tensor(7), 2**64 + 7)
    assert [as_seed(value) for value in whole] == [7] * len(whole)
    assert [as_seed(value) for value in (-1, 2**63 - 1, 2**63)] == [-1, 2**63 - 1, -(2**63)]


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    """Equal settings are equal values, whose texts stand in fingerprints of runs."""
    sampling = Sampling(np.float32(0.5), np.int64(9), torch.tensor(0.25), np.float64(2))
    assert repr(sampling) == repr(Sampling(0.5, 9, 0.25, 2.0))
    assert repr(TreeShape(np.int64(5), torch.tensor(4), np.uint8(10))) == repr(TreeShape(5, 4, 10))
    assert repr(Lantern(np.float64(0.5), np.int32(3))) == repr(Lantern(0.5, 3))


def test_prompts_of_every_iterable(pipe: Pipeline) -> None:
    texts = ["sun", "sea"]
    expected = [request.prompt for request in pipe.requests(texts, 0)]
    column = pandas.DataFrame({"prompt": texts})["prompt"]
    for prompts in (np.array(texts), np.array(texts, dtype=object), column, iter(texts), tuple(texts)):
        assert [request.prompt for request in pipe.requests(prompts, 0)] == expected


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
    assert Lantern(table=tmp_path) == Lantern(table=str(tmp_path))


@pytest.mark.parametrize("name", ["emoji", "llamagen classes", "glm_image"])
def test_a_model_loads_without_a_drafter(checkpoints: Checkpoints, tmp_path: Path, name: str) -> None:
    """Methods that need a drafter network say so when they are asked for. The default method is one that the
    model has."""
    files = checkpoints[name].copied(tmp_path / "copy")
    shutil.rmtree(files.drafter)
    options = LoadOptions(str(files.path), target_size=SIDE.get(files.family), precision="fp32", device="cpu")
    pipe = Pipeline(load(files.family, options))
    assert pipe.model.drafter_net is None and pipe.method().exact and pipe.default_method in pipe.methods
    for method in (name for name, row in METHODS.items() if row.network):
        line = refusal(lambda method=method: pipe("1", method))
        assert f"method '{method}'" in line and "self-draft" in line
        whole = Method(method, Sampling(), pipe.model.spec.default_tree(method))
        assert "drafter" in refusal(lambda whole=whole: pipe.method(whole))
    needed = replace(options, need_drafter=True)
    assert "drafter_path" in refusal(lambda: load(files.family, needed))


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
    and pixels are tried, and T5, which transformers loads."""
    files, texts = checkpoints[name], ["1", "2"]

    def images() -> list[object]:
        pipe = Pipeline(files.load())
        guidance = 1.0 if not pipe.model.prompts.guided else 2.0
        results: list[object] = []
        for method in pipe.methods if name == "emoji" else ["self-draft"]:
            lantern = Lantern(0.5, 4) if method == "eagle-2" else None
            sampling = Sampling(1.0, 30, 0.9, guidance)
            out = pipe(texts, method, sampling=sampling, lantern=lantern, seed=3, batch_size=2)
            results += [out.codes, [image.tobytes() for image in out.images]]
        return results

    expected = images()
    with defaults(torch.bfloat16, "meta"), torch.autocast("cpu", torch.bfloat16):
        assert images() == expected


@pytest.mark.parametrize("method", ["self-draft", "adt-tree"])
def test_steps_of_a_stream_leave_the_callers_settings_alone(pipe: Pipeline, method: str) -> None:
    """They change no code either, and are there again between the steps."""
    expected = [code for step in pipe.stream("sun", method, seed=3) for code in step.codes]
    codes = []
    with defaults(torch.float16, "meta"), torch.autocast("cpu", torch.bfloat16):
        for step in pipe.stream("sun", method, seed=3):
            codes += step.codes
            settings = torch.get_default_dtype(), str(torch.get_default_device()), torch.is_grad_enabled()
            assert settings == (torch.float16, "meta", True) and torch.is_autocast_enabled("cpu")
    assert codes == expected


def test_a_pipeline_pickles_as_the_arguments_of_loading(pipe: Pipeline) -> None:
    expected = pipe("sun", seed=3).codes
    for copied in (pickle.loads(pickle.dumps(pipe)), deepcopy(pipe)):
        assert copied is not pipe and copied("sun", seed=3).codes == expected
    made = Pipeline(pipe.model)
    for copying in (pickle.dumps, deepcopy, copy):
        assert "make one in each process" in refusal(lambda copying=copying: copying(made))


def test_an_engine_makes_the_images_of_one_run_at_a_time(pipe: Pipeline) -> None:
    requests = pipe.requests(["sun", "sea"], 0)
    for method in ("ar", "self-draft"):
        engine = pipe.engine(pipe.method(method), requests)
        steps = engine.steps(requests)
        next(steps)
        lines: list[str] = []
        thread = Thread(
            target=lambda e=engine, out=lines: out.append(refusal(lambda: list(e.decode(requests))))
        )
        thread.start()
        thread.join()
        assert "engine" in lines[0]
        steps.close()
        assert len(list(engine.decode(requests))) == 2


def test_a_model_without_pixels_says_so(checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]) -> None:
    out = Pipeline(checkpoints["glm_image"].load())("sun", method="ar")
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
    model = files.load(need_drafter=False)
    for token in CONTROL[name]:
        assert token in refusal(lambda token=token: model.encode(f"a {token} hat"))
    for text in ("a < b > c", "café", "[mask] <i>"):
        assert model.encode(text).length > 1
