"""eval_prec_recall: computes precision and recall of images against real ones, on VGG-16 features."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from adt_tree.errors import UserError
from cli.options import ScoringOptions, image_count
from cli.parser import declare, option
from eval.metrics.metric_weights import ANY_SOURCE, VGG16

if TYPE_CHECKING:
    from torch import Tensor


@declare
class Options(ScoringOptions):
    """eval_prec_recall"""

    ref_dir: str | None = option(
        "folder of real images, searched at any depth (default: their features in --fname_precalc)",
        unit="DIR",
    )
    fake_dir: str | None = option(
        "a run's folder, or a folder of images (default: only write --fname_precalc)", unit="DIR"
    )
    k: int = option(
        "an image matches those of the other set that lie no farther away than its own K-th neighbour",
        3,
        unit="K",
        least=1,
    )
    num_samples: int = option(
        "number of images of each set; fewer are an error; -1: all", -1, unit="N", read=image_count
    )
    fname_precalc: str | None = option(
        ".safetensors file of the real images' features: read if it exists, else written", unit="FILE"
    )
    vgg_path: str = option(f"weights of VGG-16: {ANY_SOURCE}", VGG16, unit="PLACE")
    batch_size: int = 50


def run(options: Options) -> None:
    """Prints precision and recall and appends them to the file --scores. Without --fake_dir it only stores
    the features of the real images."""
    import torch

    from eval.metrics.distances import precision_recall
    from eval.metrics.metric_weights import weights_file
    from eval.metrics.networks import features, vgg16
    from eval.metrics.pictures import images_of
    from eval.metrics.scores import record_scores, scores_path
    from models.loading import pick_device

    store = Path(options.fname_precalc) if options.fname_precalc else None
    if options.fake_dir is None and store is None:
        raise UserError("give --fake_dir, the images to judge, or --fname_precalc, the file to write")
    stored = store is not None and store.exists()
    if not stored and options.ref_dir is None:
        raise UserError("give --ref_dir, the real images, or the --fname_precalc of an earlier call")
    fakes, reals, number = [], [], options.num_samples
    if options.fake_dir:
        record = scores_path(options.fake_dir, options.scores)
        fakes = images_of(options.fake_dir, number, ("--fake_dir", "--num_samples"))
    if not stored:
        reals = images_of(options.ref_dir, number, ("--ref_dir", "--num_samples"), deep=True)
    device, batch = torch.device(pick_device(options.device)), options.batch_size
    net = vgg16(weights_file(options.vgg_path, "--vgg_path"), device)
    real = read(store, net.digest, number) if stored else features(net, reals, batch)
    if store is not None and not stored:
        write(store, real, net.digest)
    if not fakes:
        print(f"  features of {len(real)} images in {store}")
        return
    if (fewest := min(len(fakes), len(real))) <= options.k:
        raise UserError(
            f"--k {options.k}: one set has {fewest} images, it needs more than k; give a smaller --k"
        )
    precision, recall = precision_recall(features(net, fakes, batch), real, options.k)
    facts = {"images": len(fakes), "real_images": len(real), "k": options.k}
    scores = {"precision": precision, "recall": recall}
    record_scores(record, "eval_prec_recall", options, device.type, scores, {"vgg16": net.digest}, facts)


def write(path: Path, features: Tensor, digest: str) -> None:
    """Stores features [N, D] with the digest of the network that computed them."""
    from safetensors.torch import save

    from models.checkpoint.files import write_atomic

    write_atomic(path, save({"features": features.contiguous()}, {"weights": digest}))


def read(path: Path, digest: str, count: int) -> Tensor:
    """Returns the first `count` stored rows; -1: all of them.

    Raises UserError if the file is damaged, holds fewer, or was computed by a network of another digest.
    """
    from safetensors import safe_open

    from models.checkpoint.files import reading

    with reading(path, "delete this --fname_precalc, and it is written again"):
        with safe_open(path, framework="pt") as file:
            computed_by, features = (file.metadata() or {}).get("weights"), file.get_tensor("features")
        if computed_by != digest:
            raise ValueError(f"was computed by other weights ({computed_by})")
        if count > len(features):
            raise ValueError(f"holds {len(features)} rows, not {count}")
    return features if count < 0 else features[:count]
