"""Parity of Janus-Pro, Emu3, SimpleAR and Liquid with transformers, on checkpoints that its save_pretrained
wrote: hidden states, guided logits, greedy tokens, and the pixels of the first two."""

from __future__ import annotations

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
from adt_tree.policy import TreeShape
from adt_tree.sampling import guide
from adt_tree.settings import Sampling
from models.family import LoadOptions
from models.layouts import emu3, simplear
from models.loading import load
from tests.support import tiny_transformers as tiny
from tests.support.golden import close

TEXTS = ["a red heart", "a cat in the sun, with a hat", "sea"]
OPTIONS = LoadOptions(device="cpu", precision="fp32", need_drafter=False)
IDS = tiny.emu3_vocabulary()
FIRST = IDS["<|visual token 000000|>"]


class Theirs:
    """A model of transformers with its tokenizer, and our model of the same files."""

    kind: str
    guidance: float
    options = OPTIONS

    def __init__(self, folder: Path) -> None:
        import transformers

        self.folder, self.ours = folder, load(str(folder), self.options)
        self.model: Any = getattr(transformers, self.kind).from_pretrained(folder).eval()
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")

    def batch(self, texts: list[str]) -> Any:
        """Returns ids and mask of texts that end in the tokens which open an image: Janus-Pro's begin of
        image; Emu3's begin of image, size and image wrapper."""
        return self.tokenizer(texts, padding=True, return_tensors="pt")


class Janus(Theirs):
    """Janus-Pro."""

    kind, guidance = "JanusForConditionalGeneration", 5.0

    def inputs(self, texts: list[str], grid: Grid) -> Any:
        """Returns ids and mask, with the chat template and the begin of image."""
        chats = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in texts]
        turns = self.tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        return self.batch([turn + tiny.BEGIN_OF_IMAGE for turn in turns])

    def tokens(self, codes: Tensor) -> list[int]:
        """Returns the token ids of an image's codes [h, w]."""
        return (300 + codes).flatten().tolist()

    def states(self, ids: list[int], codes: Tensor) -> tuple[Tensor, Tensor]:
        """Returns features and logits of codes along a prompt and a whole image."""
        text = self.model.get_input_embeddings()(torch.tensor(ids))
        image = self.model.prepare_embeddings_for_image_generation(codes.flatten())
        embedded = torch.cat((text, image))[None]
        hidden = self.model.model.language_model(inputs_embeds=embedded).last_hidden_state[0]
        return hidden, self.model.model.generation_head(hidden)

    def greedy(self, texts: list[str], grid: Grid) -> list[list[int]]:
        """Returns the images that generate gives."""
        options = {"generation_mode": "image", "do_sample": False, "guidance_scale": self.guidance}
        return [self.tokens(codes) for codes in self.model.generate(**self.inputs(texts, grid), **options)]

    def pixels(self, codes: Tensor) -> Tensor:
        """Returns pixels [H, W, 3] in [-1, 1]."""
        return self.model.decode_image_tokens(codes.view(1, -1))[0]


class Emu3(Theirs):
    """Emu3, whose rows of codes end in a token."""

    kind, guidance = "Emu3ForConditionalGeneration", 3.0
    options = replace(OPTIONS, target_size=tiny.SIZE)

    def inputs(self, texts: list[str], grid: Grid) -> Any:
        """Returns ids and mask, opened as transformers' processor does for image generation."""
        tokenizer = self.tokenizer
        opening = f"{tokenizer.boi_token}{grid.height}*{grid.width}{tokenizer.image_wrapper_token}"
        return self.batch([f"{tokenizer.bos_token}{text}{opening}" for text in texts])

    def tokens(self, codes: Tensor) -> list[int]:
        """Returns the token ids of an image's codes [h, w], separators included."""
        ends = torch.full((len(codes), 1), IDS[tiny.ROW_END])
        return torch.cat((FIRST + codes, ends), dim=1).flatten().tolist()

    def states(self, ids: list[int], codes: Tensor) -> tuple[Tensor, Tensor]:
        """Returns features and logits of codes along a prompt and a whole image."""
        hidden = self.model.model.text_model(torch.tensor([ids + self.tokens(codes)])).last_hidden_state[0]
        return hidden, self.model.lm_head(hidden)[:, FIRST : FIRST + tiny.CODES]

    def greedy(self, texts: list[str], grid: Grid) -> list[list[int]]:
        """Returns the images of generate on this grid. The tokens allowed at each place are those that
        transformers documents."""
        width, last = grid.width + 1, (grid.width + 1) * grid.height
        names = (tiny.FRAME_END, tiny.IMAGE_END, tiny.END)
        behind = {last + n: [IDS[name]] for n, name in enumerate(names, 1)}

        def allowed(_: int, ids: Tensor) -> list[int]:
            offset = len(ids) - int((ids == IDS[tiny.IMAGE_TOKEN]).nonzero()[0, 0])
            row_end = [IDS[tiny.ROW_END]] if offset % width == 0 else None
            return behind.get(offset) or row_end or list(range(FIRST, FIRST + tiny.CODES))

        inputs, negative = self.inputs(texts, grid), self.inputs([emu3.NEGATIVE] * len(texts), grid)
        tokens = self.model.generate(
            **inputs,
            do_sample=False,
            guidance_scale=self.guidance,
            negative_prompt_ids=negative.input_ids,
            negative_prompt_attention_mask=negative.attention_mask,
            prefix_allowed_tokens_fn=allowed,
            max_new_tokens=last + 3,
        )
        start = inputs.input_ids.shape[1]
        assert all(row == [IDS[name] for name in names] for row in tokens[:, start + last :].tolist())
        return tokens[:, start : start + last].tolist()

    def pixels(self, codes: Tensor) -> Tensor:
        """Returns pixels [H, W, 3] in [-1, 1]."""
        tokens = torch.tensor([*self.tokens(codes), 0, 0, 0])[None]
        height, width = codes.shape
        pixels = self.model.decode_image_tokens(image_tokens=tokens, height=height, width=width)
        return pixels[0].permute(1, 2, 0)


