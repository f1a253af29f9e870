"""Parity of Janus-Pro and Emu3 with transformers on checkpoints that its own save_pretrained wrote: prompts,
hidden states, guided logits, the greedy tokens of generate, pixels."""

from __future__ import annotations

import json
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
from models.layouts import emu3, janus
from models.layouts.llama import decoder_names, gather
from models.loading import load
from models.model import Model
from models.spec import LoadOptions
from models.transformer import Decoder
from tests import tiny_emu3, tiny_janus
from tests.conftest import Refused, Run
from tests.golden import close

TEXTS = ["a red heart", "a cat in the sun, with a hat", "sea"]
OPTIONS = LoadOptions(device="cpu", precision="fp32", need_drafter=False)
CODES = 64  # of both
IDS = tiny_emu3.vocabulary()
FIRST = IDS["<|visual token 000000|>"]


class Theirs:
    """A model of transformers, its tokenizer, and ours of the same files."""

    kind: str
    guidance: float
    options = OPTIONS

    def __init__(self, folder: Path) -> None:
        import transformers

        self.folder, self.ours = folder, load(str(folder), self.options)
        self.model: Any = getattr(transformers, self.kind).from_pretrained(folder).eval()
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")

    def batch(self, texts: list[str]) -> Any:
        """Ids and mask of texts that are opened already."""
        return self.tokenizer(texts, padding=True, return_tensors="pt")


class Janus(Theirs):
    """Janus-Pro."""

    kind, guidance = "JanusForConditionalGeneration", 5.0

    def inputs(self, texts: list[str], grid: Grid) -> Any:
        """Ids and mask by the chat template and the begin of image."""
        chats = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in texts]
        turns = self.tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        return self.batch([turn + tiny_janus.IMAGE for turn in turns])

    def prompt(self, text: str, grid: Grid) -> tuple[list[int], list[int]]:
        """The chat's turn, begin of image last; uncond is as long, its text padded over."""
        ids = self.inputs([text], grid).input_ids[0].tolist()
        assert ids[0] == 1 and ids[-1] == 4
        return ids, [1, *[0] * (len(ids) - 2), 4]

    def tokens(self, codes: Tensor) -> list[int]:
        """An image in our token ids; codes [h, w]."""
        return (300 + codes).flatten().tolist()

    def decoder(self) -> Decoder:
        """Ours with these weights, packed by no target."""
        shape = janus.decoder_config(self.model.config.to_dict())
        decoder = Decoder(shape).eval()
        decoder.load_state_dict(janus.from_janus(self.model.state_dict(), shape))
        return decoder

    def states(self, ids: list[int], codes: Tensor) -> tuple[Tensor, Tensor]:
        """Features and logits of codes along a prompt and a whole image."""
        text = self.model.get_input_embeddings()(torch.tensor(ids))
        image = self.model.prepare_embeddings_for_image_generation(codes.flatten())
        embedded = torch.cat((text, image))[None]
        hidden = self.model.model.language_model(inputs_embeds=embedded).last_hidden_state[0]
        return hidden, self.model.model.generation_head(hidden)

    def greedy(self, texts: list[str], grid: Grid) -> list[list[int]]:
        """Images of generate."""
        how = {"generation_mode": "image", "do_sample": False, "guidance_scale": self.guidance}
        return [self.tokens(codes) for codes in self.model.generate(**self.inputs(texts, grid), **how)]

    def pixels(self, codes: Tensor) -> Tensor:
        """[H, W, 3] in [-1, 1]."""
        return self.model.decode_image_tokens(codes.view(1, -1))[0]


