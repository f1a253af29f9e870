"""Addresses of the published weights of the metrics, and their download."""

from __future__ import annotations

import re
from pathlib import Path

from adt_tree.errors import CheckpointError, UserError, reason
from models.checkpoint.hub import locate

GITHUB = "https://github.com"
INCEPTION = (
    f"{GITHUB}/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth"
)
VGG16 = "https://download.pytorch.org/models/vgg16-397923af.pth"
CLIPS = {  # name in LANTERN's evaluation -> hub repository in open_clip's layout
    "ViT-B/32": "timm/vit_base_patch32_clip_224.openai",
    "ViT-G/14": "laion/CLIP-ViT-g-14-laion2B-s12B-b42K",
}
HPS = "xswu/HPSv2/HPS_v2.1_compressed.pt"
HPS_CLIP = "ViT-H-14"  # open_clip's name of the architecture that HPS was tuned from
AESTHETIC = (
    f"{GITHUB}/christophschuhmann/improved-aesthetic-predictor/raw/main/sac+logos+ava1-l14-linearMSE.pth"
)
AESTHETIC_CLIP = "timm/vit_large_patch14_clip_224.openai"
ANY_SOURCE = "a local file, a hub id OWNER/NAME/FILE or an https address"


def weights_file(source: str, option: str) -> Path:
    """Returns a file of weights, fetched first if source is a hub id OWNER/NAME/FILE or an https address.

    Downloads go into torch.hub's cache, and the hash in their name is checked if there is one. Raises a
    UserError that names the option.
    """
    try:
        path = _download(source) if source.startswith("https://") else locate(source)
    except CheckpointError as error:
        raise UserError(f"{option}: {error}") from None
    if not path.is_file():
        raise UserError(f"{option} {source}: not a file; give the file of weights itself")
    return path


def _download(address: str) -> Path:
    import torch

    name = address.rpartition("/")[2]
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if not path.is_file():
        digits = re.search(r"-([a-f0-9]{8,})\.", name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(address, str(path), digits[1] if digits else None)
        except (OSError, RuntimeError) as error:  # no network, no room, or another hash
            raise CheckpointError(
                f"{address} cannot be fetched ({reason(error)}); fetch it elsewhere and give the local file"
            ) from None
    return path
