"""The description of a model family, and the options of loading a model. No torch, so that options are
checked at once.

Each family is one ModelFamily in models/registry.py. It holds all that the rest of the program knows about
the family: where its files lie, how to recognise and read them, and the defaults of decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adt_tree.errors import CheckpointError, UserError, store
from adt_tree.fastest_size import AutoTree
from adt_tree.method import method_spec
from adt_tree.policy import TreeSettings
from adt_tree.settings import Lantern, Sampling
from models.checkpoint.files import expanded
from models.checkpoint.hub import locate
from models.published import Networks, Source

if TYPE_CHECKING:
    import torch

PUBLISHED_LANTERN = Lantern()
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # precision -> name in torch
PRECISIONS = ("auto", *DTYPE_NAMES)  # values of LoadOptions.precision
DEVICES = ("auto", "cpu", "cuda")  # values of commands; LoadOptions.device takes cuda:N as well
TOP_K = 2000  # default top-k, from the released code, where a family published none

Fields = Mapping[str, Any]  # of config.json
Shapes = Mapping[str, tuple[int, ...]]  # of tensors by name, from the headers of a checkpoint


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of loading a model, in plain values. None means the family's default. Paths may also be
    objects or begin with ~, and the device may be torch's."""

    model_path: str | None = None  # the target: a folder, a file or a hub id
    drafter_path: str | None = None  # a folder or a hub id
    revision: str | None = None  # branch, tag or commit, if model_path is a hub id
    precision: str = "auto"  # one of PRECISIONS: type of weights and activations; the codec stays fp32
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    cuda_graphs: bool | None = None  # replay the parts of a step as CUDA graphs; None: on CUDA alone
    # Whether the drafter network is loaded. None: if there is one; True: CheckpointError if there is none.
    need_drafter: bool | None = None
    target_size: int | None = None  # pixels along the side of a square of the image's area
    ratio: str | None = None  # width:height of an image (Emu3)
    height: int | None = None  # pixels of an image (GLM-Image)
    width: int | None = None  # pixels of an image (GLM-Image)
    tokenizer_base_path: str | None = None  # folder that holds the text tokenizer and vqgan.ckpt
    vq_path: str | None = None  # the decoder of pixels of LlamaGen or SimpleAR
    trust_torchscript: bool = False  # run the code in SimpleAR's decoder of pixels
    text_encoder: str | None = None  # LlamaGen's T5
    keep_text_encoder: bool = False  # keep it in memory after the prompts of a run are encoded

    def __post_init__(self) -> None:
        paths = ("model_path", "drafter_path", "tokenizer_base_path", "vq_path", "text_encoder")
        given = {name: value for name in paths if (value := getattr(self, name)) is not None}
        if "" in given.values():
            raise UserError(f"{next(n for n, path in given.items() if path == '')} is empty: leave it out")
        store(self, {name: expanded(value) for name, value in given.items()} | {"device": str(self.device)})


DEFAULTS = LoadOptions()


