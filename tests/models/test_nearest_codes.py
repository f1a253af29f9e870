"""Tables of nearest codes: the published file is read, checked against the codebook, and equals the computed
table."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from adt_tree.errors import CheckpointError
from adt_tree.lantern import nearest_table
from models.codecs.nearest_codes import find_table, read_table
from tests.support.checkpoints import load
from tests.support.golden import tensors
from tests.support.refusal import refusal

AMBIGUOUS = 5748  # the recorded row with two distances that fp32 cannot tell apart


@pytest.fixture(scope="module")
def codebook() -> Tensor:
    """Returns LlamaGen's recorded codebook [256, 8]."""
    return tensors("llamagen/vq-3")["quantize.embedding.weight"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Returns the table of that codebook as the released code writes it."""
    path = tmp_path / "top_255_indices.npy"
    np.save(path, tensors("nearest")["llamagen_table"].numpy().astype(np.uint16))
    return path


def test_the_released_table_is_read_and_computed(codebook: Tensor, table: Path) -> None:
    read, computed = read_table(table, codebook, 200), nearest_table(codebook, 255)
    assert read.dtype == torch.int64 and read.shape == (256, 200)
    assert read_table(table, codebook, 0).shape == (256, 0)
    assert torch.equal(read[:, :16], computed[:, :16])
    assert int((read_table(table, codebook, 255) != computed).any(dim=1).sum()) <= 1  # recorded: one near-tie


def test_columns_of_the_chameleon_table(tmp_path: Path) -> None:
    recorded = tensors("nearest")
    rows, codebook = recorded["chameleon_rows"], recorded["chameleon_codebook"]
    computed, expected = nearest_table(codebook, 12), recorded["chameleon_first12"].long()
    differing = rows[(computed[rows] != expected).any(dim=1)]
    assert set(differing.tolist()) <= {AMBIGUOUS}
    path = tmp_path / "top_8191_indices.npy"
    np.save(path, computed.numpy().astype(np.uint16))
    assert torch.equal(read_table(path, codebook, 5), computed[:, :5])


def test_where_tables_lie(table: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert find_table((tmp_path / "empty", tmp_path), 256) == table
    assert find_table((table,), 9) == table  # a file is taken whatever its name
    assert find_table((tmp_path,), 9) is None and find_table((), 256) is None


DAMAGE: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "rows": (lambda t: t[:100], "100.*256"),
    "columns": (lambda t: t[:, :3], "lantern_k"),
    "range": (lambda t: t + 1, "256"),
    "self": (lambda t: np.where(t == 7, np.arange(256)[:, None], t).astype(np.uint16), "nearest first"),
    "order": (lambda t: t[:, ::-1], "nearest first"),
    "other": (lambda t: np.roll(t, 1, axis=1), "nearest first"),
    "floats": (lambda t: t.astype(np.float32), "float32"),
    "flat": (lambda t: t[0], "uint16"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_does_not_fit_is_one_line(codebook: Tensor, table: Path, kind: str) -> None:
    change, named = DAMAGE[kind]
    np.save(table, change(np.load(table)))
    assert re.search(f"{table}.*{named}", refusal(lambda: read_table(table, codebook, 40), CheckpointError))


def test_half_a_file(codebook: Tensor, table: Path) -> None:
    table.write_bytes(table.read_bytes()[:5000])
    assert str(table) in refusal(lambda: read_table(table, codebook, 10), CheckpointError)


def test_a_model_reads_its_table_where_it_lies(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    computed = load("emoji", folder, need_drafter=False).nearest(9)
    np.save(folder / "top_63_indices.npy", computed.numpy().astype(np.uint16))
    monkeypatch.setattr("models.model.nearest_table", None)
    model = load("emoji", folder, need_drafter=False)
    assert torch.equal(model.nearest(5), computed[:, :5])
    assert torch.equal(model.nearest(5, folder), computed[:, :5])
    with pytest.raises(CheckpointError, match="lantern_k"):
        model.nearest(20)
    with pytest.raises(CheckpointError, match="lantern_table nowhere"):
        model.nearest(5, Path("nowhere"))
