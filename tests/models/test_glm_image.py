"""GLM-Image from its files to its codes: where its parts lie, which tensors are read, sizes, sampling, and
what a run without pixels stores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from adt_tree.errors import UserError
from adt_tree.grid import Grid, Raster
from adt_tree.pipeline import Pipeline
from adt_tree.settings import Sampling
from models.checkpoint.weights import Stored, read_weights
from models.family import LoadOptions
from models.footprint import parts, published_dimensions
from models.layouts.glm_image import CODEBOOK, grid_of
from models.loading import load
from models.registry import GLM_IMAGE
from storage.run_folder import read_records
from tests.conftest import Refused, Run
from tests.models.test_from_transformers import within
from tests.support.checkpoints import Checkpoints, Tiny
from tests.support.methods import check_exact
from tests.support.tiny_glm_image import PROCESSOR

OPTIONS = LoadOptions(device="cpu", precision="fp32", need_drafter=False, height=64, width=96)
SMALL = Grid(4, 5, before=(Raster(2, 3),))
TEXTS = ["a red heart", "a very long caption of a blue cat face with a red hat on the sea", "x", "sun"]


@pytest.fixture(scope="module")
def files(checkpoints: Checkpoints) -> Tiny:
    """Returns the published folders, with tiny models in them."""
    return checkpoints["glm_image"]


def test_every_exact_method_makes_the_codes_of_the_ar_baseline(files: Tiny) -> None:
    """The methods include those of the drafter network."""
    check_exact(replace(files.load(), grid=SMALL), TEXTS, Sampling(guidance=1.0))


def test_only_what_decodes_codes_is_read(files: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the vision tower nor the VQ encoder is read."""
    read, names = Stored.read, set()

    def watched(stored: Stored) -> Any:
        names.add(stored.name)
        return read(stored)

    monkeypatch.setattr(Stored, "read", watched)
    model = load(str(files.path), OPTIONS)
    stored = set(read_weights(files.path))
    assert names == {n for n in stored if n.startswith(("model.language_model.", "lm_head."))} | {CODEBOOK}
    assert any(name.startswith("model.visual.") for name in stored - names)
    vectors = read_weights(files.path)[CODEBOOK]
    assert torch.equal(model.codebook, F.normalize(vectors, dim=-1))
    distance = torch.cdist(model.codebook.double(), model.codebook.double()).fill_diagonal_(9)
    assert torch.equal(model.nearest(3)[:, 0], distance.argmin(dim=1))


def test_the_sampling_of_generation_config_is_the_default(files: Tiny) -> None:
    """The repository and the model's folder in it are the same model."""
    root = files.path.parent
    inner, outer = (Pipeline(load(str(folder), OPTIONS)) for folder in (files.path, root))
    assert inner.model.weights_sha == outer.model.weights_sha
    assert inner.model.grid == outer.model.grid == Grid(2, 3, before=(Raster(13, 19),))
    assert inner.sampling == Sampling(0.8, 0, 0.7, 1.0)
    assert inner.default_method == "self-draft"
    with pytest.raises(UserError, match="guidance"):
        inner("sun", sampling=Sampling(guidance=3.0))


def test_the_sampling_of_the_model_card_is_used_without_the_file(files: Tiny, tmp_path: Path) -> None:
    copy = files.copied(tmp_path / "copy")
    (copy.path / "generation_config.json").unlink()
    assert Pipeline(load(str(copy.path), OPTIONS)).sampling == Sampling(0.9, 0, 0.75, 1.0)


def test_a_model_that_transformers_has_loaded(files: Tiny) -> None:
    """The model gives the codes of its files and shares its weights, and its forward pass in transformers
    stays as it was."""
    import transformers as hf

    theirs: Any = hf.GlmImageForConditionalGeneration.from_pretrained(files.path, dtype=torch.float32).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(files.path.parent / PROCESSOR)
    tokens = torch.randint(60, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = theirs(tokens).logits
    pipe, read = (
        Pipeline.from_transformers(theirs, tokenizer, options=OPTIONS),
        Pipeline(load(str(files.path), OPTIONS)),
    )
    ours, layers = pipe.model.decoder, theirs.model.language_model.layers
    for layer, block in zip(layers, ours.blocks, strict=True):
        shared = {layer.mlp.gate_up_proj: block.mlp.gate_up, layer.mlp.down_proj: block.mlp.down}
        shared |= {layer.self_attn.v_proj: block.attention.qkv, layer.self_attn.o_proj: block.attention.out}
        for part, whole in shared.items():
            assert within(part.weight, whole.weight)
    assert within(theirs.lm_head.weight, ours.head.weight) and pipe.sampling == read.sampling
    codes = [pipeline("a red heart", "self-draft", seed=3).codes for pipeline in (pipe, read)]
    assert codes[0] == codes[1] and pipe("a red heart", "ar", seed=3).codes == codes[1]
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, before)


