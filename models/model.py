"""One loaded checkpoint of any family, which makes targets and drafters, and images from codes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from adt_tree.errors import CheckpointError, UserError
from adt_tree.grid import Grid
from adt_tree.lantern import nearest_table
from adt_tree.roles import Drafter
from adt_tree.settings import Sampling
from adt_tree.surroundings import own_settings
from models.checkpoint.files import expanded
from models.checkpoint.stored_module import load_module
from models.checkpoint.weights import Weights
from models.codecs.codec import Codec
from models.codecs.glm_pixels import DiffusionDecoder
from models.codecs.nearest_codes import find_table, read_table
from models.codecs.vq import to_uint8
from models.decoder.config import DecoderConfig
from models.decoder.packed import cache_dtype, pack
from models.decoder.transformer import Decoder, as_it_is, compiled
from models.drafter import LLAMA, DrafterLayout, DrafterNet, EagleDrafter, load_drafter
from models.family import DTYPE_NAMES, Checkpoint, ModelFamily, home_of
from models.footprint import LIBRARIES, Dimensions, check_room
from models.graphs import CudaRecorder, GraphRunner
from models.llama_names import Names, gather
from models.target import ARTarget, EncodedPrompt, Execution, PromptEncoder

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Model:
    """One loaded checkpoint. Any number of targets and drafters share its weights."""

    spec: ModelFamily
    grid: Grid
    prompts: PromptEncoder
    decoder: Decoder
    codec: Codec
    drafter_net: DrafterNet | None
    weights_sha: str
    drafter_sha: str | None
    drafter_layout: DrafterLayout  # the form of its drafters' config.json
    tables: tuple[Path, ...] = ()  # folders that may hold a table of nearest codes
    check: Callable[[], None] | None = None  # UserError if it shares weights that have changed
    diffusion: DiffusionDecoder | None = None  # of a GLM-Image that was loaded from files
    graphs: bool = False  # the parts of a step are recorded as CUDA graphs and replayed
    # torch.compile compiles the target's layers and a level of drafting; only with graphs, which pad passes
    compiled: bool = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def device(self) -> torch.device:
        return self.decoder.embed.weight.device

    @property
    def precision(self) -> str:
        """Type of the decoder's weights: bf16, fp16 or fp32."""
        return {dtype: name for name, dtype in DTYPES.items()}[self.decoder.embed.weight.dtype]

    @property
    def codebook(self) -> Tensor:
        return self.codec.codebook

    @property
    def embeddings(self) -> Tensor:
        return self.decoder.embed.weight[self.first_code : self.first_code + self.num_codes]

    @property
    def num_codes(self) -> int:
        return len(self.prompts.cells.codes)

    @property
    def first_code(self) -> int:
        """Token id of code 0."""
        return self.prompts.cells.codes.start

    @property
    def missing_for_pixels(self) -> str:
        """The reason why neither codec nor diffusion model makes pixels, for the user; empty if one does."""
        return self.codec.missing if self.diffusion is None else self.diffusion.missing

    def encode(self, text: str) -> EncodedPrompt:
        """Returns a text as the prompt that a target's prefill takes. UserError as in PromptEncoder, and if
        the weights are those of another model and have changed."""
        if self.check is not None:
            self.check()
        with own_settings():
            return self.prompts(text)

    def encode_all(self, texts: Sequence[str]) -> list[EncodedPrompt]:
        """Encodes all prompts of a run, then frees what only encoding needs, such as a text encoder."""
        encoded = [self.encode(text) for text in texts]
        self.prompts.release()
        return encoded

    def target(self, slots: int, sampling: Sampling, max_nodes: int, max_prompt: int) -> ARTarget:
        """See adt_tree.roles.Model. UserError for guidance or trees that this model does not allow.

        On a CPU this packs the decoder's layers and head in place (`packed`): from then on it can decode
        and score, but not be trained or saved. The same holds for drafter().
        """
        if sampling.branches > 1 and not self.prompts.guided:
            raise UserError("guidance: this model has no unconditional branch; give 1, or leave it out")
        dims = self.dimensions(slots, sampling, max_nodes, max_prompt)
        check_room(dims, self.device, self.precision)
        cells, rows, run = self.prompts.cells, (slots, sampling.branches), None
        if self.graphs:
            gc.collect()  # a target and its graphs refer to each other, so a dropped one is still in memory
            run = GraphRunner(CudaRecorder(self.device))
        execution = Execution(run, compiled if self.compiled else as_it_is)
        pack(self.decoder)
        return ARTarget(self.decoder, self.grid, cells, *rows, max_prompt, max_nodes, execution)

    def dimensions(self, slots: int, sampling: Sampling, max_nodes: int, max_prompt: int) -> Dimensions:
        """Returns the dimensions from which models.footprint computes the memory of decoding with such a
        target."""
        net, vq = self.drafter_net, self.codec.config
        return Dimensions(
            decoder=self.decoder.config,
            drafter=None if net is None else replace(net.config, num_layers=1),
            vq=vq,
            codes=self.num_codes,
            side=round(self.grid.image.size**0.5 * vq.patch_size) if vq else 0,
            tokens=self.grid.length,
            prompt=max_prompt,
            nodes=max_nodes,
            images=slots,
            branches=sampling.branches,
            element=cache_dtype(self.decoder.embed.weight).itemsize,
            noise=not sampling.greedy,
            graphs=self.graphs,
            libraries=LIBRARIES if self.device.type == "cuda" else 0,
        )

    def drafter(self, target: ARTarget, max_depth: int, max_width: int) -> Drafter:
        """Returns the drafter beside a target of this model, which has a drafter network, with room for trees
        of that depth and width."""
        assert self.drafter_net is not None, "Pipeline.method refuses such methods"
        pack(self.drafter_net)
        return EagleDrafter(self.drafter_net, target, max_depth, max_width)

    @torch.inference_mode()
    def image(self, codes: list[int]) -> Image.Image:
        """Returns the RGB image of codes in raster order; of several rasters the last is decoded. Raises
        UserError for a model that gives codes alone."""
        grid = torch.tensor(codes[self.grid.starts[-1] :], device=self.codebook.device)
        grid = grid.view(1, self.grid.height, self.grid.width)
        config = self.codec.config
        with own_settings():
            pixels = to_uint8(self.codec.decode(grid), config is not None and config.rounds)
        return Image.fromarray(pixels[0].cpu().numpy())

    def nearest(self, k: int, table: Path | None = None) -> Tensor:
        """Returns the k nearest other codes of every code, [V, k] int64, by distance of the code vectors.

        The table is read from the file or folder `table`; if that is None, from where the published layout
        keeps one; if there is none, it is computed. Raises CheckpointError if a table does not fit the
        codebook.
        """
        path = find_table((Path(expanded(table)),) if table else self.tables, self.num_codes)
        if table is not None and path is None:
            raise CheckpointError(
                f"lantern_table {table}: no such file, nor a top_{self.num_codes - 1}_indices.npy in it"
            )
        return nearest_table(self.codebook, k) if path is None else read_table(path, self.codebook, k)


