"""GLM-Image's codes as pixels: diffusers' pipeline makes the same images from our codes as from its own."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageChops

from adt_tree.engine import Engine
from adt_tree.errors import CheckpointError, UserError
from adt_tree.grid import Grid, Raster
from adt_tree.pipeline import Pipeline
from adt_tree.settings import Sampling
from models.codecs.glm_pixels import CELL, DiffusionDecoder, prior_token_ids
from models.family import LoadOptions
from models.loading import load
from tests.conftest import Run
from tests.models.parity.test_glm_image import Theirs
from tests.support import tiny_glm_image as tiny

OPTIONS = LoadOptions(device="cpu", precision="fp32", need_drafter=False)
GREEDY = Sampling(temperature=0.0, guidance=1.0)
TEXTS = ['a red heart with the word "love"', "a cat"]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a tiny random pipeline of diffusers. As transformers masks no token, its head gives every token
    that is not a code a score of 0."""
    import diffusers
    import transformers as hf

    model = Theirs(tiny.build(tmp_path_factory.mktemp("stage")))
    with torch.no_grad():
        model.model.lm_head.weight[tiny.CODES :] = 0
    model.model.generation_config.update(top_k=1)
    torch.manual_seed(1)
    words = hf.ByT5Tokenizer()
    encoder = hf.T5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    diffusion = diffusers.GlmImageTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        text_embed_dim=16, time_embed_dim=8, condition_dim=4, prior_vq_quantizer_codebook_size=tiny.CODES,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4, 4, 4, 8), down_block_types=4 * ("DownEncoderBlock2D",),
        up_block_types=4 * ("UpDecoderBlock2D",), latent_channels=4, norm_num_groups=2,
        latents_mean=(0.1, 0.0, -0.2, 0.3), latents_std=(1.0, 2.0, 0.5, 1.5),
    )  # fmt: skip
    torch.nn.init.normal_(diffusion.prior_token_embedding.weight)
    encoded = hf.T5EncoderModel(encoder).eval()
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = diffusers.GlmImagePipeline(
        words, model.processor, encoded, model.model, vae.eval(), diffusion.eval(), scheduler
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def repository(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of that pipeline, laid out as the published repository."""
    root = tmp_path_factory.mktemp("repository") / "GLM-Image"
    theirs.save_pretrained(root)
    return root


def pictures(theirs: Any, rows: int, columns: int, prompts: list[str], **more: Any) -> list[Image.Image]:
    """Returns the images of the prompts after two steps of diffusion, from noise of seed 3."""
    size = {"height": rows * CELL, "width": columns * CELL, "num_inference_steps": 2}
    return theirs(prompts, **size, **more, generator=torch.Generator().manual_seed(3)).images


def differ(one: Image.Image, other: Image.Image) -> bool:
    return ImageChops.difference(one, other).getbbox() is not None


@pytest.mark.parametrize(("rows", "columns", "count"), [(2, 3, 1), (3, 2, 2)])
def test_the_whole_pipeline_and_our_codes(theirs: Any, rows: int, columns: int, count: int) -> None:
    """Decodes greedily, as the docstring of models/codecs/glm_pixels.py shows. If one code is changed, its
    image differs."""
    sides, prompts = {"height": rows * CELL, "width": columns * CELL}, TEXTS[:count]
    options = replace(OPTIONS, **sides)
    ours = Pipeline.from_transformers(theirs.vision_language_encoder, theirs.processor, options=options)
    out = ours(prompts, sampling=GREEDY, batch_size=count)
    assert out.images == [] and all(len(set(codes)) > 1 for codes in out.codes)
    prior = prior_token_ids(out.codes, ours.model.grid)
    assert (prior.dtype, prior.shape) == (torch.int64, (count, 4 * rows * columns))
    expected = pictures(theirs, rows, columns, prompts)
    images = pictures(theirs, rows, columns, prompts, prior_token_ids=prior)
    assert [image.size for image in images] == count * [(columns * CELL, rows * CELL)]
    assert not any(map(differ, expected, images))
    changed = [list(codes) for codes in out.codes]
    changed[-1][-1] = (changed[-1][-1] + 1) % tiny.CODES
    other = pictures(
        theirs, rows, columns, prompts, prior_token_ids=prior_token_ids(changed, ours.model.grid)
    )
    assert [*map(differ, expected, other)] == [False, True][-count:]


def test_prior_token_ids() -> None:
    """The codes of the preview are left out, and each code of the image covers 2 x 2 cells."""
    grid = Grid(2, 3, before=(Raster(1, 2),))
    prior = prior_token_ids([[9, 9, 1, 2, 3, 4, 5, 6]], grid)
    rows = [[1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 3, 3], [4, 4, 5, 5, 6, 6], [4, 4, 5, 5, 6, 6]]
    assert prior.tolist() == [sum(rows, [])]


def words_of(repository: Path, folder: Path) -> list[object]:
    """Returns the words of a greedy generate_images."""
    return [
        "generate_images", "--model", "glm_image", "--model_path", repository, "--precision", "fp32",
        "--device", "cpu", "--height", 64, "--width", 96, "--prompt", "a red heart", "--num_images", 2,
        "--temperature", 0, "--output_dir", folder,
    ]  # fmt: skip


def test_a_run_makes_pixels(repository: Path, run: Run, tmp_path: Path) -> None:
    """Pixels are those that diffusers makes from the codes of the record. Each image also has a heat map."""
    status, out, err = run(*words_of(repository, tmp_path / "o"))
    assert status == 0, err
    assert "pixels need" not in out
    model = load(str(repository), replace(OPTIONS, height=64, width=96))
    assert model.diffusion is not None
    for path in sorted((tmp_path / "o" / "records").iterdir()):
        record = json.loads(path.read_text())
        seed = record["statistics"]["seed"]
        expected = model.diffusion.image(record["codes"], model.grid, "a red heart", seed)
        stored = Image.open(tmp_path / "o" / "img" / f"{path.stem}.png")
        assert stored.size == (96, 64) and not differ(stored, expected)
        assert differ(stored, model.diffusion.image(record["codes"], model.grid, "a red heart", seed + 1))
        Image.open(tmp_path / "o" / f"heatmap_{path.stem}.png").verify()


@pytest.mark.parametrize("without", ["diffusers", "transformer"])
def test_codes_first_and_pixels_later(
    repository: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """The second run makes pixels from the stored codes, without a call of the target."""
    copy = tmp_path / "GLM-Image"
    shutil.copytree(repository, copy)
    words = words_of(copy, tmp_path / "o")
    with pytest.MonkeyPatch.context() as patch:
        if without == "diffusers":
            patch.setattr(
                "models.codecs.glm_pixels.find_spec",
                lambda name: None if name == "diffusers" else importlib.util.find_spec(name),
            )
        else:
            (copy / without).rename(tmp_path / without)
        status, out, _ = run(*words)
    assert status == 0 and len(list((tmp_path / "o" / "records").iterdir())) == 2
    assert not list((tmp_path / "o" / "img").iterdir())
    (line,) = [line for line in out.splitlines() if "pixels need" in line]
    assert without in line and "records/NAME.json" in line
    if without == "transformer":
        (tmp_path / without).rename(copy / without)
    before = {path: json.loads(path.read_text())["codes"] for path in (tmp_path / "o" / "records").iterdir()}
    monkeypatch.setattr(Engine, "decode", None)
    status, out, err = run(*words)
    assert status == 0 and len(list((tmp_path / "o" / "img").iterdir())) == 2, err
    assert before == {path: json.loads(path.read_text())["codes"] for path in before}


def test_a_damaged_diffusion_model(repository: Path, tmp_path: Path) -> None:
    copy = tmp_path / "GLM-Image"
    shutil.copytree(repository, copy)
    (file,) = (copy / "transformer").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:1000])
    decoder = DiffusionDecoder(copy, torch.device("cpu"), torch.float32)
    assert decoder.missing == ""
    with pytest.raises(CheckpointError, match="GLM-Image"):
        decoder.image([0], Grid(1, 1), "sun", 0)


def test_a_library_that_cannot_be_imported(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    decoder = DiffusionDecoder(repository, torch.device("cpu"), torch.float32)
    with pytest.raises(UserError, match=r"diffusers.*requirements-glm\.txt"):
        decoder.image([0] * 4, Grid(2, 2), "a red heart", 1)
