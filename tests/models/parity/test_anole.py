"""Parity of the target with recorded values of transformers' Chameleon."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from adt_tree.grid import Grid
from models.cell_tokens import CellIds
from models.decoder.packed import pack
from models.decoder.transformer import Decoder
from models.layouts.chameleon import decoder_config
from models.llama_names import decoder_names, gather
from models.target import ARTarget, Prompt
from tests.support.decoding import accept, chain, tree_of
from tests.support.golden import FIRST_CODE, anole, close, tensors, values

PROMPT, PREFIX = 9, 17  # recorded: prompt tokens, tokens in the cache before the tree pass


@dataclass(frozen=True)
class Recorded:
    """A recorded model. Its logits are those of the image codes `columns`."""

    decoder: Decoder
    values: dict[str, Tensor]
    codes: int
    columns: Tensor

    def branches(self) -> list[Tensor]:
        """Returns the conditional row, and the unconditional one without its padding."""
        pairs = zip(self.values["input_ids"], self.values["attention_mask"], strict=True)
        return [ids[mask.bool()] for ids, mask in pairs]


@pytest.fixture(scope="module", params=["tiny ids", "published ids"])
def recorded(request: pytest.FixtureRequest) -> Recorded:
    """Returns both recorded models."""
    if request.param == "published ids":
        expected, models = tensors("anole_expected"), anole()
        models.decoder.embed.weight[expected["rows"]] = expected["embed_rows"]
        models.decoder.cut_head(FIRST_CODE, 8192)
        return Recorded(models.decoder, expected, 8192, expected["columns"])
    config, codes = decoder_config(values("anole_tiny")), 256
    model = Decoder(config)
    model.load_state_dict(gather(tensors("anole_tiny_weights"), decoder_names(config), config))
    model.cut_head(FIRST_CODE, codes)
    model.eval().requires_grad_(False)
    return Recorded(model, tensors("anole_tiny_expected"), codes, torch.arange(codes))


def test_causal(recorded: Recorded) -> None:
    for row, tokens in enumerate(recorded.branches()):
        hidden = recorded.decoder.causal(tokens[None])[0]
        close(hidden, recorded.values["hidden"][row, -len(tokens) :])
        logits = recorded.decoder.head(hidden)[:, recorded.columns]
        close(logits, recorded.values["logits"][row, -len(tokens) :])


def test_through_the_cache(recorded: Recorded) -> None:
    """A prefill, a chain of committed codes and a tree are compared, in both guidance branches without
    padding."""
    rows, known, columns = recorded.branches(), recorded.values, recorded.columns
    length = known["input_ids"].shape[1]
    prompts = [tokens[: len(tokens) - (length - PROMPT)].tolist() for tokens in rows]
    pack(recorded.decoder)
    ids = CellIds(range(FIRST_CODE, FIRST_CODE + recorded.codes))
    target = ARTarget(recorded.decoder, Grid(8, 8), ids, 1, 2, PROMPT, 16)
    prefix = target.prefill({0: Prompt(*prompts)})[0]
    for row, features in enumerate(prefix.features):
        close(features, known["hidden"][row, PROMPT - len(features) : PROMPT])
    close(prefix.logits[:, columns], known["logits"][:, PROMPT - 1])

    tree = chain((rows[0][PROMPT:PREFIX] - FIRST_CODE)[None])
    scored = target.forward(tree, [0])
    close(scored.logits[:, 0, :, columns], known["logits"][:, PROMPT:PREFIX])
    close(scored.features[:, 0], known["hidden"][:, PROMPT:PREFIX])
    target.commit(tree, accept([[*range(tree.nodes)]]))

    below = tree_of(known["tree_tokens"][None] - FIRST_CODE, known["tree_parents"].clamp_min(0)[None])
    assert torch.equal(below.ancestors[0], known["tree_mask"].bool())
    positions = known["tree_position_ids"][0]
    assert below.depths[0].tolist() == (positions - positions[0]).tolist()
    scored = target.forward(below, [tree.nodes])
    close(scored.logits[:, 0, :, columns], known["tree_logits"])
    close(scored.features[:, 0], known["tree_hidden"])
