"""eval_prec_recall: precision and recall of images against real ones, on VGG-16 features."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from adt_tree.errors import UserError
from cli.options import ScoringOptions, image_count
from cli.parser import declare, option
from eval.metrics.published import ANY_SOURCE, VGG16

if TYPE_CHECKING:
    from torch import Tensor


@declare
class Options(ScoringOptions):
    """eval_prec_recall"""

    ref_dir: str | None = option("real images, at any depth (default: those of --fname_precalc)", unit="DIR")
    fake_dir: str | None = option(
        "a run's folder, or one of images (default: only write --fname_precalc)", unit="DIR"
    )
    k: int = option("which neighbour a ball reaches", 3, unit="K", least=1)
    num_samples: int = option("of either set, fewer are refused; -1: all", -1, unit="N", read=image_count)
    fname_precalc: str | None = option(
        ".safetensors file of the real images' features: read if it exists, else written", unit="FILE"
    )
    vgg_path: str = option(f"VGG-16: {ANY_SOURCE}", VGG16, unit="PLACE")
    batch_size: int = 50


def run(options: Options) -> None:
    """Print both and append them; the last line is one JSON document."""
    import torch

    from eval.metrics.distances import precision_recall
    from eval.metrics.networks import features, vgg16
    from eval.metrics.pictures import images_of
    from eval.metrics.scores import keep, record_of
    from eval.metrics.sources import weights_file
    from models.loading import pick_device

    stored = Path(options.fname_precalc) if options.fname_precalc else None
    if options.fake_dir is None and stored is None:
        raise UserError("give --fake_dir, the images to judge, or --fname_precalc, where features shall go")
    known = stored is not None and stored.exists()
    if not known and options.ref_dir is None:
        raise UserError("give --ref_dir, the real images, or the --fname_precalc of an earlier call")
    fakes, reals, number = [], [], options.num_samples
    if options.fake_dir:
        record = record_of(options.fake_dir, options.scores)
        fakes = images_of(options.fake_dir, number, ("--fake_dir", "--num_samples"))
    if not known:
        reals = images_of(options.ref_dir, number, ("--ref_dir", "--num_samples"), deep=True)
    device, batch = torch.device(pick_device(options.device)), options.batch_size
    net = vgg16(weights_file(options.vgg_path, "--vgg_path"), device)
    real = read(stored, net.digest, number) if known else features(net, reals, batch)
    if stored is not None and not known:
        write(stored, real, net.digest)
    if not fakes:
        print(f"  {len(real)} rows of features in {stored}")
        return
    if (least := min(len(fakes), len(real))) <= options.k:
        raise UserError(
            f"--k {options.k}: one set has {least} images, it must have more than k; give a smaller --k"
        )
    precision, recall = precision_recall(features(net, fakes, batch), real, options.k)
    facts = {"images": len(fakes), "real_images": len(real), "k": options.k}
    values = {"precision": precision, "recall": recall}
    keep(record, "eval_prec_recall", options, device.type, values, {"vgg16": net.digest}, facts)


def write(path: Path, features: Tensor, weights: str) -> None:
    """Keep features [N, D] with the digest of the network that made them."""
    from safetensors.torch import save

    from eval.runs.run_folder import write_atomic

    write_atomic(path, save({"features": features.contiguous()}, {"weights": weights}))


def read(path: Path, weights: str, count: int) -> Tensor:
    """The first count rows, all for -1. UserError if there are fewer, or another network made them."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            made_by, features = (file.metadata() or {}).get("weights"), file.get_tensor("features")
    except (OSError, SafetensorError) as error:
        what = f"cannot be read ({error})"
    else:
        if made_by == weights and count <= len(features):
            return features if count < 0 else features[:count]
        wrong = made_by != weights
        what = f"made by other weights ({made_by})" if wrong else f"holds {len(features)} rows, not {count}"
    raise UserError(f"--fname_precalc {path}: {what}; delete it, it is made anew")
