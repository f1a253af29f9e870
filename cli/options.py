"""Option groups that several commands share: the model, the prompts, the distribution, the output."""

from __future__ import annotations

from collections.abc import Callable

from adt_tree.errors import UserError
from adt_tree.settings import Sampling
from models.family import DEVICES, PRECISIONS, TOP_K, ModelFamily
from models.registry import SPECS
from storage.command_line import declare, option
from storage.prompt_settings import PromptSettings


def by_model(usual: object, default: Callable[[ModelFamily], object]) -> str:
    """Returns "; NAME DEFAULT" for --help, for each model whose default differs from the usual one."""
    return "".join(f"; {name} {default(spec)}" for name, spec in SPECS.items() if default(spec) != usual)


def sampling_defaults(spec: ModelFamily) -> dict[str, float]:
    """Returns a model's own values of the options of the distribution, by name."""
    own = spec.sampling
    return {"temperature": own.temperature, "top_k": own.top_k, "top_p": own.top_p, "cfg": own.guidance}


def sampling_of(options: object, spec: ModelFamily) -> Sampling:
    """Returns the distribution that the options ask for. A value that they leave out is the model's own.

    Raises UserError for guidance of a model without an unconditional branch."""
    given = {name: getattr(options, name, None) for name in sampling_defaults(spec)}
    if spec.guidance == 1 and given["cfg"] not in (None, 1):
        raise UserError(f"--cfg {given['cfg']:g}: {spec.name} has no unconditional branch; give 1")
    values = sampling_defaults(spec) | {name: value for name, value in given.items() if value is not None}
    return Sampling(values["temperature"], int(values["top_k"]), values["top_p"], values["cfg"])


@declare("model")
class FileOptions:
    """Where the files of a model are, and the size of its images."""

    model_path: str | None = option(
        "the model's checkpoint: a folder, LlamaGen's .pt file, or a hub id OWNER/NAME, which is fetched "
        "once into the hub's cache, HF_HOME (default: the one that --model names)",
        unit="PATH",
        reads={True: ("revision",)},
    )
    revision: str | None = option(
        "branch, tag or commit of a hub id; OWNER/NAME@REV says the same (default: the repository's default "
        "branch)",
        unit="REV",
    )
    tokenizer_base_path: str | None = option(
        "anole, lumina_mgpt, liquid: folder that holds text_tokenizer.json (not liquid's), vqgan.ckpt and "
        "vqgan.yaml, or holds them in chameleon/tokenizer (default: the checkpoint's folder, its parent, or "
        "ckpts/MODEL)",
        unit="DIR",
    )
    vq_path: str | None = option(
        "LlamaGen's VQ decoder or simplear's decoder of pixels, a file or OWNER/NAME/FILE on the hub "
        "(default: vq_ds16_t2i.pt, vq_ds16_c2i.pt for class-conditional checkpoints, "
        "for simplear Cosmos-1.0-Tokenizer-DV8x16x16/decoder.jit, in the checkpoint's folder, its parent, or "
        "ckpts/MODEL)",
        unit="PATH",
    )
    trust_torchscript: bool = option(
        "simplear: make pixels by its decoder, which is published as TorchScript: opening it may run any "
        "code, so trust its source; without this, codes are stored",
        False,
    )
    text_encoder: str | None = option(
        "LlamaGen's T5 encoder, a folder or a hub id (default: t5/flan-t5-xl or flan-t5-xl in the folders "
        "where --vq_path is looked for)",
        unit="PATH",
    )
    target_size: int | None = option(
        "side of the image; lumina_mgpt: a multiple of 32 such as 512, 768 or 1024 (default: 768); emu3: "
        "side of a square (default: 720); simplear: a multiple of 16 such as 512 (default: 1024); LlamaGen's "
        "class-conditional .pt: 256 or 384 (default: what the published file's name says); other models "
        "generate one size and refuse any other; glm_image has --height and --width instead",
        unit="PIXELS",
        least=1,
    )
    ratio: str | None = option(
        "emu3: width:height of the image, whose area is that of --target_size squared (default: 1:1)",
        unit="W:H",
    )
    height: int | None = option(
        "glm_image: height of the image, a multiple of 32 (default: 1024)", unit="PIXELS", least=1
    )
    width: int | None = option(
        "glm_image: width of the image, a multiple of 32 (default: 1024)", unit="PIXELS", least=1
    )