class Plain(Theirs):
    """A language model whose codes are its last tokens. transformers cannot generate its images, so the
    published loop stands here, without a cache."""

    first: int  # token id of code 0

    def prompts(self, text: str) -> tuple[str, str]:
        """Returns the published prompts of both branches."""
        raise NotImplementedError

    def guided(self, conditional: Tensor, unconditional: Tensor) -> Tensor:
        """Returns the published guidance of logits."""
        return unconditional + self.guidance * (conditional - unconditional)

    def tokens(self, codes: Tensor) -> list[int]:
        """Returns the token ids of an image's codes [h, w]."""
        return (self.first + codes).flatten().tolist()

    def states(self, ids: list[int], codes: Tensor) -> tuple[Tensor, Tensor]:
        """Returns features and logits of codes along a prompt and a whole image."""
        hidden = self.model.model(torch.tensor([ids + self.tokens(codes)])).last_hidden_state[0]
        return hidden, self.model.lm_head(hidden)[:, self.first :]

    @torch.inference_mode()
    def greedy(self, texts: list[str], grid: Grid) -> list[list[int]]:
        """Returns the images of the published loop, in which only codes are allowed."""
        images = []
        for text in texts:
            branches = [self.tokenizer(prompt).input_ids for prompt in self.prompts(text)]
            image: list[int] = []
            for _ in range(grid.size):
                logits = [self.model(torch.tensor([ids + image])).logits[0, -1] for ids in branches]
                image.append(self.first + int(self.guided(*logits)[self.first :].argmax()))
            images.append(image)
        return images


class SimpleAR(Plain):
    """SimpleAR, whose released code guides log-probabilities of the whole vocabulary."""

    kind, guidance, first = "Qwen2ForCausalLM", 6.0, len(tiny.SIMPLEAR_TEXT)
    options = replace(OPTIONS, target_size=64)

    def prompts(self, text: str) -> tuple[str, str]:
        return f"<|t2i|>A highly realistic image of {text}<|soi|>", f"<|t2i|>{simplear.NEGATIVE}<|soi|>"

    def guided(self, conditional: Tensor, unconditional: Tensor) -> Tensor:
        return super().guided(conditional.log_softmax(-1), unconditional.log_softmax(-1))


class Liquid(Plain):
    """Liquid."""

    kind, guidance, first = "GemmaForCausalLM", 7.0, len(tiny.LIQUID_TEXT)

    def prompts(self, text: str) -> tuple[str, str]:
        return f"{text} Generate an image based on this description.<boi>", "<unconditional><boi>"


CASES: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "janus, mha": (tiny.janus, Janus, {}),
    "janus, gqa, one aligner layer": (tiny.janus, Janus, {"kv_heads": 2, "aligner": 1}),
    "janus, wider, deeper": (tiny.janus, Janus, {"width": 64, "layers": 3, "kv_heads": 1}),
    "emu3, mha": (tiny.emu3, Emu3, {}),
    "emu3, gqa": (tiny.emu3, Emu3, {"kv_heads": 2}),
    "emu3, wider, deeper": (tiny.emu3, Emu3, {"width": 64, "layers": 3, "kv_heads": 1}),
    "simplear, tied": (tiny.simplear, SimpleAR, {}),
    "simplear, untied, wider, deeper": (
        tiny.simplear,
        SimpleAR,
        {"width": 64, "layers": 3, "kv_heads": 2, "tied": False},
    ),
    "liquid, mha": (tiny.liquid, Liquid, {}),
    "liquid, mqa, deeper, small heads": (
        tiny.liquid,
        Liquid,
        {"width": 64, "layers": 3, "kv_heads": 1, "head_size": 6},
    ),
}
WITH_PIXELS = ["janus, gqa, one aligner layer", "emu3, gqa"]