class Emu3(Theirs):
    """Emu3, whose rows of codes end in a token."""

    kind, guidance = "Emu3ForConditionalGeneration", 3.0
    options = replace(OPTIONS, target_size=tiny_emu3.SIZE)

    def inputs(self, texts: list[str], grid: Grid) -> Any:
        """Ids and mask, opened as transformers' processor does for image generation."""
        own = self.tokenizer
        opening = f"{own.boi_token}{grid.height}*{grid.width}{own.image_wrapper_token}"
        return self.batch([f"{own.bos_token}{text}{opening}" for text in texts])

    def prompt(self, text: str, grid: Grid) -> tuple[list[int], list[int]]:
        """Text and negative prompt, each with the image's size and opening."""
        cond, uncond = (self.inputs([x], grid).input_ids[0].tolist() for x in (text, emu3.NEGATIVE))
        assert cond[0] == IDS[tiny_emu3.BEGIN] and cond[-1] == IDS[tiny_emu3.IMAGE_TOKEN]
        return cond, uncond

    def tokens(self, codes: Tensor) -> list[int]:
        """An image in token ids, separators included; codes [h, w]."""
        ends = torch.full((len(codes), 1), IDS[tiny_emu3.ROW_END])
        return torch.cat((FIRST + codes, ends), dim=1).flatten().tolist()

    def decoder(self) -> Decoder:
        """Ours with these weights."""
        shape = emu3.decoder_config(self.model.config.to_dict())
        decoder = Decoder(shape)
        decoder.load_state_dict(
            gather(self.model.state_dict(), decoder_names(shape, "model.text_model."), shape)
        )
        return decoder

    def states(self, ids: list[int], codes: Tensor) -> tuple[Tensor, Tensor]:
        """Features and logits of codes along a prompt and a whole image."""
        hidden = self.model.model.text_model(torch.tensor([ids + self.tokens(codes)])).last_hidden_state[0]
        return hidden, self.model.lm_head(hidden)[:, FIRST : FIRST + CODES]

    def greedy(self, texts: list[str], grid: Grid) -> list[list[int]]:
        """Images of generate over the forced grid: the tokens allowed next as transformers documents them."""
        width, last = grid.width + 1, (grid.width + 1) * grid.height
        names = (tiny_emu3.FRAME_END, tiny_emu3.IMAGE_END, tiny_emu3.END)
        behind = {last + n: [IDS[name]] for n, name in enumerate(names, 1)}

        def allowed(_: int, ids: Tensor) -> list[int]:
            offset = len(ids) - int((ids == IDS[tiny_emu3.IMAGE_TOKEN]).nonzero()[0, 0])
            row_end = [IDS[tiny_emu3.ROW_END]] if offset % width == 0 else None
            return behind.get(offset) or row_end or list(range(FIRST, FIRST + CODES))

        given, negative = self.inputs(texts, grid), self.inputs([emu3.NEGATIVE] * len(texts), grid)
        found = self.model.generate(
            **given,
            do_sample=False,
            guidance_scale=self.guidance,
            negative_prompt_ids=negative.input_ids,
            negative_prompt_attention_mask=negative.attention_mask,
            prefix_allowed_tokens_fn=allowed,
            max_new_tokens=last + 3,
        )
        start = given.input_ids.shape[1]
        assert all(row == [IDS[name] for name in names] for row in found[:, start + last :].tolist())
        return found[:, start : start + last].tolist()

    def pixels(self, codes: Tensor) -> Tensor:
        """[H, W, 3] in [-1, 1]."""
        tokens = torch.tensor([*self.tokens(codes), 0, 0, 0])[None]
        height, width = codes.shape
        found = self.model.decode_image_tokens(image_tokens=tokens, height=height, width=width)
        return found[0].permute(1, 2, 0)


CASES: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "janus, mha": (tiny_janus, Janus, {}),
    "janus, gqa, one aligner layer": (tiny_janus, Janus, {"kv_heads": 2, "aligner": 1}),
    "janus, wider, deeper": (tiny_janus, Janus, {"width": 64, "layers": 3, "kv_heads": 1}),
    "emu3, mha": (tiny_emu3, Emu3, {}),
    "emu3, gqa": (tiny_emu3, Emu3, {"kv_heads": 2}),
    "emu3, wider, deeper": (tiny_emu3, Emu3, {"width": 64, "layers": 3, "kv_heads": 1}),
}


@pytest.fixture(scope="module", params=CASES)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Janus | Emu3:
    """A checkpoint of each family and size."""
    tiny, kind, sizes = CASES[request.param]
    return kind(tiny.build(tmp_path_factory.mktemp("pair") / "tiny", **sizes))


def random_codes(seed: int) -> Tensor:
    """An image of 4 x 4 codes."""
    return torch.randint(CODES, (4, 4), generator=torch.Generator().manual_seed(seed))


def test_prompts(theirs: Janus | Emu3) -> None:
    prompt: Any = theirs.ours.encode(TEXTS[0])
    assert (prompt.conditional, prompt.unconditional) == theirs.prompt(TEXTS[0], theirs.ours.grid)


