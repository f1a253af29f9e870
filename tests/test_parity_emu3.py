"""Parity of Emu3 with transformers on checkpoints that its own save_pretrained wrote: hidden states, guided
logits, the greedy tokens of generate over the forced grid, pixels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from adt_tree.grid import Grid
from adt_tree.method import Method
from adt_tree.pipeline import Pipeline
from adt_tree.policy import SELF_DRAFTED, TreeShape
from adt_tree.sampling import Sampling, guide
from models.layouts.chameleon import from_chameleon
from models.layouts.emu3 import NEGATIVE, decoder_config, grid_of
from models.loading import load
from models.model import Model
from models.spec import LoadOptions
from models.transformer import Decoder
from tests import tiny_emu3
from tests.golden import close

GREEDY = Sampling(temperature=0.0, guidance=3.0)
SIZES: dict[str, dict[str, int]] = {
    "mha": {},
    "gqa": {"kv_heads": 2},
    "wider, deeper": {"width": 64, "layers": 3, "kv_heads": 1},
}
TEXTS = ["a red heart", "a cat in the sun, with a hat", "sea"]
METHODS = (
    Method("ar", GREEDY),
    Method("self-draft", GREEDY, TreeShape(9, 3, 20)),
    Method("adt-self-draft", GREEDY, SELF_DRAFTED),
)
IDS = tiny_emu3.vocabulary()
OPTIONS = LoadOptions(device="cpu", precision="fp32", need_drafter=False, target_size=tiny_emu3.SIZE)
FIRST = IDS["<|visual token 000000|>"]


@pytest.fixture(scope="module", params=SIZES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each size."""
    return tiny_emu3.build(tmp_path_factory.mktemp("emu3") / "tiny", **SIZES[request.param])


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """transformers' model."""
    from transformers import Emu3ForConditionalGeneration

    return Emu3ForConditionalGeneration.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def ours(folder: Path) -> Model:
    """Our model of the same files, over 4 x 4 codes."""
    return load(str(folder), OPTIONS)


def inputs(folder: Path, texts: list[str], grid: Grid) -> Any:
    """Ids and mask of texts, opened as transformers' processor does for image generation."""
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(folder, padding_side="left")
    opening = f"{own.boi_token}{grid.height}*{grid.width}{own.image_wrapper_token}"
    return own([f"{own.bos_token}{text}{opening}" for text in texts], padding=True, return_tensors="pt")


def forced(grid: Grid) -> Callable[[int, Tensor], list[int]]:
    """The tokens allowed next, as transformers documents them: the grid's, separators, the image's end."""
    width, last = grid.width + 1, (grid.width + 1) * grid.height
    behind = {last + 1: tiny_emu3.FRAME_END, last + 2: tiny_emu3.IMAGE_END, last + 3: tiny_emu3.END}

    def allowed(_: int, ids: Tensor) -> list[int]:
        offset = len(ids) - int((ids == IDS[tiny_emu3.IMAGE_TOKEN]).nonzero()[0, 0])
        if offset in behind:
            return [IDS[behind[offset]]]
        if offset % width == 0:
            return [IDS[tiny_emu3.ROW_END]]
        return list(range(FIRST, FIRST + tiny_emu3.CODES))

    return allowed


def generate(theirs: Any, folder: Path, texts: list[str], grid: Grid) -> list[list[int]]:
    """Tokens behind the prompts, to the end of the image, by transformers' generate."""
    conditional, negative = inputs(folder, texts, grid), inputs(folder, [NEGATIVE] * len(texts), grid)
    found = theirs.generate(
        **conditional,
        do_sample=False,
        guidance_scale=3.0,
        negative_prompt_ids=negative.input_ids,
        negative_prompt_attention_mask=negative.attention_mask,
        prefix_allowed_tokens_fn=forced(grid),
        max_new_tokens=(grid.width + 1) * grid.height + 3,
    )
    return found[:, conditional.input_ids.shape[1] :].tolist()


def test_prompts(folder: Path, ours: Model) -> None:
    """Text and negative prompt, each with the image's size and opening."""
    prompt: Any = ours.encode(TEXTS[0])
    for ids, text in ((prompt.conditional, TEXTS[0]), (prompt.unconditional, NEGATIVE)):
        assert ids == inputs(folder, [text], ours.grid).input_ids[0].tolist()
        assert ids[0] == IDS[tiny_emu3.BEGIN] and ids[-1] == IDS[tiny_emu3.IMAGE_TOKEN]


