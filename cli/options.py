"""Groups of options that several commands take: the model, the prompts, the distribution, the output."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from cli.parser import Options, declare, option
from eval.runs.prompts import CAPTIONS, DEFAULT_END
from models.registry import SPECS
from models.spec import PRECISIONS, TOKEN_SHIFTS, ModelSpec

DEVICES = ("auto", "cpu", "cuda")
TOP_K = 2000  # of the published code
PAIRED = "score the first N prompts that have an image, fewer are refused; -1: all prompts"
MEASURED = [name for name, spec in SPECS.items() if spec.token_shift == "auto"]


def image_count(text: str) -> int:
    """A number of images: positive, or -1 for all."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if value < -1:
        raise argparse.ArgumentTypeError(f"{value} is too small: give -1 or more")
    if value == 0:
        raise argparse.ArgumentTypeError("0 images: give a positive number, or -1 for all")
    return value


def _window(text: str) -> str:
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not START-END with START < END, such as 0-100")
    return text


def _class_labels(text: str) -> tuple[int, ...]:
    labels = [word.strip() for word in text.split(",")]
    if not all(label.isascii() and label.isdigit() for label in labels):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of class ids such as 207,360")
    return tuple(map(int, labels))


def by_model(usual: object, own: Callable[[ModelSpec], object]) -> str:
    """The models that have another default than the usual one, as help states it."""
    return "".join(f"; {name} {own(spec)}" for name, spec in SPECS.items() if own(spec) != usual)


@declare
class CheckpointOptions(Options):
    """model"""

    model: str = option(
        "; ".join(f"{name}: {spec.about}" for name, spec in SPECS.items()), "emoji", unit="NAME"
    )
    model_path: str | None = option(
        "the target's checkpoint: a folder (LlamaGen's .pt: the file), or a hub id OWNER/NAME, fetched once "
        "into the hub's cache, HF_HOME (default: the one of --model)",
        unit="PATH",
    )
    revision: str | None = option(
        "branch, tag or commit of a hub id, as OWNER/NAME@REV says too (default: the repository's own)",
        unit="REV",
    )
    tokenizer_base_path: str | None = option(
        "folder of text_tokenizer.json, vqgan.ckpt and vqgan.yaml, or of chameleon/tokenizer with them; of "
        "anole and lumina_mgpt (default: the target's, else beside it or in ckpts/MODEL)",
        unit="DIR",
    )
    vq_path: str | None = option(
        "LlamaGen's VQ decoder, a file or OWNER/NAME/FILE on the hub (default: vq_ds16_t2i.pt, for classes "
        "vq_ds16_c2i.pt, in the target's folder, the one around it or ckpts/llamagen)",
        unit="PATH",
    )
    text_encoder: str | None = option(
        "LlamaGen's T5 encoder, a folder or a hub id (default: t5/flan-t5-xl or flan-t5-xl in these folders)",
        unit="PATH",
    )
    drafter_path: str | None = option(
        "the drafter's checkpoint, a folder or a hub id (default: the one of --model)", unit="PATH"
    )
    target_size: int | None = option(
        "side of the image. lumina_mgpt: 512, 768, 1024 or another multiple of 32 (default: 768, which the "
        "model of that name was trained for); emu3: any, of a square (default: 720); a LlamaGen .pt of "
        "classes: 256 or 384; other models have one, and any other is refused",
        unit="PIXELS",
        least=1,
    )
    ratio: str | None = option(
        "emu3: width:height of an image of the area that --target_size squared is (default: 1:1)", unit="W:H"
    )


@declare
class ModelOptions(CheckpointOptions):
    """loading"""

    drafter_alignment: str | None = option(
        "published: the drafter reads a feature with the code behind it, as the released code drafts; "
        "unshifted: with its own code, as that code trains Anole's and Lumina's drafters; auto: the one that "
        "agrees better with the target on 32 cells (default: "
        f"{', '.join(f'{name} auto' for name in MEASURED)}; others published)",
        choices=("auto", *TOKEN_SHIFTS),
    )
    precision: str = option(
        "of weights and activations, probabilities are fp32; auto: bf16 where the device multiplies it, else "
        "fp16 on cuda and fp32 on a CPU, as emoji on any CPU",
        "auto",
        choices=PRECISIONS,
    )
    device: str = option("auto: cuda where there is one", "auto", choices=DEVICES)
    attention: str = option(
        "sdpa: torch's; flash: flash-attn, an extra, for prompts and the AR baseline on CUDA in fp16 or bf16 "
        "(draft trees need a mask, which it does not take)",
        "sdpa",
        choices=("sdpa", "flash"),
    )
    deterministic: bool = option(
        "attend in fp64, so that a code does not depend on what else is in the pass and exact methods draw "
        "the AR baseline's image in bf16 too; on a CPU",
        False,
    )
    batch_size: int = option("images in flight at once", 1, unit="IMAGES", least=1)