@dataclass(frozen=True, slots=True)
class InMemory:
    """A model that another program has loaded, in place of files."""

    config: Fields
    weights: Any  # a models.checkpoint.weights.Weights
    tokenizer: Any  # a tokenizers.Tokenizer or a ChatTokenizer, as the layout reads; None: there is none


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The paths of one model's files on this disk, and the dtype, device and options to read them with."""

    spec: ModelFamily
    folder: Path  # the target's folder or file
    drafter: Path | None  # folder; None: load no drafter
    dtype: torch.dtype  # type of weights and activations; the codec stays fp32
    device: torch.device
    options: LoadOptions
    loaded: InMemory | None = None  # read in place of the target's files

    def read(self) -> tuple[Fields, Any]:
        """Returns config.json and the weights, of which only the headers are read. CheckpointError for files
        that are missing, damaged or of another kind of model."""
        from models.checkpoint.config import read_config
        from models.checkpoint.weights import read_weights

        if self.loaded is not None:
            return self.loaded.config, self.loaded.weights
        config = read_config(self.folder)
        if self.spec.model_type not in ("", config.get("model_type")):
            raise CheckpointError(
                f"{self.folder / 'config.json'}: model_type is {config.get('model_type')!r}: it is not a "
                f"checkpoint of {self.spec.name}"
            )
        return config, read_weights(self.folder)

    @property
    def only_ids(self) -> bool:
        """True if prompts are token ids, because the model in memory came without a tokenizer."""
        return self.loaded is not None and self.loaded.tokenizer is None

    def refuse_other_size(self, pixels: int) -> None:
        """Raises CheckpointError if the options ask for another size than the only one of the model."""
        size = self.options.target_size
        if size not in (None, pixels):
            raise CheckpointError(f"target_size {size}: this model's images have {pixels} px; leave it out")

    def part(self, title: str, names: tuple[str, ...], option: str) -> Path:
        """Returns the path of a part that lies beside the target: the value of `option`, or else the first of
        `names` that exists in the target's folder, its parent or the family's folder. CheckpointError, which
        calls the part `title`, if there is none."""
        path: str | None = getattr(self.options, option)
        if path is not None:
            return locate(path)
        places = (home_of(self.folder), self.folder.parent, self.spec.home)
        candidates = [place / name for place in places for name in names]
        existing = next((candidate for candidate in candidates if candidate.exists()), None)
        if existing is None:
            listed = ", ".join(dict.fromkeys(str(candidate) for candidate in candidates))
            raise CheckpointError(
                f"{self.folder}: no {title} ({listed}): put it there or give it as {option}"
            )
        return existing

    @property
    def size(self) -> int:
        """Pixels along the side of an image: target_size, or else the default of the family."""
        size = self.options.target_size or self.spec.default_size
        assert size is not None, "a family with several sizes needs a default_size"
        return size


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """All that distinguishes a model family, except for the mathematics of its networks."""

    name: str
    about: str  # a few words for --help
    layout: str  # the module of models.layouts that reads its checkpoints
    home: Path  # default folder of the family's files
    model_type: str = ""  # that of its config.json; "": only recognises() tells the family
    recognises: Callable[[Fields, Shapes], bool] | None = None  # true for a checkpoint; None: by model_type
    target: Source | None = None  # None: its files lie in home and are part of this repository
    drafter: Source | None = None  # None: no drafter is published
    beside: tuple[Source, ...] = ()  # what it needs besides
    networks: Networks | None = None  # None: it is too small to measure memory and speed by dimensions
    options: tuple[str, ...] = ()  # options that this family reads and some others do not
    default_size: int | None = None  # pixels along the side; None: a checkpoint has one size only
    trees: tuple[TreeSettings, ...] = ()  # default trees for its drafter, in place of the methods' own
    lantern: Lantern = PUBLISHED_LANTERN  # what LANTERN means without further settings
    guidance: float = 3.0  # published default
    temperature: float = 1.0  # published default
    top_k: int = TOP_K  # published default
    top_p: float = 1.0  # published default
    # Default method. self-draft needs no drafter network: for most families none is published.
    method: str = "self-draft"
    fp32_on_cpu: bool = False  # precision auto is fp32 on every CPU, so that exact methods give one image
    reference: bool = False  # transformers can generate its images too (bench --reference)
    embedded_prompts: bool = False  # prompts are embedded rows after padding, not token ids
    pixels: bool = True  # true if its codes become pixels in a codec, without another model

    @property
    def reader(self) -> Any:
        """The module of its layout, which imports torch. Its load(Checkpoint) returns a models.model.Model,
        and its decoder_config(fields of config.json) a models.decoder.config.DecoderConfig. If its codec
        is no VQModel, its vqvae(fields of vq_config) makes the codec."""
        return import_module(f"models.layouts.{self.layout}")

    def matches(self, fields: Fields, shapes: Shapes) -> bool:
        """Returns whether a checkpoint with this config.json and these tensors is of this family."""
        if self.recognises is not None:
            return self.recognises(fields, shapes)
        return fields.get("model_type") == self.model_type

    @property
    def sources(self) -> tuple[Source, ...]:
        """Everything that is published of it, the target first."""
        return tuple(source for source in (self.target, self.drafter, *self.beside) if source)

    @property
    def hub(self) -> str | None:
        """The hub id that is fetched if the target is not there. None if other files must lie beside it."""
        if self.target is None or any(not source.optional for source in self.beside):
            return None
        return self.target.hub

    @property
    def parts(self) -> tuple[str, ...]:
        """The folders of the target's repository that hold it, its own first; (): all of the repository."""
        return tuple(name.removesuffix("/*") for name in self.target.files) if self.target else ()

    @property
    def target_folder(self) -> Path:
        return self.target.folder if self.target else self.home

    @property
    def sampling(self) -> Sampling:
        """The default distribution. A top-k above the number of codes keeps all of them."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.guidance)

    @property
    def drafter_folder(self) -> Path:
        """The default folder of the drafter, if there is none beside its target."""
        return self.drafter.folder if self.drafter else self.home / "trained_drafters"

    def default_tree(self, method: str, auto: bool = False) -> TreeSettings | None:
        """Returns the default tree of a method, which with a drafter network may be the family's own.

        auto: return AutoTree for a method that sizes its trees while it decodes, unless told otherwise.
        Raises UserError for an unknown method.
        """
        row = method_spec(method)
        if auto and row.auto:
            return AutoTree()
        own = (tree for tree in self.trees if row.network and type(tree) is type(row.tree))
        return next(own, row.tree)


def home_of(target: Path) -> Path:
    """Returns the folder of a target, which may be a file."""
    return target.parent if target.is_file() else target
