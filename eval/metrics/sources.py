"""Where weights of feature networks come from: a local path, a hub id, or the address of their authors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from eval.errors import UserError
from eval.metrics.clip import CONFIG, Clip, read_clip_config
from models.checkpoint import read_tokenizer
from models.errors import CheckpointError, reason
from models.hub import HubId, locate

CLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
TOKENIZER = "tokenizer.json"


def weights_file(text: str, option: str) -> Path:
    """A local file of weights, fetched if text is a hub id OWNER/NAME/FILE or an https address.

    Downloads lie where torch.hub keeps them; a hash in the file's name is checked. UserError names option.
    """
    try:
        if text.startswith("https://"):
            return _download(text)
        path = locate(text)
    except CheckpointError as error:
        raise UserError(f"{option}: {error}") from None
    if not path.is_file():
        raise UserError(f"{option} {text}: it is no file of weights; give the file itself")
    return path


def _download(address: str) -> Path:
    name = address.rsplit("/", 1)[1]
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if not path.is_file():
        mark = re.search(r"-([a-f0-9]{8,})\.", name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(address, str(path), mark[1] if mark else None)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{address} cannot be fetched ({reason(error)}); fetch it elsewhere and give the local file"
            ) from None
    return path


@dataclass(frozen=True, slots=True)
class ClipFiles:
    """The files of a CLIP model; None where there is none."""

    weights: Path | None
    config: Path | None
    tokenizer: Path | None


def clip_files(text: str, option: str, with_weights: bool = True) -> ClipFiles:
    """open_clip's files in a folder or a hub repository; or a file of weights, with what lies beside it.

    UserError if weights are wanted and there are none.
    """
    path = Path(text)
    names, faults = (CONFIG, TOKENIZER, *(CLIP_WEIGHTS if with_weights else ())), []
    if path.exists() or HubId.read(text) is None:
        folder = path.parent if path.is_file() else path
        found = {name: folder / name for name in names if (folder / name).is_file()}
    else:
        found = {}
        for name in names:
            if name in CLIP_WEIGHTS and any(name in found for name in CLIP_WEIGHTS):
                continue  # many repositories hold the same weights twice
            try:
                file = locate(f"{text}/{name}")
            except CheckpointError as error:
                faults.append(str(error))
            else:
                found |= {name: file} if file.is_file() else {}
    weights = path if path.is_file() else next((found[name] for name in CLIP_WEIGHTS if name in found), None)
    if with_weights and weights is None:
        what = faults[-1] if faults else f"{text} holds no {' or '.join(CLIP_WEIGHTS)}"
        raise UserError(f"{option}: {what}; give a folder that has it, or the file of weights")
    return ClipFiles(weights, found.get(CONFIG), found.get(TOKENIZER))


def load_clip(files: ClipFiles, option: str, texts: bool, device: torch.device) -> Clip:
    """The model of these files. texts: prompts will be read; UserError without a tokenizer for them."""
    assert files.weights is not None
    tokenizer: Tokenizer | None = None
    if texts:
        if files.tokenizer is None:
            raise UserError(f"{option}: {files.weights} has no {TOKENIZER} beside it; put CLIP's there")
        tokenizer = read_tokenizer(files.tokenizer.parent)
    return Clip(files.weights, read_clip_config(files.config), tokenizer, device)