@declare
class PromptOptions(Options):
    """prompts

    Selected in this order: --slice, --num_images, --start_idx/--end_idx.
    """

    prompt: str | None = option(
        "a text, repeated num_images times under different seeds; a .txt, .tsv, .csv or .json file; or "
        "PartiPrompts, MSCOCO2017Val, MSCOCO2014Val, MSCOCO2017Train, SJDPrompts from --prompt_dir (default: "
        "the command's own of the embedded model, in configs)",
        unit="TEXT",
    )
    class_labels: tuple[int, ...] | None = option(
        "classes such as 207,360 instead of prompts, for LlamaGen's class-conditional checkpoints",
        unit="IDS",
        read=_class_labels,
    )
    prompt_dir: str = option("folder of the named prompt sets", "data/prompts", unit="DIR")
    captions: str | None = option(
        "of each image of COCO annotations: its first caption, its longest, or all; the paper's 100 are "
        f"--num_images 100 of them (default: {CAPTIONS[0]})",
        choices=CAPTIONS,
    )
    num_images: int = option(
        "images; of more prompts a sample drawn with --random_seed; -1: all", 10, unit="N", read=image_count
    )
    slice: str | None = option("rows of the list, half open (default: all)", unit="START-END", read=_window)
    start_idx: int = option("first of the selected prompts", 0, unit="ROW", least=0)
    end_idx: int | None = option(
        f"exclusive end of them (default: {DEFAULT_END}; more are refused, not cut)", unit="ROW", least=1
    )
    random_seed: int = option(
        "run seed; an image's own is a hash of it and the prompt's name, with or without --set_seed",
        42,
        unit="SEED",
    )
    set_seed: bool = option("also seed torch's own generator and choose deterministic cuDNN kernels", False)


@declare
class FilterOptions(Options):
    """sampling"""

    top_k: int = option(
        f"most probable codes kept; 0: all (default: {TOP_K}{by_model(None, lambda spec: spec.top_k)})",
        unit="CODES",
        least=0,
    )
    top_p: float = option("probability mass kept", 1.0, unit="P", above=0, most=1)
    cfg: float = option(
        "guidance scale; 1: none, one row per image instead of two "
        f"(default: 3{by_model('3', lambda spec: f'{spec.guidance:g}')})",
        unit="SCALE",
        least=0,
        most=100,
    )
    cfg_mode: str | None = option(
        "lumina_mgpt takes either of the published names, and means the same: guidance rows share a pass, "
        "each at positions of its own; other models refuse sequential (default: parallel)",
        choices=("sequential", "parallel"),
        unit="MODE",
    )

    def __post_init__(self) -> None:
        """What is not given is the model's own."""
        spec = SPECS.get(getattr(self, "model", "emoji"), SPECS["emoji"])
        own = {"cfg": spec.guidance, "top_k": TOP_K if spec.top_k is None else spec.top_k}
        for name, value in own.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)


@declare
class SamplingOptions(FilterOptions):
    """sampling"""

    temperature: float = option("0 (up to 1e-5): greedy", 1.0, unit="T", least=0, most=100)


@declare
class GraphOptions(Options):
    """run"""

    cuda_graphs: bool = option("capture the parts of a step as CUDA graphs and replay them, on cuda", False)


@declare
class RunOptions(GraphOptions):
    """run"""

    output_dir: str = option("folder of everything written", "generated_images", unit="DIR")


@declare
class ShardOptions(Options):
    """run"""

    output_dir: str = option(
        "folder of the shards; a run that was stopped goes on there", "data/drafter_train_data", unit="DIR"
    )
    shard_size: int = option("images per file, the most that a kill loses", 64, unit="IMAGES", least=1)
    features: bool = option(
        "keep the target's features too (Anole: 17 MB per image); else train_drafter computes them", False
    )


@declare
class ScoringOptions(Options):
    """scoring"""

    batch_size: int = option("images at once", 64, unit="IMAGES", least=1)
    device: str = option("auto: cuda where there is one", "auto", choices=DEVICES)
    scores: str | None = option(
        "where scores are appended (default: scores.jsonl beside the images)", unit="FILE"
    )
