"""Parity of GLM-Image with transformers: prompts, hidden states, logits, greedy codes, and the distribution
of sampled codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adt_tree.grid import Grid, Raster
from adt_tree.method import Method
from adt_tree.pipeline import Pipeline
from adt_tree.policy import TreeShape
from adt_tree.roles import Request
from adt_tree.settings import Sampling
from lab.settings import Control
from models.family import LoadOptions
from models.layouts.glm_image import CELL
from models.loading import load
from models.target import ARTarget, chain_mask
from tests.support import tiny_glm_image as tiny
from tests.support.golden import close
from tests.support.tabular import chi_square

TEXTS = ["a red heart", "a cat in the sun, with a hat", "sea"]
OPTIONS = LoadOptions(device="cpu", precision="fp32", need_drafter=False)
GREEDY, ONE = Sampling(temperature=0.0, guidance=1.0), Sampling(temperature=1.0, guidance=1.0)
SIZES = ((24, 40), (36, 24), (8, 8))  # rows and columns of the image
PREVIEWS = {(24, 40): (12, 20), (36, 24): (19, 13), (8, 8): (16, 16)}
CASES: dict[str, dict[str, Any]] = {
    "half of a head rotates, one key head": {"width": 64, "heads": 2, "kv_heads": 1, "sections": (1, 3, 4)},
    "whole heads rotate, gqa": {"width": 96, "heads": 4, "kv_heads": 2, "factor": 1.0, "sections": (3, 4, 5)},
    "five sections": {"width": 96, "heads": 4, "kv_heads": 4, "sections": (1, 1, 2, 1, 1), "layers": 3},
}
FIRST = next(iter(CASES))


class Theirs:
    """transformers' model and processor of a checkpoint."""

    def __init__(self, folder: Path, codes: int = tiny.CODES) -> None:
        import transformers as hf
        from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

        self.folder, self.codes = folder, range(codes)
        self.model: Any = hf.GlmImageForConditionalGeneration.from_pretrained(folder).eval()
        tokenizer = hf.AutoTokenizer.from_pretrained(folder.parent / tiny.PROCESSOR, padding_side="left")
        template = tokenizer.chat_template
        self.processor = hf.GlmImageProcessor(GlmImageImageProcessorPil(), tokenizer, chat_template=template)

    def ours(self, rows: int, columns: int) -> Pipeline:
        """Returns our model of the same files."""
        options = replace(OPTIONS, height=rows * CELL, width=columns * CELL)
        return Pipeline(load(str(self.folder), options))

    def inputs(self, texts: list[str], grid: Grid) -> Any:
        """Returns the inputs of generate, as diffusers' pipeline gets them from the processor."""
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
        """Returns hidden states and logits along a prompt and the codes of all rasters [n], at the positions
        that generate would give them."""
        inputs = self.inputs([text], grid)
        first = self.model.model(**inputs, use_cache=True)
        then = self.model.model(codes[None], past_key_values=first.past_key_values, use_cache=True)
        hidden = torch.cat((first.last_hidden_state, then.last_hidden_state), dim=1)[0]
        return hidden, self.model.lm_head(hidden)

    def greedy(self, texts: list[str], grid: Grid) -> list[list[int]]:
        """Returns the codes of generate. Tokens that are no codes are masked."""
        inputs, rows = self.inputs(texts, grid), self.model.lm_head.out_features
        masked = list(range(len(self.codes), rows))
        options = {"do_sample": False, "max_new_tokens": grid.size, "suppress_tokens": masked}
        tokens = self.model.generate(**inputs, **options)
        return tokens[:, inputs.input_ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Theirs]:
    """Returns a checkpoint of every case."""
    root = tmp_path_factory.mktemp("glm_image")
    return {name: Theirs(tiny.build(root / str(n), **CASES[name])) for n, name in enumerate(CASES)}


