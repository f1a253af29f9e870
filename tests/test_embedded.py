"""The embedded checkpoint: whole, small, the same in transformers, drawn alike by every exact method."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from transformers import ChameleonForConditionalGeneration

from adt_tree.method import build
from adt_tree.policy import AdaptiveTree, TreeShape
from adt_tree.roles import Request
from eval.prompts import DEFAULT_FILE, HELD_OUT_FILE, UNSEEN_FILE
from models.model import Model
from models.registry import EMOJI
from tests.loading import load
from tests.methods import method_of

LAW = {"temperature": 1.0, "top_k": 2000, "top_p": 1.0, "cfg": 3.0}


@pytest.fixture(scope="module")
def model() -> Model:
    return load("emoji", None, None, "fp32", "cpu", need_drafter=True)


def test_files_are_small_and_whole() -> None:
    sizes = [path.stat().st_size for path in EMOJI.rglob("*") if path.is_file()]
    assert max(sizes) <= 16 * 2**20 and sum(sizes) <= 80 * 2**20
    sums = json.loads((EMOJI / "checksums.json").read_text())
    weights = {str(path.relative_to(EMOJI)): path for path in EMOJI.rglob("*.safetensors")}
    assert len(weights) >= 2
    for name, path in weights.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() in json.dumps(sums), name


def test_licences_name_every_style() -> None:
    text = (EMOJI / "README.md").read_text() + (EMOJI / "licences.json").read_text()
    assert all(word in text for word in ("Apache-2.0", "CC-BY", "MIT", "Twitter", "Google", "Microsoft"))


def test_logits_are_those_of_transformers(model: Model) -> None:
    net = ChameleonForConditionalGeneration.from_pretrained(EMOJI, dtype=torch.float32).eval()
    prompt = model.encode("noto emoji of red heart").conditional
    codes = torch.randint(model.num_codes, (60,), generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([prompt + (codes + model.first_code).tolist()])
    with torch.inference_mode():
        theirs = net.lm_head(net.model(input_ids=tokens).last_hidden_state)
        ours = model.decoder.head(model.decoder.causal(tokens))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert theirs.abs().max() > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_exact_methods_draw_the_image_of_plain_decoding(model: Model, temperature: float) -> None:
    law = {**LAW, "temperature": temperature}
    methods = [
        method_of(**law),
        method_of(**law, shape=TreeShape(5, 4, 24)),
        method_of(**law, adapt=AdaptiveTree()),
        method_of(**law, static="mc_sim_7b_63"),
        method_of(**law, shape=TreeShape(16, 3, 23), drafter="self-draft"),
    ]
    prompt = model.encode("twemoji emoji of pizza")
    images = []
    for method in methods:
        arm = build(model, method, 1, model.prompt_length(prompt))
        images.append(next(iter(arm.decode(iter([Request("0", prompt, 7)])))))
    assert len({tuple(image.codes) for image in images}) == 1
    assert images[0].tau == 1 and all(image.tau > 1.5 for image in images[1:])
    assert model.image(images[0].codes).size == (model.codec.config.resolution,) * 2


def test_shipped_prompts_say_what_they_are() -> None:
    unseen = UNSEEN_FILE.read_text().splitlines()
    assert set(HELD_OUT_FILE.read_text().splitlines()) <= set(unseen) and len(set(unseen)) == 24
    assert not set(DEFAULT_FILE.read_text().splitlines()) & set(unseen)
