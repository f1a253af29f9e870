"""GLM-Image beside transformers: prompts, hidden states, logits, greedy codes, and what is sampled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adt_tree.grid import Grid
from adt_tree.method import Method
from adt_tree.pipeline import Pipeline
from adt_tree.policy import SELF_DRAFTED, TreeShape
from adt_tree.sampling import Sampling
from models.layouts.glm_image import CELL
from models.loading import load
from models.spec import LoadOptions
from models.target import ARTarget, chain_mask
from tests import tiny_glm_image as tiny
from tests.golden import close

TEXTS = ["a red heart", "a cat in the sun, with a hat", "sea"]
OPTIONS = LoadOptions(device="cpu", precision="fp32", need_drafter=False)
GREEDY, ONE = Sampling(temperature=0.0, guidance=1.0), Sampling(temperature=1.0, guidance=1.0)
SIZES = ((24, 40), (36, 24), (8, 8))  # rows and columns of the image
PREVIEWS = {(24, 40): (12, 20), (36, 24): (19, 13), (8, 8): (16, 16)}
CASES: dict[str, dict[str, Any]] = {
    "half a head turns, one key head": {"width": 64, "heads": 2, "kv_heads": 1, "sections": (1, 3, 4)},
    "whole heads turn, gqa": {"width": 96, "heads": 4, "kv_heads": 2, "factor": 1.0, "sections": (3, 4, 5)},
    "five sections": {"width": 96, "heads": 4, "kv_heads": 4, "sections": (1, 1, 2, 1, 1), "layers": 3},
}


class Theirs:
    """transformers' model and processor of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        import transformers as hf
        from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

        self.folder, self.codes = folder, range(tiny.CODES)
        self.model: Any = hf.GlmImageForConditionalGeneration.from_pretrained(folder).eval()
        tokenizer = hf.AutoTokenizer.from_pretrained(folder.parent / tiny.PROCESSOR, padding_side="left")
        template = tokenizer.chat_template
        self.processor = hf.GlmImageProcessor(GlmImageImageProcessorPil(), tokenizer, chat_template=template)

    def ours(self, rows: int, columns: int) -> Pipeline:
        """Our model of the same files."""
        options = replace(OPTIONS, height=rows * CELL, width=columns * CELL)
        return Pipeline(load(str(self.folder), options))

    def inputs(self, texts: list[str], grid: Grid) -> Any:
        """What generate takes, as diffusers' pipeline asks the processor for it."""
        chats = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in texts]
        return self.processor.apply_chat_template(
            chats,
            tokenize=True,
            padding=True,
            target_h=grid.height * CELL,
            target_w=grid.width * CELL,
            return_dict=True,
            return_tensors="pt",
        )

    def states(self, text: str, grid: Grid, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states and logits along a prompt and the codes of all rasters [n], whose positions are those
        that generate would give them."""
        given = self.inputs([text], grid)
        first = self.model.model(**given, use_cache=True)
        then = self.model.model(codes[None], past_key_values=first.past_key_values, use_cache=True)
        hidden = torch.cat((first.last_hidden_state, then.last_hidden_state), dim=1)[0]
        return hidden, self.model.lm_head(hidden)

    def greedy(self, texts: list[str], grid: Grid) -> list[list[int]]:
        """Codes of generate, the rows behind the codes masked."""
        given, scored = self.inputs(texts, grid), self.model.lm_head.out_features
        behind = list(range(len(self.codes), scored))
        how = {"do_sample": False, "max_new_tokens": grid.size, "suppress_tokens": behind}
        found = self.model.generate(**given, **how)
        return found[:, given.input_ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Theirs]:
    """A checkpoint of every case."""
    root = tmp_path_factory.mktemp("glm_image")
    return {name: Theirs(tiny.build(root / str(n), **CASES[name])) for n, name in enumerate(CASES)}


def random_codes(count: int) -> Tensor:
    """Codes of all rasters."""
    return torch.randint(tiny.CODES, (count,), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def along(target: ARTarget, prompt: Any, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Our features and logits along a prompt and codes."""
    before = target.prefill(0, prompt).features[0]
    order = torch.arange(len(codes))[None]
    behind = target.features(codes[None], order, chain_mask(len(codes), target.device), 0)[0, 0]
    features = torch.cat((before, behind))
    return features, target.logits(features)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_hidden_states_and_logits(
    made: dict[str, Theirs], case: str, size: tuple[int, int], packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every position of the prompt and of both rasters, with layers that decoding has packed or not."""
    if not packs:
        monkeypatch.setattr("models.target.pack", lambda decoder: None)
    theirs, text = made[case], TEXTS[SIZES.index(size)]
    model = theirs.ours(*size).model
    assert [(part.height, part.width) for part in model.grid.rasters] == [PREVIEWS[size], size]
    codes, prompt = random_codes(model.grid.size), model.encode(text)
    assert prompt.tokens(0) == theirs.inputs([text], model.grid).input_ids[0].tolist()
    target = model.target(1, ONE, model.grid.size, prompt.length + 5)
    assert isinstance(target, ARTarget)
    features, logits = along(target, prompt, codes)
    hidden, scored = theirs.states(text, model.grid, codes)
    close(features, hidden)
    close(logits, scored[:, : tiny.CODES])
    assert logits.std() > 0.1


def check_greedy(theirs: Theirs, size: tuple[int, int], count: int) -> None:
    """Whole sequences, plain and self-drafted, `count` at a time."""
    pipe, texts = theirs.ours(*size), TEXTS[:count]
    expected = theirs.greedy(texts, pipe.model.grid)
    assert len({tuple(codes) for codes in expected}) == count
    for name, tree in (("ar", None), ("self-draft", TreeShape(9, 3, 20)), ("adt-self-draft", SELF_DRAFTED)):
        engine, requests = Method(name, GREEDY, tree), pipe.requests(texts, 0)
        done = pipe.engine(engine, requests, count).decode(requests)
        assert [codes for _, codes in sorted((image.name, image.codes) for image in done)] == expected, name


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_greedy_codes(made: dict[str, Theirs], case: str, count: int) -> None:
    check_greedy(made[case], (8, 8), count)


@pytest.mark.parametrize("size", SIZES[:2])
def test_greedy_codes_of_larger_images(made: dict[str, Theirs], size: tuple[int, int]) -> None:
    check_greedy(next(iter(made.values())), size, 3)