def test_hidden_states_and_guided_logits(theirs: Any, ours: Model) -> None:
    """Teacher-forced over a prompt and a grid, both branches; transformers guides log-probabilities, which
    shifts every row by a constant."""

    shape = decoder_config(theirs.config.to_dict())
    fresh = Decoder(shape)
    fresh.load_state_dict(from_chameleon(theirs.state_dict(), shape, "model.text_model."))
    codes = torch.randint(tiny_emu3.CODES, (4, 4), generator=torch.Generator().manual_seed(0)) + FIRST
    rows = torch.cat((codes, torch.full((4, 1), IDS[tiny_emu3.ROW_END])), dim=1).flatten()
    prompt: Any = ours.encode(TEXTS[1])
    mine, expected, count = [], [], len(rows)
    with torch.no_grad():
        for ids in (prompt.conditional, prompt.unconditional):
            tokens = torch.cat((torch.tensor(ids), rows))[None]
            hidden = theirs.model.text_model(tokens).last_hidden_state
            close(fresh.causal(tokens), hidden)
            expected.append(theirs.lm_head(hidden)[0, -count:].log_softmax(dim=-1))
            mine.append(fresh.head(fresh.causal(tokens))[0, -count:])
    image = slice(FIRST, FIRST + tiny_emu3.CODES)
    guided = (guide(torch.stack(part)[..., image], 3.0) for part in (mine, expected))
    close(*(logits.log_softmax(dim=-1) for logits in guided))


@pytest.mark.parametrize("count", [1, 3])
def test_greedy_tokens(folder: Path, theirs: Any, ours: Model, count: int) -> None:
    """generate over the forced grid and ours: whole images, plain and self-drafted."""
    expected = generate(theirs, folder, TEXTS[:count], ours.grid)
    assert len({tuple(tokens) for tokens in expected}) == count and len(set(expected[0])) > 6
    for method in METHODS:
        found = Pipeline(ours)(TEXTS[:count], method, batch_size=count).codes
        assert [grid_tokens(codes, ours.grid) for codes in found] == expected


def grid_tokens(codes: list[int], grid: Grid) -> list[int]:
    """What a whole image is in tokens."""
    found = []
    for start in range(0, grid.size, grid.width):
        found += [code + FIRST for code in codes[start : start + grid.width]] + [IDS[tiny_emu3.ROW_END]]
    return found + [IDS[name] for name in (tiny_emu3.FRAME_END, tiny_emu3.IMAGE_END, tiny_emu3.END)]


def test_wide_grid(folder: Path, theirs: Any) -> None:
    """An image that is no square."""
    wide, model = Grid(3, 5), load(str(folder), replace(OPTIONS, ratio="5:3"))
    assert model.grid == wide
    expected = generate(theirs, folder, TEXTS[:1], wide)[0]
    for method in METHODS:
        assert grid_tokens(Pipeline(model)(TEXTS[0], method).codes[0], wide) == expected


def test_pixels(theirs: Any, ours: Model) -> None:
    """The codec's pictures, within 1 of 255."""
    codes = torch.randint(tiny_emu3.CODES, (4, 4), generator=torch.Generator().manual_seed(1))
    rows = torch.cat((codes + FIRST, torch.full((4, 1), IDS[tiny_emu3.ROW_END])), dim=1).flatten()
    tokens = torch.cat((rows, torch.zeros(3, dtype=torch.int64)))[None]
    pixels = theirs.decode_image_tokens(image_tokens=tokens, height=4, width=4)[0]
    expected = ((pixels + 1) / 2 * 255).clip(0, 255).permute(1, 2, 0)
    found = np.asarray(ours.image(codes.flatten().tolist())).astype(float)
    assert np.abs(found - expected.numpy()).max() <= 1 and expected.std() > 1


def test_grids_of_sizes() -> None:
    """90 x 90 at the default; other ratios as transformers' processor rounds them."""
    assert grid_of(720, "1:1", 8) == Grid(90, 90)
    assert grid_of(720, "16:9", 8) == Grid(68, 120) and grid_of(720, "3:4", 8) == Grid(104, 78)
    for ratio in ("16", "0:9", "a:b", ""):
        with pytest.raises(ValueError, match="--ratio"):
            grid_of(720, ratio, 8)
    with pytest.raises(ValueError, match="no whole cell"):
        grid_of(2, "1:1", 8)
