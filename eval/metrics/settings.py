"""What is measured of which images, and by which networks. No torch."""

from __future__ import annotations

from eval.metrics.metric_weights import (
    AESTHETIC,
    AESTHETIC_CLIP,
    ANY_SOURCE,
    CLIPS,
    HPS,
    INCEPTION,
    VGG16,
)
from models.family import DEVICES
from storage.command_line import declare, option
from storage.prompt_settings import image_count

REAL, RESIZED = ("ref_dir", "ref_how_many"), ("eval_res", "inception_path")
READS = {  # metric -> the options that only some metrics read
    "clip": ("caption_path", "eval_res", "clip_model4eval", "clip_path"),
    "hps": ("caption_path", "hps_path"),
    "fid": (*REAL, *RESIZED),
    "kid": (*REAL, *RESIZED, "kid_subsets", "kid_size", "random_seed"),
    "is": (*RESIZED, "splits", "random_seed"),
    "aesthetic": ("aesthetic_path", "aesthetic_clip"),
    "precision_recall": (*REAL, "k", "fname_precalc", "vgg_path"),
    "effnet_fd": REAL,
}


@declare("evaluate", {"image_path": "fake_dir", "prompt_path": "caption_path"})
class EvaluationSettings:
    """The images, what they are compared with, and by which metrics."""

    metrics: tuple[str, ...] = option(
        "clip, hps: agreement with the prompts; fid, kid, precision_recall: likeness to real images; is; "
        "aesthetic: LAION's predictor; effnet_fd: a Frechet distance on EfficientNet-Lite0, which needs no "
        "download and is not FID",
        (),
        choices=tuple(READS),
        reads=READS,
    )
    fake_dir: str | None = option(
        "a run's folder, or a folder of images; --image_path says the same (precision_recall without it only "
        "writes --fname_precalc)",
        unit="DIR",
        reads={True: ("how_many", "k", "scores")},
    )
    ref_dir: str | None = option(
        "folder of real images, searched at any depth; fid, kid, precision_recall and effnet_fd need it",
        unit="DIR",
    )
    caption_path: str | None = option(
        "file of prompts; --prompt_path says the same (default: those of the run)", unit="FILE"
    )
    how_many: int = option(
        "number of images, with clip and hps of prompts that have an image; fewer are an error; -1: all",
        -1,
        unit="N",
        read=image_count,
    )
    ref_how_many: int = option("number of real images; -1: all", -1, unit="N", read=image_count)
    num_samples: int | None = option(
        "--how_many and --ref_how_many at once",
        unit="N",
        read=image_count,
        reads={False: ("how_many", "ref_how_many")},
    )
    eval_res: int = option(
        "side to which images are resized for clip, fid, kid and is", 256, unit="PIXELS", least=8
    )
    k: int = option(
        "precision_recall: an image matches those of the other set that lie no farther away than its own "
        "K-th neighbour",
        3,
        unit="K",
        least=1,
    )
    fname_precalc: str | None = option(
        "precision_recall: .safetensors file of the real images' features: read if it exists, else written",
        unit="FILE",
    )
    splits: int = option("is: number of parts to average over", 10, unit="N", least=1)
    kid_subsets: int = option("kid: number of subsets to average over", 100, unit="N", least=1)
    kid_size: int = option("kid: images in a subset", 1000, unit="N", least=2)
    random_seed: int = option("seed of the parts of is and the subsets of kid", 0, unit="SEED")
    clip_model4eval: str = option("clip: name of the CLIP model", "ViT-B/32", choices=tuple(CLIPS))
    clip_path: str | None = option(
        "clip: folder or hub id of the CLIP model in open_clip's layout (default: "
        f"{', '.join(f'{name} {place}' for name, place in CLIPS.items())})",
        unit="PLACE",
        reads={False: ("clip_model4eval",)},
    )
    hps_path: str = option(f"weights of HPS: {ANY_SOURCE}", HPS, unit="PLACE")
    inception_path: str = option(f"weights of Inception: {ANY_SOURCE}", INCEPTION, unit="PLACE")
    vgg_path: str = option(f"weights of VGG-16: {ANY_SOURCE}", VGG16, unit="PLACE")
    aesthetic_path: str = option(f"weights of the aesthetic predictor: {ANY_SOURCE}", AESTHETIC, unit="PLACE")
    aesthetic_clip: str = option(
        "folder or hub id of the aesthetic predictor's CLIP", AESTHETIC_CLIP, unit="PLACE"
    )
    batch_size: int = option("images that a network takes at once", 64, unit="IMAGES", least=1)
    device: str = option("auto: cuda where there is one", "auto", choices=DEVICES)
    scores: str | None = option(
        "file to which scores are appended (default: scores.jsonl beside the images)", unit="FILE"
    )
