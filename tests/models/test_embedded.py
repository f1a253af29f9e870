"""The embedded checkpoint is complete and small, has the same logits in transformers, and gives the same
image by every exact method."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from transformers import ChameleonForConditionalGeneration

from adt_tree.pipeline import Pipeline
from adt_tree.settings import Sampling
from models.model import Model
from models.registry import EMOJI
from storage.prompts import BENCH_FILE, DEFAULT_FILE, HELD_OUT_FILE
from tests.support.checkpoints import load
from tests.support.golden import same_as_transformers
from tests.support.methods import TREES
from training.new_drafter import default_fields, new_drafter

FOLDER = EMOJI.target_folder


@pytest.fixture(scope="module")
def model() -> Model:
    return load("emoji")


def test_files_are_small_and_whole() -> None:
    sizes = [path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()]
    assert max(sizes) <= 16 * 2**20 and sum(sizes) <= 40 * 2**20
    sums = json.loads((FOLDER / "checksums.json").read_text())
    weights = {str(path.relative_to(FOLDER)): path for path in FOLDER.rglob("*.safetensors")}
    assert len(weights) >= 2
    for name, path in weights.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() in json.dumps(sums), name


def test_logits_are_those_of_transformers(model: Model) -> None:
    net = ChameleonForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()
    prompt = model.encode("noto emoji of red heart").conditional
    codes = torch.randint(model.num_codes, (60,), generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([prompt + (codes + model.first_code).tolist()])
    same_as_transformers(model, net, tokens)


def test_exact_methods_make_the_image_of_the_ar_baseline(model: Model) -> None:
    pipe, sampling = Pipeline(model), Sampling(top_k=2000, guidance=3.0)
    plain, *drafted = (
        pipe("twemoji emoji of pizza", name, sampling=sampling, tree=TREES.get(name), seed=7)
        for name in ("ar", "adt-tree", "self-draft")
    )
    assert all(out.codes == plain.codes and out.stats["tau"] > 1.5 for out in drafted)
    assert plain.stats["tau"] == 1 and plain.images[0].size == (model.codec.config.resolution,) * 2


def test_a_new_drafter_passes_features_through(model: Model) -> None:
    """The new layer adds nothing, so the drafter begins with the target's distribution at the previous
    position."""
    net = new_drafter(default_fields(model), model)
    tokens, features = torch.randint(model.num_codes, (2, 5)), torch.randn(2, 5, net.config.hidden_size)
    assert torch.equal(net.causal(tokens, features), net.fuse(tokens, features))
    passed = net.fc.weight[:, net.config.hidden_size :]
    assert torch.equal(passed, torch.eye(net.config.hidden_size))


def test_shipped_prompts_say_what_they_are() -> None:
    unseen = HELD_OUT_FILE.read_text().splitlines()
    assert len(set(BENCH_FILE.read_text().splitlines()) & set(unseen)) == 8 and len(set(unseen)) == 24
    assert not set(DEFAULT_FILE.read_text().splitlines()) & set(unseen)
