"""Parity with Lumina-mGPT: hidden states with one norm for all heads, the row grammar, greedy tokens."""

from __future__ import annotations

import pytest
import torch

from adt_tree.engine import build
from adt_tree.grid import Grid
from adt_tree.method import Method
from adt_tree.roles import Request
from adt_tree.settings import Sampling
from models.decoder.transformer import Decoder
from models.drafter import DrafterNet
from models.layouts.chameleon import SIZES, decoder_config, grid_of
from models.llama_names import decoder_names, gather
from models.target import Prompt
from tests.adt_tree.test_row_ends import TREES
from tests.support.decoding import codes_of, model_of
from tests.support.golden import FIRST_CODE, anole, close, tensors, values

BEGIN, ROW_END, END = 8197, 8803, 8196
CODES = 8192
RUNS = ("grid2x2.cfg3.0", "grid1x3.cfg4.0", "grid3x2.cfg3.0", "grid24x24.cfg3.0", "grid24x24.cfg1.0")


def test_hidden_states_and_logits() -> None:
    """Norms of queries and keys are stored once for all heads. A left-padded row is compared without its
    padding."""
    shape = decoder_config(values("lumina/meta")["target"])
    decoder, recorded = Decoder(shape), tensors("lumina/expected")
    decoder.load_state_dict(gather(tensors("lumina/target"), decoder_names(shape), shape))
    first, count = FIRST_CODE, recorded["logits"].shape[-1]
    for row, mask in enumerate(recorded["attention_mask"].bool()):
        with torch.no_grad():
            hidden = decoder.causal(recorded["input_ids"][row, mask][None])[0]
            close(hidden, recorded["hidden"][row, mask])
            close(decoder.head(hidden)[:, first : first + count], recorded["logits"][row, mask])


@pytest.fixture(scope="module")
def models() -> tuple[Decoder, DrafterNet]:
    """Returns the recorded Anole with the norms of Lumina, and a drafter of the same shape."""
    recorded, models = tensors("lumina/e2e"), anole()
    config = values("anole")["target"]
    shape, state = decoder_config(config), tensors("anole_target")
    table = models.decoder.embed.weight.clone()
    table[recorded["rows"]] = recorded["embed_rows"]
    state["model.embed_tokens.weight"], state["lm_head.weight"] = table, models.decoder.head.weight
    state |= {name: tensor for name, tensor in recorded.items() if "_norm." in name}
    decoder = Decoder(shape)
    decoder.load_state_dict(gather(state, decoder_names(shape), shape))
    decoder.cut_head(FIRST_CODE, CODES)
    return decoder.eval().requires_grad_(False), models.net


@pytest.mark.parametrize("name", ["ar", "eagle-2", "self-draft"])
@pytest.mark.parametrize("run", RUNS)
def test_greedy_tokens(models: tuple[Decoder, DrafterNet], run: str, name: str) -> None:
    """The tokens equal the reference's, row ends included; of the large grid, the first rows do."""
    recorded, facts = tensors("lumina/e2e"), values("lumina/meta")["runs"][run]
    expected = recorded[f"{run}.tokens"].tolist()
    rows, width = 2 * facts["h_grids"], 2 * facts["w_grids"]
    rows = min(rows, 3) if width == 48 else rows
    sampling = Sampling(temperature=0.0, guidance=facts["cfg"])
    model = model_of(*models, Grid(rows, width, row_ends=True), FIRST_CODE, torch.zeros(CODES, 1), ROW_END)
    opening = [BEGIN, *(SIZES + 4 + facts[side] for side in ("h_grids", "w_grids"))]
    request = Request("0", Prompt(recorded["prompt_ids"].tolist() + opening, opening), 0)
    engine = build(model, Method(name, sampling, TREES[name]), 1, 12)
    ((_, codes),) = codes_of(engine.decode([request])).items()
    tokens = []
    for start in range(0, len(codes), width):
        tokens += [code + FIRST_CODE for code in codes[start : start + width]] + [ROW_END]
    assert [*tokens, END][: len(expected)] == expected


@pytest.mark.parametrize("name", values("lumina/meta")["grammar"])
def test_grammar(name: str) -> None:
    """Our row ends stand where the reference forces its token. It also forces one after the last row, and the
    end of the image."""
    facts = values("lumina/meta")["grammar"][name]
    grid = Grid(facts["rows"], facts["columns"], row_ends=True)
    forced = [*filter(grid.is_row_end, range(grid.length)), grid.length]
    assert facts["forced"] == [*([place, ROW_END] for place in forced), [grid.length + 1, END]]
    assert facts["tokens"] == facts["forced"][-1][0] + 1


def test_grids_of_sizes() -> None:
    """768 pixels are 48 x 48 cells. A size that is not a whole number of pairs of cells is refused."""
    assert [grid_of(size, 16).width for size in (512, 768, 1024)] == [32, 48, 64]
    for size in (100, 16, 776):
        with pytest.raises(ValueError, match=f"target_size {size}"):
            grid_of(size, 16)