@torch.inference_mode()
def test_hidden_states_and_guided_logits(theirs: Janus | Emu3) -> None:
    """Teacher-forced over a prompt and codes, both branches."""
    codes, decoder, mine, expected = random_codes(0), theirs.decoder(), [], []
    for ids in theirs.prompt(TEXTS[1], theirs.ours.grid):
        whole = torch.tensor([ids + theirs.tokens(codes)])
        hidden, logits = theirs.states(ids, codes)
        features = decoder.causal(whole)[0]
        close(features, hidden)
        scored = decoder.head(features)
        mine.append(scored if scored.shape[1] == CODES else scored[:, FIRST : FIRST + CODES])
        expected.append(logits)
    behind = slice(-len(theirs.tokens(codes)), None)
    close(*(guide(torch.stack([x[behind] for x in part]), 5.0) for part in (mine, expected)))


def check_greedy(theirs: Janus | Emu3, ours: Model, texts: list[str]) -> None:
    """Whole images, plain and self-drafted."""
    expected, greedy = theirs.greedy(texts, ours.grid), Sampling(0.0, guidance=theirs.guidance)
    assert len({tuple(tokens) for tokens in expected}) == len(texts)
    for name, tree in (("ar", None), ("self-draft", TreeShape(9, 3, 20)), ("adt-self-draft", SELF_DRAFTED)):
        found = Pipeline(ours)(texts, Method(name, greedy, tree), batch_size=len(texts)).codes
        images = [torch.tensor(codes).view(ours.grid.height, ours.grid.width) for codes in found]
        assert [theirs.tokens(codes) for codes in images] == expected and len(set(found[0])) > 2


@pytest.mark.parametrize("count", [1, 3])
def test_greedy_tokens(theirs: Janus | Emu3, count: int) -> None:
    check_greedy(theirs, theirs.ours, TEXTS[:count])


@pytest.mark.parametrize("theirs", [name for name in CASES if "emu3" in name], indirect=True)
def test_wide_grid(theirs: Janus | Emu3) -> None:
    """An image that is no square."""
    wide = load(str(theirs.folder), replace(Emu3.options, ratio="5:3"))
    assert wide.grid == Grid(3, 5)
    check_greedy(theirs, wide, TEXTS[:1])


@torch.inference_mode()
def test_pixels(theirs: Janus | Emu3) -> None:
    """The codec's pictures, within 1 of 255; the checkpoint's processor scales by .5 and .5."""
    codes = random_codes(1)
    expected = ((theirs.pixels(codes) + 1) / 2 * 255).clip(0, 255)
    found = np.asarray(theirs.ours.image(codes.flatten().tolist())).astype(float)
    assert np.abs(found - expected.numpy()).max() <= 1 and expected.std() > 1


def test_grids_of_sizes() -> None:
    """Emu3's: 90 x 90 at the default; other ratios as transformers' processor rounds them."""
    assert emu3.grid_of(720, "1:1", 8) == Grid(90, 90)
    assert emu3.grid_of(720, "16:9", 8) == Grid(68, 120) and emu3.grid_of(720, "3:4", 8) == Grid(104, 78)
    for ratio in ("16", "0:9", "a:b", ""):
        with pytest.raises(ValueError, match="--ratio"):
            emu3.grid_of(720, ratio, 8)
    with pytest.raises(ValueError, match="no whole cell"):
        emu3.grid_of(2, "1:1", 8)


def test_bench_beside_transformers(run: Run, refused: Refused, tmp_path: Path) -> None:
    """One run has both; at temperature 0 transformers' own generate makes our images."""
    folder = tiny_janus.build(tmp_path / "tiny", kv_heads=2)
    words = ["bench", "--model", "janus_pro", "--model_path", folder, "--precision", "fp32"]
    words += "--device cpu --methods self-draft --num_images 2 --warmup 0 --reference transformers".split()
    status, out, _ = run(*words, "--output_dir", tmp_path / "bench")
    assert status == 0
    rows = json.loads(out.splitlines()[-1])["rows"]
    found = {(row["method"], row["temperature"]): row for row in rows}
    for method in ("self-draft", "transformers"):
        assert found[method, 0.0]["same_image"] == 1 and found[method, 0.0]["SR"] > 0
    assert found["self-draft", 1.0]["same_image"] == 1 and not found["transformers", 1.0]["exact"]
    assert "always guides" in refused(*words, "--cfg", "1", "--output_dir", tmp_path / "other")