def random_codes(count: int) -> Tensor:
    """Returns random codes of all rasters."""
    return torch.randint(tiny.CODES, (count,), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def along(target: ARTarget, prompt: Any, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns our features and logits along a prompt and codes."""
    before = target.prefill({0: prompt})[0].features[0]
    order = torch.arange(len(codes))[None]
    behind = target.features(codes[None], order, chain_mask(len(codes), target.device), [prompt.length])[0, 0]
    features = torch.cat((before, behind))
    return features, target.logits(features)


@pytest.mark.parametrize(
    ("case", "size", "packs"),
    [*((FIRST, size, True) for size in SIZES), *((case, SIZES[2], False) for case in CASES)],
)
@torch.inference_mode()
def test_hidden_states_and_logits(
    cases: dict[str, Theirs], case: str, size: tuple[int, int], packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares every position of the prompt and of both rasters, with packed layers and with plain ones."""
    if not packs:
        monkeypatch.setattr("models.model.pack", lambda decoder: None)
    theirs, text = cases[case], TEXTS[SIZES.index(size)]
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


@pytest.mark.parametrize(
    ("case", "size", "count"),
    [*((case, (8, 8), 3) for case in CASES), (FIRST, (8, 8), 1), (FIRST, SIZES[1], 3)],
)
def test_greedy_codes(cases: dict[str, Theirs], case: str, size: tuple[int, int], count: int) -> None:
    """Compares the codes of `count` images, plain and self-drafted, that are in flight together."""
    theirs = cases[case]
    pipe, texts = theirs.ours(*size), TEXTS[:count]
    expected = theirs.greedy(texts, pipe.model.grid)
    assert len({tuple(codes) for codes in expected}) == count
    for name, tree in (("ar", None), ("self-draft", TreeShape(9, 3, 20))):
        method, requests = Method(name, GREEDY, tree), pipe.requests(texts, 0)
        done = pipe.engine(method, requests, count).decode(requests)
        assert [codes for _, codes in sorted((image.name, image.codes) for image in done)] == expected, name


SAMPLED = Sampling(temperature=2.5, top_p=0.75, guidance=1.0)
THREE = Grid(1, 2, before=(Raster(1, 1),))  # one code of a preview, two of an image
IMAGES, LIMIT = 2048, 4.0


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    """Returns a model of 24 codes."""
    return Theirs(tiny.build(tmp_path_factory.mktemp("few"), codes=24), codes=24)


@torch.inference_mode()
def logits_of_three(theirs: Theirs) -> Tensor:
    """Returns transformers' logits [24, 24, 3, rows of the head] for the three codes of every image of THREE.
    The first two dimensions are the first two codes."""
    count = len(theirs.codes)
    pairs = torch.cartesian_prod(*2 * [torch.arange(count)])
    prompt = theirs.inputs(["sun"], Grid(8, 8)).items()
    inputs = {name: value.repeat_interleave(len(pairs), dim=0) for name, value in prompt}
    inputs["image_grid_thw"] = torch.tensor([[1, 1, 2], [1, 1, 1]]).repeat(len(pairs), 1)
    before = theirs.model.model(**inputs, use_cache=True)
    behind = theirs.model.model(pairs, past_key_values=before.past_key_values, use_cache=True)
    hidden = torch.cat((before.last_hidden_state[:, -1:], behind.last_hidden_state), dim=1)
    return theirs.model.lm_head(hidden).view(count, count, 3, -1)


def filtered(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Returns the probability [24, 24, 24] of every image of THREE by transformers' own filters. Tokens that
    are no codes are masked before the filters."""
    from transformers import SuppressTokensLogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

    ids: Any = None  # these filters do not read the tokens before
    masked = list(range(len(logits), logits.shape[-1]))
    scores = SuppressTokensLogitsProcessor(masked)(ids, logits.flatten(0, 2))
    scores = TopPLogitsWarper(top_p)(ids, TemperatureLogitsWarper(temperature)(ids, scores))
    p = scores.double().softmax(dim=-1)[:, : len(logits)].unflatten(0, logits.shape[:3])
    # p(a, b, c) = p(a) p(b | a) p(c | a, b)
    return p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]


def distance(counts: Tensor, p: Tensor) -> float:
    """Returns how far counts are from a distribution, in standard scores of chi-square."""
    expected = p * counts.sum()
    assert (expected >= 5).sum() > 30  # enough images are not pooled
    return chi_square(counts, expected)


def counted(theirs: Theirs, images: int, control: Control | None = None) -> Tensor:
    """Returns how often self-drafting generates every image of THREE."""
    pipe = theirs.ours(8, 8)
    pipe = Pipeline(replace(pipe.model, grid=THREE))
    count = len(theirs.codes)
    prompt = pipe.model.encode("sun")
    assert prompt.tokens(0)[-1] == count
    method = Method("self-draft", SAMPLED, TreeShape(2, 3, 6), relaxed=control)
    requests = [Request(str(seed), prompt, seed) for seed in range(images)]
    counts = torch.zeros(count, count, count)
    calls = 0
    for image in pipe.engine(method, requests, 256).decode(requests):
        counts[tuple(image.codes)] += 1
        calls += image.target_calls
    assert calls < 0.98 * 2 * images  # drafts are accepted
    return counts


def test_sampled_codes_follow_transformers_own_probabilities(few: Theirs) -> None:
    """The joint distribution of the codes of both rasters is that of transformers. A slightly different
    filter or temperature fails the same test, and so does a rule that accepts every draft."""
    logits = logits_of_three(few)
    theirs = filtered(logits, SAMPLED.temperature, SAMPLED.top_p)
    assert torch.allclose(theirs.sum(), torch.ones((), dtype=torch.float64))
    counts = counted(few, IMAGES)
    assert abs(distance(counts, theirs)) < LIMIT and counts[theirs == 0].sum() == 0
    assert distance(counts, filtered(logits, 2.3, SAMPLED.top_p)) > 2 * LIMIT
    assert distance(counts, filtered(logits, SAMPLED.temperature, 0.7)) > 2 * LIMIT
    assert distance(counted(few, IMAGES // 4, Control("accept-all")), theirs) > 2 * LIMIT