def test_sizes() -> None:
    """As in transformers' processor, the preview has about 256 cells at any size."""
    assert grid_of(1024, 1024) == Grid(32, 32, before=(Raster(16, 16),))
    assert grid_of(36 * 32, 24 * 32) == Grid(36, 24, before=(Raster(19, 13),))
    assert grid_of(256, 256).size == 64 + 256
    assert grid_of(32, 256 * 32).before == (Raster(1, 256),)
    for sides, word in (((0, 32), "height 0"), ((1024, 100), "width 100")):
        with pytest.raises(UserError, match=word):
            grid_of(*sides)


def test_a_run_stores_codes_and_says_so(files: Tiny, run: Run, tmp_path: Path) -> None:
    """The command runs twice, the second time with nothing to do. The sampling that no option sets is that of
    the checkpoint."""
    words = ["generate_images", *files.words(), "--height", 64, "--width", 96, "--top_p", 0.5]
    words += ["--prompt", "a red heart", "--num_images", 2, "--output_dir", tmp_path / "o"]
    for _ in range(2):
        status, out, _ = run(*words)
        summary = json.loads(out.splitlines()[-1])
        assert status == 0 and summary["images"] == 2 and "records/NAME.json" in out
    assert summary["skipped"] == 2 and not list((tmp_path / "o" / "img").iterdir())
    records = list(read_records(tmp_path / "o"))
    assert [len(record.codes) for record in records] == 2 * [13 * 19 + 2 * 3]
    stored = json.loads((tmp_path / "o" / "generation_configs.json").read_text())
    assert (stored["temperature"], stored["top_p"]) == (0.8, 0.5)
    assert {step["raster"] for record in records for step in record.steps} == {0, 1}


def test_commands_that_need_pixels_are_refused(files: Tiny, refused: Refused, tmp_path: Path) -> None:
    assert "pixels" in refused("demo", *files.words())
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    (tmp_path / "x.txt").write_text("sun")
    words = [*files.words(), "--data_path", tmp_path, "--output_dir", tmp_path / "o"]
    assert "pixels" in refused("extract_code", *words) and not (tmp_path / "o").exists()


def test_memory_is_that_of_the_part_that_is_read() -> None:
    """The expected numbers are counted in transformers' model, whose default dimensions are the published
    ones."""
    from transformers import GlmImageConfig, GlmImageForConditionalGeneration

    config = GlmImageConfig()
    text = config.text_config.to_dict()
    published = dict(GLM_IMAGE.networks.target["text_config"])
    published.pop("rope_parameters")  # the published factor is not the class's default
    assert published == {name: text[name] for name in published}
    with torch.device("meta"):
        theirs: Any = GlmImageForConditionalGeneration(config)
    heads = theirs.lm_head.weight[: config.vq_config.num_embeddings]
    expected = sum(p.numel() for p in theirs.model.language_model.parameters()) + heads.numel()
    usual = parts(published_dimensions("glm_image"))
    assert usual["target"] == 2 * expected
    assert usual["codec"] == 4 * theirs.model.vqmodel.quantize.embedding.weight.numel()
    assert published_dimensions("glm_image").tokens == grid_of(1024, 1024).size
    larger = parts(published_dimensions("glm_image", tokens=grid_of(2048, 2048).size))
    # Codes, layers, keys and values, key heads, head size, bytes of bf16.
    more = larger["cache"] - usual["cache"]
    assert more == (4352 - 1280) * 40 * 2 * 2 * 128 * 2 and larger["pixels"] == 0
