"""Options that the commands of quality metrics share. No torch here."""

from __future__ import annotations

import argparse

from eval.parser import at_least

# The published weights, at the addresses their authors give.
GITHUB = "https://github.com"
INCEPTION = (
    f"{GITHUB}/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth"
)
VGG16 = "https://download.pytorch.org/models/vgg16-397923af.pth"
CLIP_OF = {  # LANTERN's name -> repository in open_clip's layout
    "ViT-B/32": "timm/vit_base_patch32_clip_224.openai",
    "ViT-G/14": "laion/CLIP-ViT-g-14-laion2B-s12B-b42K",
}
HPS = "xswu/HPSv2/HPS_v2.1_compressed.pt"
HPS_CLIP = "ViT-H-14"  # the architecture by open_clip's name: nothing to fetch
AESTHETIC = (
    f"{GITHUB}/christophschuhmann/improved-aesthetic-predictor/raw/main/sac+logos+ava1-l14-linearMSE.pth"
)
AESTHETIC_CLIP = "timm/vit_large_patch14_clip_224.openai"
ANY_SOURCE = "a local file, a hub id OWNER/NAME/FILE or an https address"


def count(text: str) -> int:
    """A number of images: positive, or -1."""
    value = at_least(-1)(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 images: give a positive number, or -1 for all")
    return value


def add_running(group: argparse._ArgumentGroup, batch_size: int) -> None:
    """Where networks run, where scores go."""
    group.add_argument("--batch_size", type=at_least(1), default=batch_size, metavar="IMAGES", help="at once")
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one"
    )
    group.add_argument(
        "--scores",
        metavar="FILE",
        help="where the scores are appended (default: scores.json beside the images)",
    )
    group.add_argument("--config", metavar="FILE", help="flat YAML file of any of these options")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
