"""Models that transformers has loaded generate the same images in our pipeline, and share their weights with
it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from adt_tree.method import Method
from adt_tree.pipeline import Pipeline
from adt_tree.policy import TreeShape
from adt_tree.settings import Sampling
from models.family import LoadOptions
from models.layouts.adopted import adopt
from models.model import Model
from tests.support.checkpoints import SIDE, Checkpoints, Tiny
from tests.support.refusal import refusal

TEXTS = ["a red heart", "sea"]
KINDS = {
    "janus_pro": "JanusForConditionalGeneration",
    "emu3": "Emu3ForConditionalGeneration",
    "anole": "ChameleonForConditionalGeneration",
    "emoji": "ChameleonForConditionalGeneration",  # has a codec that transformers does not load
}


@dataclass(frozen=True)
class Loaded:
    """A checkpoint, and transformers' model of it."""

    files: Tiny
    model: Any
    tokenizer: Any

    def ours(self) -> Pipeline:
        """Returns our pipeline around that model."""
        options = LoadOptions(target_size=SIDE.get(self.files.family))
        return Pipeline.from_transformers(self.model, self.tokenizer, options=options)


@pytest.fixture(scope="module", params=KINDS)
def loaded(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Loaded:
    """Returns a checkpoint of each family."""
    import transformers

    files = checkpoints[request.param]
    model = getattr(transformers, KINDS[request.param]).from_pretrained(files.path, dtype=torch.float32)
    if (files.path / "tokenizer_config.json").exists():
        return Loaded(files, model.eval(), transformers.AutoTokenizer.from_pretrained(files.path))
    (file,) = files.path.glob("*tokenizer.json")
    return Loaded(files, model.eval(), transformers.PreTrainedTokenizerFast(tokenizer_file=str(file)))


def codes(pipe: Pipeline, method: str) -> list[list[int]]:
    """Returns the codes of a method's images, with two in flight."""
    tree = None if method == "ar" else TreeShape(6, 3, 12)
    return pipe(TEXTS, Method(method, Sampling(), tree), seed=3, batch_size=2).codes


def inner(model: Any) -> Any:
    """Returns the module that holds the layers."""
    return getattr(model.model, "language_model", getattr(model.model, "text_model", model.model))


def test_images_are_those_of_the_files(loaded: Loaded) -> None:
    """The codes are equal, plain and self-drafted, and the other model still computes the same."""
    theirs = loaded.model
    tokens = torch.randint(60, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = inner(theirs)(tokens).last_hidden_state
    pipe = loaded.ours()
    read = Pipeline(loaded.files.load(need_drafter=False))
    expected = codes(read, "ar")
    assert codes(pipe, "ar") == codes(pipe, "self-draft") == expected and expected[0] != expected[1]
    assert pipe.image(expected[0]).tobytes() == read.image(expected[0]).tobytes()
    with torch.no_grad():
        assert torch.equal(inner(theirs)(tokens).last_hidden_state, before)


def within(view: Tensor, whole: Tensor) -> bool:
    """Tells whether a tensor lies in the memory of another."""
    return view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_weights_are_shared(loaded: Loaded) -> None:
    """All weights but queries and keys are shared. The model is adopted anew, because decoding on a CPU has
    packed its layers."""
    theirs, ours = loaded.model, loaded.ours().model.decoder
    assert within(inner(theirs).embed_tokens.weight, ours.embed.weight)
    assert within(inner(theirs).norm.weight, ours.norm.weight)
    for layer, block in zip(inner(theirs).layers, ours.blocks, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        assert within(attention.v_proj.weight, block.attention.qkv.weight)
        assert within(attention.o_proj.weight, block.attention.out.weight)
        assert within(mlp.down_proj.weight, block.mlp.down.weight)
        assert within(mlp.gate_proj.weight, block.mlp.gate_up.weight)
        assert within(mlp.up_proj.weight, block.mlp.gate_up.weight)
        assert not within(attention.q_proj.weight, block.attention.qkv.weight)  # their rows are reordered
    if not hasattr(theirs.model, "generation_head"):
        assert within(theirs.lm_head.weight, ours.head.weight)
        assert len(ours.head.weight) < len(theirs.lm_head.weight)  # the codes' rows alone
    else:
        assert within(theirs.model.generation_head.vision_head.weight, ours.head.vision_head.weight)


def test_models_of_transformers_that_cannot_be_adopted(load_emu3: Callable[[], Any]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    emu3 = load_emu3()

    def line(model: Any, **options: Any) -> str:
        return refusal(lambda: Pipeline.from_transformers(model, None, options=LoadOptions(**options)))

    given = {"model_path": "x", "height": 64, "device": "gpu", "precision": "bf16"}
    for name, value in given.items():
        assert f"{name} {value}" in line(emu3, **{name: value})
    llama = LlamaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    assert "'llama'" in line(LlamaForCausalLM(llama)) and "None" in line(None)
    emu3.config.quantization_config = {"quant_method": "bitsandbytes"}
    assert "quantised by bitsandbytes" in line(emu3)
    del emu3.config.quantization_config
    for dtype in (torch.float64, torch.float8_e4m3fn):
        assert str(dtype) in line(emu3.to(dtype)) and "torch.bfloat16" in line(emu3)
    assert "meta" in line(emu3.to("meta"))


def test_a_model_that_has_changed_or_has_hooks_is_refused(load_emu3: Callable[[], Any]) -> None:
    """A hook of transformers, which stores outputs, is none of them."""
    emu3 = load_emu3()
    emu3.model(torch.tensor([[1, 2]]), output_hidden_states=True)
    pipe = Pipeline.from_transformers(emu3, None)
    layer = emu3.model.text_model.layers[0]
    assert pipe.model.check is not None
    pipe.model.check()
    for part in (layer.self_attn.q_proj, layer.mlp.down_proj, emu3.lm_head):
        with torch.no_grad():
            part.weight.mul_(-1.0)
        assert "from_transformers again" in refusal(lambda pipe=pipe: pipe.model.encode("sun"))
        pipe = Pipeline.from_transformers(emu3, None)
        pipe.model.check()
    for hook in (layer.register_forward_hook, layer.mlp.register_forward_pre_hook):
        handle = hook(lambda *inputs: None)
        assert "hook on model.text_model.layers.0" in refusal(lambda: Pipeline.from_transformers(emu3, None))
        handle.remove()
    Pipeline.from_transformers(emu3, None)


def test_what_is_no_whole_model_or_no_tokenizer(checkpoints: Checkpoints) -> None:
    import transformers

    path = checkpoints["janus_pro"].path
    model = transformers.JanusForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    for tokenizer in (None, "janus", path, 7):
        line = refusal(lambda tokenizer=tokenizer: Pipeline.from_transformers(model, tokenizer))
        assert "give the tokenizer or processor of the janus model" in line
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    for part in (model.model, model.model.language_model, model.model.language_model.layers):
        assert refusal(lambda part=part: Pipeline.from_transformers(part, tokenizer))


def test_the_callers_tokenizer_stays_as_it_is(checkpoints: Checkpoints) -> None:
    """A processor may hold the chat template that its tokenizer lacks."""
    import transformers

    path = checkpoints["janus_pro"].path
    model = transformers.JanusForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    template, tokenizer.chat_template = tokenizer.chat_template, None
    processor = SimpleNamespace(tokenizer=tokenizer, chat_template=template)
    prompt = Pipeline.from_transformers(model, processor).model.encode("sun")
    assert tokenizer.chat_template is None
    assert prompt == checkpoints["janus_pro"].load(need_drafter=False).encode("sun")


def test_words_that_a_user_has_added_are_words(checkpoints: Checkpoints) -> None:
    """They are encoded as the tokenizer does, also in angle brackets; a special token is still refused."""
    import transformers

    path = checkpoints["janus_pro"].path
    model = transformers.JanusForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["<dog>", "blorp"])
    tokenizer.add_tokens(["<cat>"], special_tokens=True)
    ours = Pipeline.from_transformers(model, tokenizer).model
    ids = set(tokenizer.convert_tokens_to_ids(["<dog>", "blorp"]))
    assert len(ids) == 2 and ids <= {*ours.encode("a <dog> blorp").conditional}
    assert "<cat> is a control token" in refusal(lambda: ours.encode("a <cat>"))


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
