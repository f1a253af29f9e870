"""Name or path -> a model that can make targets, drafters and images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from adt_tree.grid import Grid
from adt_tree.relax import nearest_table
from adt_tree.sampling import Sampling
from models import anole
from models.chameleon import decoder_config, from_chameleon
from models.checkpoint import (
    CheckpointError,
    build,
    digest_of,
    read_config,
    read_fields,
    read_tokenizer,
    read_weights,
)
from models.drafter import DrafterNet, EagleDrafter, drafter_config, from_published
from models.target import ARTarget, Opening, PromptEncoder
from models.transformer import Decoder, DecoderConfig
from models.vq import VQConfig, VQModel, to_uint8

EMOJI = Path(__file__).resolve().parent.parent / "ckpts" / "emoji"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Model:
    """One loaded checkpoint: weights once, from which any number of targets and drafters are made."""

    name: str
    grid: Grid
    prompts: PromptEncoder
    decoder: Decoder
    codebook: Tensor  # [V, C] raw latents
    codec: VQModel | None  # None: the checkpoint has no decoder
    drafter_net: DrafterNet | None
    weights_sha: str
    drafter_sha: str | None

    @property
    def num_codes(self) -> int:
        """Size of the codebook."""
        return self.prompts.num_codes

    @property
    def first_code(self) -> int:
        """Token id of code 0."""
        return self.prompts.first_code

    def encode(self, text: str) -> Opening:
        """The prompt as the target takes it."""
        return self.prompts.encode(text)

    def prompt_length(self, prompt: Opening) -> int:
        """Cache slots the prompt needs."""
        return prompt.length

    def target(self, slots: int, sampling: Sampling, max_nodes: int, max_prompt: int) -> ARTarget:
        """A target with room for `slots` images, trees of max_nodes nodes and prompts of max_prompt
        tokens."""
        return ARTarget(
            self.decoder,
            self.grid,
            self.first_code,
            self.num_codes,
            slots,
            sampling.branches,
            max_prompt,
            max_nodes,
        )

    def drafter(self, target: ARTarget, max_depth: int, max_width: int) -> EagleDrafter:
        """The drafter beside a target. CheckpointError if the model came without one."""
        if self.drafter_net is None:
            raise CheckpointError(f"model {self.name} was loaded without a drafter: pass --drafter_path")
        return EagleDrafter(self.drafter_net, target, max_depth, max_width)

    @torch.inference_mode()
    def image(self, codes: list[int]) -> Image.Image:
        """Codes in raster order -> an RGB picture. CheckpointError if the checkpoint has no VQ decoder."""
        if self.codec is None:
            raise CheckpointError(
                f"model {self.name}: the checkpoint holds no VQ decoder (model.vqmodel.decoder.*)"
            )
        grid = torch.tensor(codes, device=self.codebook.device).view(1, self.grid.height, self.grid.width)
        return Image.fromarray(to_uint8(self.codec.decode(grid))[0].cpu().numpy())

    def nearest(self, k: int) -> Tensor:
        """Nearest-latent table [V, k] int64 of the codec's codebook."""
        return nearest_table(self.codebook, k)


def load(
    model: str,
    model_path: str | None,
    drafter_path: str | None,
    precision: str,
    device: str,
    need_drafter: bool,
) -> Model:
    """Load a checkpoint in the Chameleon layout.

    model: "emoji" for the embedded one (its folder unless model_path is given). drafter_path: default the
    `drafter` folder inside the checkpoint. Weights are cast to `precision` as they are read; the codec stays
    fp32. Raises CheckpointError.
    """
    folder = Path(model_path) if model_path else EMOJI
    config, state = read_config(folder), read_weights(folder)
    layout, grid, shape = read_fields(
        folder, lambda: (anole.TokenLayout.read(config), anole.grid_of(config), decoder_config(config))
    )
    dtype, place = DTYPES[precision], torch.device(device)
    decoder = build(lambda: Decoder(shape), lambda: from_chameleon(state, shape), dtype, place, folder)
    vq_state = {
        name[len("model.vqmodel.") :]: t for name, t in state.items() if name.startswith("model.vqmodel.")
    }
    if "quantize.embedding.weight" not in vq_state:
        raise CheckpointError(f"{folder}: tensor model.vqmodel.quantize.embedding.weight is missing")
    codec = None
    if any(name.startswith("decoder.") for name in vq_state):
        vq = read_fields(folder, lambda: VQConfig.from_hf(config["vq_config"]))
        codec = build(lambda: VQModel(vq), lambda: vq_state, torch.float32, place, folder)
    codebook = vq_state["quantize.embedding.weight"].to(place, torch.float32)
    net, drafter_sha = None, None
    if need_drafter:
        home = Path(drafter_path) if drafter_path else folder / "drafter"
        net, drafter_sha = _load_drafter(home, shape, dtype, place)
    return Model(
        model,
        grid,
        anole.Prompts(read_tokenizer(folder), layout),
        decoder,
        codebook,
        codec,
        net,
        digest_of(state),
        drafter_sha,
    )


def _load_drafter(
    folder: Path, target: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> tuple[DrafterNet, str]:
    """The network and the digest of its weights."""
    config, state = read_config(folder), read_weights(folder)
    shape = read_fields(folder, lambda: drafter_config(config))
    for name in ("hidden_size", "vocab_size"):
        if getattr(shape, name) != getattr(target, name):
            raise CheckpointError(
                f"{folder}: {name} {getattr(shape, name)}, the target has {getattr(target, name)}: "
                "this drafter belongs to another target"
            )
    bias = "fc.bias" in state
    net = build(lambda: DrafterNet(shape, bias), lambda: from_published(state, shape), dtype, device, folder)
    return net, digest_of(state)
