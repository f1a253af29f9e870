"""Parity of Janus-Pro with transformers on checkpoints that its own save_pretrained wrote: hidden states,
guided logits, the greedy image tokens of generate, pixels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adt_tree.method import Method
from adt_tree.pipeline import Pipeline
from adt_tree.policy import SELF_DRAFTED, TreeShape
from adt_tree.sampling import Sampling, guide
from models.layouts.janus import decoder_config, from_janus
from models.loading import load
from models.model import Model
from models.spec import LoadOptions
from models.transformer import Decoder
from tests import tiny_janus
from tests.conftest import Refused, Run
from tests.golden import close

GREEDY = Sampling(temperature=0.0, guidance=5.0)
SIZES: dict[str, dict[str, int]] = {
    "mha": {},
    "gqa, one aligner layer": {"kv_heads": 2, "aligner": 1},
    "wider, deeper": {"width": 64, "layers": 3, "heads": 4, "kv_heads": 1},
}
TEXTS = ["a red heart", "a cat in the sun, with a hat", "sea"]
METHODS = (
    Method("ar", GREEDY),
    Method("self-draft", GREEDY, TreeShape(9, 3, 20)),
    Method("adt-self-draft", GREEDY, SELF_DRAFTED),
)


@pytest.fixture(scope="module", params=SIZES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each size."""
    return tiny_janus.build(tmp_path_factory.mktemp("janus") / "tiny", **SIZES[request.param])


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """transformers' model."""
    from transformers import JanusForConditionalGeneration

    return JanusForConditionalGeneration.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def ours(folder: Path) -> Model:
    """Our model of the same files."""
    return load(str(folder), LoadOptions(device="cpu", precision="fp32", need_drafter=False))


def prompt_ids(folder: Path, texts: list[str]) -> Any:
    """Ids and mask as transformers' tokenizer makes them of the chat template and the begin of image."""
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(folder, padding_side="left")
    chats = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in texts]
    turns = own.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return own([turn + tiny_janus.IMAGE for turn in turns], padding=True, return_tensors="pt")


def test_prompts(folder: Path, ours: Model) -> None:
    """The chat's turn, begin of image last; the unconditional branch is as long, its text padded over."""
    ids = prompt_ids(folder, TEXTS[:1]).input_ids[0].tolist()
    prompt: Any = ours.encode(TEXTS[0])
    assert prompt.conditional == ids and ids[0] == 1 and ids[-1] == 4
    assert prompt.unconditional == [1, *[0] * (len(ids) - 2), 4]


def test_hidden_states_and_guided_logits(theirs: Any, ours: Model) -> None:
    """Teacher-forced over a prompt and codes, both branches."""
    prompt: Any = ours.encode(TEXTS[1])
    codes = torch.randint(tiny_janus.CODES, (16,), generator=torch.Generator().manual_seed(0))
    shape = decoder_config(theirs.config.to_dict())
    fresh = Decoder(shape).eval()  # no target has packed it
    fresh.load_state_dict(from_janus(theirs.state_dict(), shape))
    hidden, logits = [], []
    with torch.no_grad():
        for ids in (prompt.conditional, prompt.unconditional):
            text = theirs.get_input_embeddings()(torch.tensor(ids))
            embedded = torch.cat((text, theirs.prepare_embeddings_for_image_generation(codes)))
            states = theirs.model.language_model(inputs_embeds=embedded[None]).last_hidden_state[0]
            tokens = torch.tensor([[*ids, *(codes + ours.first_code).tolist()]])
            mine = fresh.causal(tokens)[0]
            close(mine, states)
            hidden.append(states)
            logits.append(fresh.head(mine))
        expected = guide(torch.stack([theirs.model.generation_head(x) for x in hidden]), 5.0)
        close(guide(torch.stack(logits), 5.0), expected)


@pytest.mark.parametrize("count", [1, 3])
def test_greedy_tokens(folder: Path, theirs: Any, ours: Model, count: int) -> None:
    """generate(generation_mode="image") and ours: whole images, plain and self-drafted."""
    inputs = prompt_ids(folder, TEXTS[:count])
    expected = theirs.generate(
        **inputs, generation_mode="image", do_sample=False, guidance_scale=5.0
    ).tolist()
    assert len({tuple(codes) for codes in expected}) == count and len(set(expected[0])) > 2
    for method in METHODS:
        assert Pipeline(ours)(TEXTS[:count], method, batch_size=count).codes == expected


def test_pixels(theirs: Any, ours: Model) -> None:
    """The codec's pictures, within 1 of 255; the checkpoint's processor scales by .5 and .5."""
    codes = torch.randint(tiny_janus.CODES, (16,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        pixels = theirs.decode_image_tokens(codes[None])[0]
    expected = ((pixels + 1) / 2 * 255).clip(0, 255)
    found = np.asarray(ours.image(codes.tolist())).astype(float)
    assert np.abs(found - expected.numpy()).max() <= 1 and expected.std() > 1


def test_bench_beside_transformers(run: Run, refused: Refused, folder: Path, tmp_path: Path) -> None:
    """One run has both; at temperature 0 transformers' own generate makes our images."""
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