def load_networks(
    checkpoint: Checkpoint,
    shape: DecoderConfig,
    weights: Weights,
    names: Names,
    grid: Grid,
    prompts: PromptEncoder,
    codec: Codec,
    layout: DrafterLayout = LLAMA,
    to_ours: Callable[..., dict[str, Tensor]] = gather,
) -> Model:
    """Reads the decoder and, if the checkpoint names one, the drafter, and returns the whole model.

    shape, weights, names: of the target. to_ours: gather(), or what a layout does around it. The drafter is
    read first: it is small, so its faults are known before the large target is read. Raises CheckpointError
    if one of them does not fit.
    """
    folder, home, drafter = checkpoint.folder, checkpoint.spec.home, checkpoint.drafter
    codes = prompts.cells.codes
    if len(codec.codebook) != len(codes):
        raise CheckpointError(
            f"{folder}: {len(codes)} codes, the VQ decoder has {len(codec.codebook)}: they belong to "
            "different models"
        )
    net, drafter_sha = None, None
    if drafter is None and checkpoint.options.need_drafter:
        raise CheckpointError(
            f"{folder} has no drafter network: give one as drafter_path, or a method that needs none, such "
            "as method self-draft"
        )
    if drafter is not None:
        net, drafter_sha = load_drafter(drafter, shape, checkpoint.dtype, checkpoint.device, layout)
    placed = weights.placed(checkpoint.device, checkpoint.dtype)
    network = load_module(lambda: Decoder(shape), placed, folder, partial(to_ours, names=names, config=shape))
    network.cut_head(codes.start, len(codes), copy=not placed.in_memory)
    return Model(
        spec=checkpoint.spec,
        grid=grid,
        prompts=prompts,
        decoder=network,
        codec=codec,
        drafter_net=net,
        weights_sha=placed.digest(),
        drafter_sha=drafter_sha,
        drafter_layout=layout,
        tables=(home_of(folder), *((drafter,) if drafter else ()), home / "vq_distances"),
    )
