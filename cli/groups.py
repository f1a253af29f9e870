"""Groups of options that several commands take: the model, the prompts, the distribution, the output."""

from __future__ import annotations

import argparse

from cli.options import Options, declare, option
from eval.prompts import CAPTIONS, DEFAULT_END
from models.registry import SPECS
from models.spec import PRECISIONS, TOKEN_SHIFTS

DEVICES = ("auto", "cpu", "cuda")
TOP_K = 2000  # of the published code
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


@declare
class CheckpointOptions(Options):
    """model"""

    model: str = option(
        "; ".join(f"{name}: {spec.about}" for name, spec in SPECS.items()), "emoji", unit="NAME"
    )
    model_path: str | None = option(
        "the target's checkpoint: a folder (LlamaGen's .pt: the file), or a Hugging Face hub id OWNER/NAME, "
        "which is fetched into the hub's cache (HF_HOME) and used without a network from then on (default: "
        "the one of --model)",
        unit="PATH",
    )
    revision: str | None = option(
        "branch, tag or commit of a hub id given as --model_path; OWNER/NAME@REV says the same, for a "
        "drafter too (default: the repository's own)",
        unit="REV",
    )
    tokenizer_base_path: str | None = option(
        "where text_tokenizer.json, vqgan.ckpt and vqgan.yaml lie, or chameleon/tokenizer below it has them "
        "(default: the target's folder, else chameleon/tokenizer beside it or in ckpts/MODEL); of anole and "
        "lumina_mgpt",
        unit="DIR",
    )
    vq_path: str | None = option(
        "LlamaGen's VQ decoder, a file or OWNER/NAME/FILE on the hub (default: vq_ds16_t2i.pt, for classes "
        "vq_ds16_c2i.pt, in the target's folder, the one around it or ckpts/llamagen)",
        unit="PATH",
    )
    text_encoder: str | None = option(
        "LlamaGen's T5 encoder, a folder or a hub id; published: google/flan-t5-xl (default: t5/flan-t5-xl "
        "or flan-t5-xl in the same folders)",
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
        within=(1, None),
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
        "of weights and activations; auto: bf16 where the device multiplies it, else fp16 on cuda and fp32 "
        "on a CPU, as emoji on any CPU; guidance, filters and probabilities are fp32 always",
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
    batch_size: int = option("images in flight at once", 1, unit="IMAGES", within=(1, None))


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
        "LlamaGen's classes instead of prompts, such as 207,360, for a class-conditional checkpoint; a class "
        "names its image (default: none)",
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
        "images; of a longer list of prompts a sample drawn with --random_seed; -1: all",
        10,
        unit="N",
        read=image_count,
    )
    slice: str | None = option(
        "rows of the list, half open, before --num_images (default: all)", unit="START-END", read=_window
    )
    start_idx: int = option("first of the selected prompts", 0, unit="ROW", within=(0, None))
    end_idx: int | None = option(
        f"end of the selected prompts, exclusive (default: {DEFAULT_END}; more are refused, not cut)",
        unit="ROW",
        within=(1, None),
    )
    random_seed: int = option(
        "run seed; an image's seed is a hash of it and the prompt's name, so runs repeat with or without "
        "--set_seed",
        42,
        unit="SEED",
    )
    set_seed: bool = option("also seed torch's own generator and choose deterministic cuDNN kernels", False)


def _published(field: str, usual: object = None) -> str:
    """What some models have for a default of their own."""
    own = {spec.name: getattr(spec, field) for spec in SPECS.values()}
    return "".join(f"; {name} {value:g}" for name, value in own.items() if value != usual)


@declare
class FilterOptions(Options):
    """sampling"""

    top_k: int = option(
        "most probable codes kept; 0: all (Lumina-mGPT's text top-k has no part: no text is generated) "
        f"(default: {TOP_K}{_published('top_k')})",
        unit="CODES",
        within=(0, None),
    )
    top_p: float = option("probability mass kept", 1.0, unit="P", above=0, within=(None, 1))
    cfg: float = option(
        "guidance scale; 1: none, one row per image instead of two "
        f"(default: 3{_published('guidance', 3.0)})",
        unit="SCALE",
        within=(0, 100),
    )
    cfg_mode: str | None = option(
        "sequential or parallel: for lumina_mgpt either name of the published code is taken, and means that "
        "both guidance rows share a pass, each at positions of its own: the tokens of sequential; other "
        "models refuse sequential (default: parallel)",
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

    temperature: float = option("0 (up to 1e-5): greedy", 1.0, unit="T", within=(0, 100))


@declare
class GraphOptions(Options):
    """run"""

    cuda_graphs: bool = option(
        "capture the parts of a step as CUDA graphs and replay them; needs one CUDA device", False
    )


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
    shard_size: int = option(
        "images per file; at most so many are lost by a kill", 64, unit="IMAGES", within=(1, None)
    )
    features: bool = option(
        "keep the target's features too (Anole: 17 MB per image); else train_drafter computes them", False
    )


@declare
class ScoringOptions(Options):
    """scoring"""

    batch_size: int = option("images at once", 64, unit="IMAGES", within=(1, None))
    device: str = option("auto: cuda where there is one", "auto", choices=DEVICES)
    scores: str | None = option(
        "where the scores are appended (default: scores.json beside the images)", unit="FILE"
    )
