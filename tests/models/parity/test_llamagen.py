"""Parity of LlamaGen's targets with the official class and with the released HF-style one."""

from __future__ import annotations

import pytest
import torch

from adt_tree.batch import BatchSlots
from adt_tree.decode import autoregressive, finished
from adt_tree.noise import Noise
from adt_tree.noise_table import NoiseTable
from adt_tree.roles import Request
from adt_tree.settings import Sampling
from adt_tree.tree import DraftTree
from models.decoder.transformer import rotary_table
from tests.support.decoding import accept, chain, codes_of
from tests.support.golden import close, llamagen, tensors


@pytest.mark.parametrize(("family", "side"), [("t2i", 8), ("t2i", 16), ("c2i", 6)])
def test_teacher_forced_logits(family: str, side: int) -> None:
    """A prompt of 120 rows and one of 9 rows behind padding are in flight together. The recorded codes are
    scored as one chain."""
    recorded = tensors(f"llamagen/{family}_expected")
    start = f"grid{side}." if family == "t2i" else ""
    tokens, expected = recorded[f"{start}teacher_tokens"], recorded[f"{start}teacher_logits"]
    every = torch.arange(0, 36, 3)
    positions = recorded[f"{start}teacher_positions"].long() if start else every
    model = llamagen(family, side)
    target = model.target(2, tokens.shape[1])
    prefixes = [*target.prefill(dict(enumerate(model.prompts()))).values()]
    first = torch.stack([prefix.logits for prefix in prefixes], dim=1)
    scored = target.forward(chain(tokens.long()), [0, 0])
    logits = torch.cat((first[:, :, None], scored.logits), dim=2)[:, :, positions]
    close(logits.flatten(0, 1), expected)
    close(first.flatten(0, 1), expected[:, 0])


def test_rotary_table() -> None:
    model, expected = llamagen("t2i", 8), tensors("llamagen/t2i_expected")["grid8.table"]
    table = rotary_table(model.decoder.config)[:, :, 0]
    torch.testing.assert_close(table[: len(expected)], expected, atol=1e-6, rtol=1e-6)
    assert not table[len(expected) :].any() and not table[:120].any()


def test_prefill_logits_of_real_rows() -> None:
    recorded = tensors("llamagen/t2i_expected")
    model = llamagen("t2i", 8)
    target, positions = model.target(2, 1), recorded["grid8.prefill_positions"].long()
    for slot, prompt in enumerate(model.prompts()):
        real = positions >= 120 - len(prompt.conditional)
        for branch, features in enumerate(target.prefill({slot: prompt})[slot].features):
            expected = recorded["grid8.prefill_logits"][2 * branch + slot]
            close(model.decoder.head(features[positions[real]]), expected[real])


@pytest.mark.parametrize("padding_attends", [False, True])
def test_prefill_features(padding_attends: bool) -> None:
    """All rows are compared, also those of padding, under both rules of the released class."""
    recorded = tensors("llamagen/t2i_hf_expected")
    expected = recorded["prefill_hidden_padrule_fp32"].clone()
    if not padding_attends:
        expected[[1, 3]] = recorded["prefill_hidden_padrule_bf16"]
    model = llamagen("t2i", 16)
    target = model.target(2, 1)
    for slot, prompt in enumerate(model.prompts(padding_attends)):
        for branch, features in enumerate(target.prefill({slot: prompt})[slot].features):
            close(features, expected[2 * branch + slot])


def test_tree_pass() -> None:
    """A recorded tree follows ten committed codes; their features are compared as well."""
    recorded = tensors("llamagen/t2i_hf_expected")
    tokens = tensors("llamagen/t2i_expected")["grid16.teacher_tokens"]
    model = llamagen("t2i", 16)
    target = model.target(1, 26)
    target.prefill({0: model.prompts()[0]})
    prefix = recorded["tree_prefix_tokens"][None]
    assert prefix.tolist() == tokens[:1, :10].tolist()
    before = chain(prefix.long())
    scored = target.forward(before, [0])
    close(scored.features[:, 0], recorded["teacher_hidden_first24"][[0, 2], :10])
    target.commit(before, accept([[*range(10)]]))
    mask = recorded["tree_mask"].bool()[None]
    depths = recorded["tree_position_ids_relative"].long()[None]
    codes = recorded["tree_tokens"].long()
    tree = DraftTree(codes, torch.zeros_like(codes), depths, mask, mask[:, :, 0], int(depths.max()), 10)
    scored = target.forward(tree, [10])
    close(scored.features[:, 0], recorded["tree_hidden"])
    close(scored.logits[:, 0], recorded["tree_logits"])


@pytest.mark.parametrize(("family", "side", "guidance"), [("t2i", 8, 3.0), ("t2i", 16, 3.0), ("c2i", 6, 4.0)])
def test_greedy_tokens(family: str, side: int, guidance: float) -> None:
    """The recorded prompts are in flight at once."""
    recorded, model = tensors(f"llamagen/{family}_expected"), llamagen(family, side)
    sampling, target = Sampling(temperature=0.0, guidance=guidance), model.target(2, 1)
    noise = NoiseTable(Noise(model.num_codes, silent=True), target, 1)
    requests = [Request(str(n), prompt, 0) for n, prompt in enumerate(model.prompts())]
    slots = BatchSlots(target, noise, [target.release], sampling)
    images = codes_of(finished(autoregressive(target, slots, requests)))
    expected = recorded[f"grid{side}.greedy_tokens" if family == "t2i" else "greedy_tokens"]
    assert [images["0"], images["1"]] == expected.tolist()
