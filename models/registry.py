"""Name or path -> a model that can make targets, drafters and images. The only file that opens
checkpoints."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from adt_tree.grid import Grid
from adt_tree.relax import nearest_table
from adt_tree.sampling import Sampling
from models import anole
from models.chameleon import decoder_config, from_chameleon
from models.drafter import DrafterNet, EagleDrafter, drafter_config, from_published
from models.target import ARTarget, Prompt
from models.transformer import Decoder, DecoderConfig
from models.vq import VQConfig, VQModel, to_uint8

EMOJI = Path(__file__).resolve().parent.parent / "ckpts" / "emoji"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or does not fit; the message is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class Model:
    """One loaded checkpoint: weights once, from which any number of targets and drafters are made."""

    name: str
    grid: Grid
    layout: anole.TokenLayout
    decoder: Decoder
    tokenizer: Tokenizer
    codebook: Tensor  # [V, C] raw latents
    codec: VQModel | None  # None: the checkpoint has no decoder
    drafter_net: DrafterNet | None
    weights_sha: str
    drafter_sha: str | None

    @property
    def num_codes(self) -> int:
        """Size of the codebook."""
        return self.layout.num_codes

    def encode(self, text: str) -> Prompt:
        """The prompt's token ids."""
        return anole.encode(text, self.tokenizer, self.layout)

    def prompt_length(self, prompt: Prompt) -> int:
        """Cache slots the prompt needs."""
        return prompt.length

    def target(self, slots: int, sampling: Sampling, max_nodes: int, max_prompt: int) -> ARTarget:
        """A target with room for `slots` images, trees of max_nodes nodes and prompts of max_prompt
        tokens."""
        return ARTarget(
            self.decoder,
            self.grid,
            self.layout.first_code,
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
    layout, grid, shape = _read_fields(
        folder, lambda: (anole.TokenLayout.read(config), anole.grid_of(config), decoder_config(config))
    )
    dtype, place = DTYPES[precision], torch.device(device)
    decoder = _build(lambda: Decoder(shape), lambda: from_chameleon(state, shape), dtype, place, folder)
    vq_state = {
        name[len("model.vqmodel.") :]: t for name, t in state.items() if name.startswith("model.vqmodel.")
    }
    if "quantize.embedding.weight" not in vq_state:
        raise CheckpointError(f"{folder}: tensor model.vqmodel.quantize.embedding.weight is missing")
    codec = None
    if any(name.startswith("decoder.") for name in vq_state):
        vq = _read_fields(folder, lambda: VQConfig.from_hf(config["vq_config"]))
        codec = _build(lambda: VQModel(vq), lambda: vq_state, torch.float32, place, folder)
    codebook = vq_state["quantize.embedding.weight"].to(place, torch.float32)
    net, drafter_sha = None, None
    if need_drafter:
        home = Path(drafter_path) if drafter_path else folder / "drafter"
        net, drafter_sha = _load_drafter(home, shape, dtype, place)
    return Model(
        model,
        grid,
        layout,
        decoder,
        read_tokenizer(folder),
        codebook,
        codec,
        net,
        _digest(state),
        drafter_sha,
    )


def _load_drafter(
    folder: Path, target: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> tuple[DrafterNet, str]:
    """The network and the digest of its weights."""
    config, state = read_config(folder), read_weights(folder)
    shape = _read_fields(folder, lambda: drafter_config(config))
    for name in ("hidden_size", "vocab_size"):
        if getattr(shape, name) != getattr(target, name):
            raise CheckpointError(
                f"{folder}: {name} {getattr(shape, name)}, the target has {getattr(target, name)}: "
                "this drafter belongs to another target"
            )
    bias = "fc.bias" in state
    net = _build(lambda: DrafterNet(shape, bias), lambda: from_published(state, shape), dtype, device, folder)
    return net, _digest(state)


def _build(
    make: Callable[[], nn.Module],
    weights: Callable[[], Mapping[str, Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    folder: Path,
) -> Any:
    """Make a module without memory and hand it the weights, cast and moved one by one."""
    with torch.device("meta"):
        module = make()
    try:
        state = {name: tensor.to(device, dtype) for name, tensor in weights().items()}
        module.load_state_dict(state, assign=True)
    except KeyError as error:
        raise CheckpointError(
            f"{folder}: tensor {error.args[0]} is missing: the checkpoint is incomplete"
        ) from None
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        raise CheckpointError(f"{folder}: the weights do not fit config.json: {lines[0]}") from None
    return module.requires_grad_(False).eval()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: give the folder of a checkpoint")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): fetch it again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object: fetch it again")
    return config


def _read_fields(folder: Path, read: Callable[[], Any]) -> Any:
    """What read makes of config.json; a field that is missing or senseless is a CheckpointError."""
    try:
        return read()
    except KeyError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error.args[0]} is missing") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {_reason(error)}") from None


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: model.safetensors, its shards by their index, or pytorch_model.bin (weights
    only)."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError):
            raise CheckpointError(f"{index} is not an index of safetensors shards: fetch it again") from None
    else:
        names = [n for n in ("model.safetensors", "pytorch_model.bin") if (folder / n).is_file()][:1]
    if not names:
        raise CheckpointError(f"{folder} holds no model.safetensors and no pytorch_model.bin")
    state: dict[str, Tensor] = {}
    for name in names:
        state.update(_read_file(folder / name))
    return state


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: the index names it, fetch it again") from None
    except (SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({_reason(error)}): truncated or damaged, fetch it again"
        ) from None


def read_tokenizer(folder: Path) -> Tokenizer:
    """text_tokenizer.json, or tokenizer.json."""
    for name in ("text_tokenizer.json", "tokenizer.json"):
        if (folder / name).is_file():
            try:
                return Tokenizer.from_file(str(folder / name))
            except Exception as error:  # tokenizers raises bare Exception
                raise CheckpointError(f"{folder / name} is not a tokenizer ({_reason(error)})") from None
    raise CheckpointError(f"{folder} holds no text_tokenizer.json and no tokenizer.json")


def _digest(state: Mapping[str, Tensor]) -> str:
    """sha256 over names and bytes of the weights, first 16 digits."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0].strip("'\"") if str(error) else type(error).__name__
