"""One loaded checkpoint, whatever its family: what to load, and what makes targets, drafters and images."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from adt_tree.grid import Grid
from adt_tree.passes import DIRECT, Passes
from adt_tree.relax import nearest_table
from adt_tree.roles import Drafter
from adt_tree.sampling import Sampling
from models.drafter import DrafterNet, EagleDrafter
from models.errors import CheckpointError
from models.graphs import CudaRecorder, Replays
from models.line_drafter import LineDrafter
from models.lines import LineTarget
from models.neighbours import find_table, read_table
from models.target import ARTarget, EncodedPrompt, PromptEncoder
from models.transformer import Decoder
from models.vq import VQModel, to_uint8


@dataclass(frozen=True, slots=True)
class Extras:
    """What only some families read; None: the model's own, or where the published layout has it."""

    target_size: int | None = None  # pixels along the side of an image
    tokenizer_base_path: str | None = None  # folder of the text tokenizer and vqgan.ckpt
    vq_path: str | None = None  # LlamaGen's vq_ds16_*.pt
    text_encoder: str | None = None  # LlamaGen's T5
    revision: str | None = None  # of the target's hub id
    keep_text_encoder: bool = False  # in memory once all prompts are encoded


NO_EXTRAS = Extras()


@dataclass(frozen=True, slots=True)
class Source:
    """What to load, and how."""

    name: str  # of the model, as --model has it
    folder: Path  # of the target
    drafter: Path | None  # folder of the drafter; None: not wanted
    dtype: torch.dtype  # of weights and activations; the codec stays fp32
    device: torch.device
    extras: Extras = NO_EXTRAS
    places: tuple[Path, ...] = ()  # where files beside the target's own are looked for, in this order
    split: bool = False  # the decoder's layers shared out over all GPUs, `device` being the first

    @property
    def target_size(self) -> int | None:
        """Pixels along the side of an image; None: the model's own."""
        return self.extras.target_size


@dataclass(frozen=True, slots=True)
class Model:
    """One loaded checkpoint: weights once, from which any number of targets and drafters are made."""

    name: str
    grid: Grid
    prompts: PromptEncoder
    decoder: Decoder
    codebook: Tensor  # [V, C] raw latents
    codec: VQModel
    drafter_net: DrafterNet | None
    weights_sha: str
    drafter_sha: str | None
    row_end: int | None = None  # token id behind every row of codes; None: rows have no end
    pairing: str = "published"  # of the drafter's features and tokens (models.pairing)
    tables: tuple[Path, ...] = ()  # where a table of nearest codes may lie
    num_classes: int = 0  # of a class-conditional model; 0: it draws texts
    graphs: bool = False  # the parts of a cycle are captured as CUDA graphs: on one CUDA device

    @property
    def aligned(self) -> str | None:
        """The drafter's pairing; None without a drafter."""
        return None if self.drafter_net is None else self.pairing

    @property
    def num_codes(self) -> int:
        """Size of the codebook."""
        return self.prompts.num_codes

    @property
    def first_code(self) -> int:
        """Token id of code 0."""
        return self.prompts.first_code

    def encode(self, text: str) -> EncodedPrompt:
        """The prompt as the target takes it."""
        return self.prompts.encode(text)

    def encode_all(self, texts: Sequence[str]) -> list[EncodedPrompt]:
        """All prompts of a run; what only encoding needs is given back."""
        openings = [self.prompts.encode(text) for text in texts]
        self.prompts.release()
        return openings

    def prompt_length(self, prompt: EncodedPrompt) -> int:
        """Cache slots the prompt needs."""
        return prompt.length

    def target(
        self, slots: int, sampling: Sampling, max_nodes: int, max_prompt: int
    ) -> ARTarget | LineTarget:
        """A target with room for `slots` images, trees of max_nodes nodes and prompts of max_prompt
        tokens."""
        tokens, nodes = self.grid, max_nodes
        if self.row_end is not None:
            tokens, nodes = Grid(self.grid.height, self.grid.width + 1), 2 * max_nodes
        passes: Passes = DIRECT
        if self.graphs:
            gc.collect()  # a target and its recordings refer to one another: one just dropped is still here
            passes = Replays(CudaRecorder(), tokens.size)
        target = ARTarget(
            self.decoder,
            tokens,
            self.first_code,
            self.num_codes,
            slots,
            sampling.branches,
            max_prompt,
            nodes,
            passes,
        )
        return target if self.row_end is None else LineTarget(target, self.grid, self.row_end)

    def drafter(self, target: ARTarget | LineTarget, max_depth: int, max_width: int) -> Drafter:
        """The drafter beside a target of this model. CheckpointError if the model came without one."""
        if self.drafter_net is None:
            raise CheckpointError(f"model {self.name} was loaded without a drafter: pass --drafter_path")
        if isinstance(target, LineTarget):
            tokens = EagleDrafter(self.drafter_net, target.tokens, 2 * max_depth + 1, max_width, self.pairing)
            return LineDrafter(tokens, target)
        return EagleDrafter(self.drafter_net, target, max_depth, max_width, self.pairing)

    @torch.inference_mode()
    def image(self, codes: list[int]) -> Image.Image:
        """Codes in raster order -> an RGB picture."""
        grid = torch.tensor(codes, device=self.codebook.device).view(1, self.grid.height, self.grid.width)
        pixels = to_uint8(self.codec.decode(grid), self.codec.config.rounds)
        return Image.fromarray(pixels[0].cpu().numpy())

    def nearest(self, k: int, table: Path | None = None) -> Tensor:
        """Nearest-latent table [V, k] int64 of the codec's codebook: from the given file or folder, else from
        where the published layout keeps one, else computed. CheckpointError if a table found does not fit."""
        path = find_table((table,) if table else self.tables, self.num_codes)
        if table is not None and path is None:
            raise CheckpointError(
                f"--lantern_table {table}: no such file, nor a top_{self.num_codes - 1}_indices.npy in it"
            )
        return nearest_table(self.codebook, k) if path is None else read_table(path, self.codebook, k)
