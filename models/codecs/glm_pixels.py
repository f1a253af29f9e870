"""Turns GLM-Image's codes into pixels by its diffusion model, which diffusers' GlmImagePipeline runs.

The diffusion model lies in the published repository beside the autoregressive stage. It reads the codes of
the image's raster, each repeated over 2 x 2 cells, and an encoding of the text that the prompt quotes.
diffusers calls these codes prior_token_ids; a pipeline that gets them skips its autoregressive stage:

    ours = Pipeline.from_transformers(theirs.vision_language_encoder, theirs.processor)
    codes = prior_token_ids(ours(prompt).codes, ours.model.grid)
    image = theirs(prompt, height=1024, width=1024, prior_token_ids=codes).images[0]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from adt_tree.errors import UserError
from adt_tree.grid import Grid
from models.checkpoint.files import reading

CELL = 32  # pixels along the side of a code's cell, as in transformers' processor
SCALE = 2  # cells of the diffusion model along the side of a code's cell
AR_STAGE = ("vision_language_encoder", "processor")  # components that are not loaded here
FILES = ("model_index.json", "scheduler", "text_encoder", "tokenizer", "transformer", "vae")
SETUP = "bash scripts/setup.sh requirements-glm.txt"


def prior_token_ids(codes: Sequence[Sequence[int]], grid: Grid) -> Tensor:
    """Returns prior_token_ids of GlmImagePipeline for B images: [B, 4 * height * width] int64, the codes of
    the image's raster, each repeated over 2 x 2 cells.

    codes: of every image the codes of all rasters of the grid, the preview's first, as Output.codes has them.
    """
    last = [list(image[grid.starts[-1] :]) for image in codes]
    raster = torch.tensor(last, dtype=torch.int64, device="cpu")
    rows = raster.view(len(codes), grid.height, grid.width).repeat_interleave(SCALE, dim=1)
    return rows.repeat_interleave(SCALE, dim=2).flatten(1)


@dataclass(slots=True)
class DiffusionDecoder:
    """GLM-Image's diffusion model, which decodes an image's codes and its prompt into pixels.

    It is loaded when it decodes its first image. Its steps and its guidance are diffusers' defaults.
    """

    folder: Path  # the published repository
    device: torch.device
    dtype: torch.dtype
    _pipeline: Any = field(default=None, repr=False)

    @property
    def missing(self) -> str:
        """The reason why there can be no pixels, for the user; empty if files and library are there."""
        absent = [name for name in FILES if not (self.folder / name).exists()]
        if absent:
            return f"pixels need {', '.join(absent)} in {self.folder}: fetch the whole repository"
        return "" if find_spec("diffusers") else f"pixels need diffusers: {SETUP}"

    def image(self, codes: Sequence[int], grid: Grid, prompt: str, seed: int) -> Image.Image:
        """Returns the RGB image of the codes of all rasters of the grid, CELL pixels a cell.

        The noise that diffusion begins with follows from the seed alone: it is generated on the CPU.
        UserError if diffusers cannot be imported, CheckpointError if the diffusion model cannot be loaded.
        """
        if self._pipeline is None:
            self._pipeline = self._load()
        result = self._pipeline(
            prompt,
            height=grid.height * CELL,
            width=grid.width * CELL,
            prior_token_ids=prior_token_ids([codes], grid).to(self.device),
            generator=torch.Generator("cpu").manual_seed(seed),
        )
        return result.images[0]

    def _load(self) -> Any:
        """Returns diffusers' pipeline of the folder without its autoregressive stage."""
        try:
            from diffusers import GlmImagePipeline
        except ImportError as error:
            raise UserError(f"diffusers cannot be imported ({error}): {SETUP}") from None
        left_out: dict[str, Any] = dict.fromkeys(AR_STAGE)
        with reading(self.folder):
            pipeline = GlmImagePipeline.from_pretrained(
                str(self.folder), dtype=self.dtype, local_files_only=True, **left_out
            )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline.to(self.device)