@declare("model")
class FamilyOptions:
    """The family of a model."""

    model: str = option(
        "; ".join(f"{name}: {spec.about}" for name, spec in SPECS.items()),
        "emoji",
        choices=tuple(SPECS),
        unit="NAME",
        reads={name: spec.options for name, spec in SPECS.items()},
    )


@declare("model")
class CheckpointOptions(FileOptions, FamilyOptions):
    """The family of a model, and where its files are."""


@declare("loading")
class TargetOptions(CheckpointOptions):
    """A model that is loaded without a drafter."""

    precision: str = option(
        "type of weights and activations; probabilities are always fp32. auto: bf16 if the device multiplies "
        "it, else fp16 on cuda and fp32 on a CPU; emoji is fp32 on every CPU",
        "auto",
        choices=PRECISIONS,
    )
    device: str = option("auto: cuda where there is one", "auto", choices=DEVICES)


@declare("loading")
class DecoderOptions(TargetOptions):
    """A model that generates images without a drafter."""

    batch_size: int = option("images in flight at once", 1, unit="IMAGES", least=1)


@declare("loading")
class DrafterOptions:
    """A drafter network."""

    drafter_path: str | None = option(
        "the drafter's checkpoint, a folder or a hub id (default: the one that --model names)", unit="PATH"
    )


@declare("loading")
class ModelOptions(DecoderOptions, DrafterOptions):
    """A model that generates images, with or without its drafter."""


@declare("prompts")
class PromptOptions(PromptSettings):
    """The prompts of a run, and what else their seed decides."""

    set_seed: bool = option(
        "also seed torch's global generator and choose deterministic cuDNN kernels", False
    )


@declare("sampling")
class FilterOptions:
    """The distribution of a code, without its temperature."""

    top_k: int | None = option(
        "sample among this many most probable codes; 0: all "
        f"(default: {TOP_K}{by_model(TOP_K, lambda spec: spec.top_k)})",
        unit="CODES",
    )
    top_p: float | None = option(
        "sample among the most probable codes that together have this probability "
        f"(default: 1{by_model(1.0, lambda spec: spec.top_p)})",
        unit="P",
    )
    cfg: float | None = option(
        "scale of classifier-free guidance; 1: none, and one row per image instead of two "
        f"(default: 3{by_model('3', lambda spec: f'{spec.guidance:g}')})",
        unit="SCALE",
        least=0,
        most=100,
    )
    cfg_mode: str | None = option(
        "lumina_mgpt: sequential and parallel mean the same here, because both guidance rows share a pass "
        "(default: parallel)",
        choices=("sequential", "parallel"),
        unit="MODE",
    )


@declare("sampling")
class SamplingOptions(FilterOptions):
    """The distribution of a code."""

    temperature: float | None = option(
        "temperature of the softmax; 0 (up to 1e-5): greedy (default: 1"
        f"{by_model(1.0, lambda spec: spec.temperature)})",
        unit="T",
    )


def check_guided(options: CheckpointOptions, what: str) -> None:
    """Raises UserError for a model without an unconditional branch. what: the option or command that reads
    both branches."""
    if SPECS[options.model].guidance == 1:
        raise UserError(f"--model {options.model}: {what} needs the unconditional branch, which it lacks")


def check_pixels(options: ModelOptions, command: str) -> None:
    """Raises UserError for a model without pixels. command: subject of the message, such as "the page"."""
    spec, shows = SPECS[options.model], f"--model {options.model}: {command} shows pixels"
    if not spec.pixels:
        raise UserError(f"{shows}, and this model gives codes alone")
    if "trust_torchscript" in spec.options and not options.trust_torchscript:
        raise UserError(f"{shows}, which this model makes only with --trust_torchscript")


@declare("run")
class GraphOptions:
    """CUDA graphs."""

    cuda_graphs: bool | None = option(
        "record the parts of a step as CUDA graphs and replay them (default: on, on cuda)", None
    )
    compile: bool = option("with CUDA graphs, first compile layers and drafting into fewer kernels", False)


@declare("run")
class RunOptions(GraphOptions):
    """A run that stores what it makes."""

    output_dir: str = option("folder for everything that is written", "generated_images", unit="DIR")


@declare("run")
class ShardOptions:
    """A run that stores data for train_drafter."""

    output_dir: str = option(
        "folder of the shards; an interrupted run goes on there", "data/drafter_train_data", unit="DIR"
    )
    shard_size: int = option(
        "images per file; a killed run loses at most one file", 64, unit="IMAGES", least=1
    )
    features: bool = option(
        "also store the target's features (Anole: 17 MB per image), which train_drafter computes otherwise",
        False,
    )