@pytest.fixture(scope="module", params=CASES)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a checkpoint of each family and size."""
    build, kind, sizes = CASES[request.param]
    return kind(build(tmp_path_factory.mktemp("pair") / "tiny", **sizes))


def random_codes(seed: int) -> Tensor:
    """Returns an image of 4 x 4 random codes."""
    return torch.randint(tiny.CODES, (4, 4), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def test_hidden_states_and_guided_logits(theirs: Any) -> None:
    """The codes behind a prompt are teacher-forced in both branches. The layers are not packed, because no
    target was made."""
    codes, model, ours, expected = random_codes(0), load(str(theirs.folder), theirs.options), [], []
    prompt: Any = model.encode(TEXTS[1])
    for ids in (prompt.conditional, prompt.unconditional):
        whole = torch.tensor([ids + theirs.tokens(codes)])
        hidden, logits = theirs.states(ids, codes)
        features = model.decoder.causal(whole)[0]
        close(features, hidden)
        ours.append(model.decoder.head(features))
        close(ours[-1], logits)
        expected.append(logits)
    behind = slice(-len(theirs.tokens(codes)), None)
    close(*(guide(torch.stack([x[behind] for x in part]), 5.0) for part in (ours, expected)))


@pytest.mark.parametrize(
    ("theirs", "count", "ratio"),
    [*((name, 3, None) for name in CASES), ("emu3, gqa", 1, "5:3")],
    indirect=["theirs"],
)
def test_greedy_tokens(theirs: Any, count: int, ratio: str | None) -> None:
    """Whole images are compared, plain and self-drafted; one of Emu3's is not square."""
    ours, texts = theirs.ours, TEXTS[:count]
    if ratio:
        ours = load(str(theirs.folder), replace(theirs.options, ratio=ratio))
        assert ours.grid == Grid(3, 5, row_ends=True)
    expected, greedy = theirs.greedy(texts, ours.grid), Sampling(0.0, guidance=theirs.guidance)
    assert len({tuple(tokens) for tokens in expected}) == count
    for name, tree in (("ar", None), ("self-draft", TreeShape(9, 3, 20))):
        codes_of_texts = Pipeline(ours)(texts, Method(name, greedy, tree), batch_size=count).codes
        images = [torch.tensor(codes).view(ours.grid.height, ours.grid.width) for codes in codes_of_texts]
        assert [theirs.tokens(codes) for codes in images] == expected and len(set(codes_of_texts[0])) > 2


@torch.inference_mode()
@pytest.mark.parametrize("theirs", WITH_PIXELS, indirect=True)
def test_pixels(theirs: Any) -> None:
    """The pictures differ by less than 1.01 of 255: ours are rounded down to whole numbers. The checkpoint's
    processor scales by 0.5 and 0.5."""
    codes = random_codes(1)
    expected = ((theirs.pixels(codes) + 1) / 2 * 255).clip(0, 255)
    pixels = np.asarray(theirs.ours.image(codes.flatten().tolist())).astype(float)
    assert np.abs(pixels - expected.numpy()).max() < 1.01 and expected.std() > 1


@torch.inference_mode()
def test_what_is_special_in_gemma_is_exact_in_bf16(tmp_path: Path) -> None:
    """Scaled embeddings and norms equal transformers' bit for bit."""
    theirs = Liquid(tiny.liquid(tmp_path / "tiny"))
    ours = load(str(theirs.folder), replace(OPTIONS, precision="bf16")).decoder
    model = theirs.model.bfloat16()
    ids, x = torch.arange(theirs.first), torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours.embed(ids), model.model.embed_tokens(ids))
    assert torch.equal(ours.norm(x.bfloat16()), model.model.norm(x.bfloat16()))


def test_grids_of_sizes() -> None:
    """Emu3 has 90 x 90 cells by default; other ratios are rounded as transformers' processor rounds them."""
    for ratio, rows, columns in (("1:1", 90, 90), ("16:9", 68, 120), ("3:4", 104, 78)):
        assert emu3.grid_of(720, ratio, 8) == Grid(rows, columns, row_ends=True)
    for ratio in ("16", "0:9", "a:b", ""):
        with pytest.raises(ValueError, match="ratio"):
            emu3.grid_of(720, ratio, 8)
    with pytest.raises(ValueError, match="target_size 2, ratio 1:1"):
        emu3.grid_of(2, "1:1", 8)
