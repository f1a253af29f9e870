"""What a model family is, and what one may ask of loading it. No torch, so that options are checked at once.

A family is a ModelSpec in models/registry.py: all that the rest of the program knows of it, where its files
lie, how they are recognised and read, which trees it draws with.

Shapes are those of a checkpoint's tensors by name, read from headers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adt_tree.budget import AutoTree
from adt_tree.errors import CheckpointError
from adt_tree.method import Tree, method_spec
from adt_tree.policy import AdaptiveTree, TreeShape

if TYPE_CHECKING:
    import torch

CKPTS = Path(__file__).resolve().parent.parent / "ckpts"
EMBEDDED_TREE = TreeShape(5, 4, 10)  # EAGLE-2's, of the embedded model: a node costs it more of a pass
RELEASED_TREE = TreeShape(5, 10, 58)  # of the released code: 58 drafted nodes, 10 wide
PRECISIONS = ("auto", "bf16", "fp16", "fp32")
ALIGNMENTS = ("published", "unshifted")

Fields = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to load and how, in plain values. None: the family's own, or where the published layout has it."""

    model_path: str | None = None  # folder, file or hub id of the target
    drafter_path: str | None = None  # folder or hub id
    revision: str | None = None  # of the hub id model_path
    precision: str = "auto"  # one of PRECISIONS, of weights and activations; the codec stays fp32
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    attention: str = "sdpa"  # or flash: flash-attn for prompts and the AR baseline
    deterministic: bool = False  # one seed gives one image in bf16 too, however it is decoded; on a CPU
    need_drafter: bool = True
    alignment: str | None = None  # of the drafter's tokens with its features: auto or one of ALIGNMENTS
    guidance: float = 3.0  # under which alignment auto compares them
    target_size: int | None = None  # pixels along the side of an image, or of a square of its area
    ratio: str | None = None  # width:height of an image (Emu3)
    tokenizer_base_path: str | None = None  # folder of the text tokenizer and vqgan.ckpt
    vq_path: str | None = None  # LlamaGen's vq_ds16_*.pt
    text_encoder: str | None = None  # LlamaGen's T5
    keep_text_encoder: bool = False  # in memory once all prompts are encoded


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of one model on this disk, and how they are to be read."""

    spec: ModelSpec
    folder: Path  # of the target, or its file
    drafter: Path | None  # folder; None: not wanted
    dtype: torch.dtype  # of weights and activations; the codec stays fp32
    device: torch.device
    options: LoadOptions

    def refuse_other_size(self, own: int) -> None:
        """CheckpointError if an image of another size is wanted than the model's only one, `own` pixels."""
        if self.options.target_size not in (None, own):
            raise CheckpointError(
                f"--target_size {self.options.target_size}: this model draws {own} px and no other size; "
                "leave it out"
            )

    @property
    def size(self) -> int:
        """Pixels along the side of an image, or of a square of its area: as wanted, else the family's."""
        size = self.options.target_size or self.spec.default_size
        assert size is not None, "families of several sizes have a default"
        return size


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model family: everything that is particular to it, but for its mathematics."""

    name: str  # as --model has it
    about: str  # in a few words, for --help
    load: Callable[[Checkpoint], Any]  # -> models.model.Model
    recognises: Callable[[Fields, Shapes], bool]  # whether a config.json and its tensors are this family's
    decoder_config: Callable[[Fields], Any]  # config.json -> models.transformer.DecoderConfig
    home: Path  # default folder of the family; below it lie
    target: str = ""
    hub: str | None = None  # id of what is fetched where the target is not there; None: nothing
    drafter: str = "drafter"
    options: tuple[str, ...] = ()  # options that only some families read and this one does
    default_size: int | None = None  # pixels along the side; None: the checkpoint has one size
    tree: TreeShape = RELEASED_TREE  # EAGLE-2's
    static_tree: str = "mc_sim_7b_63"  # EAGLE-1's
    guidance: float = 3.0  # as published; the user may say otherwise
    top_k: int | None = None  # as published; None: nothing is
    method: str = "eagle-2"  # what draws unless the user says otherwise
    fp32_on_cpu: bool = False  # auto precision on every CPU, so that exact methods draw one image there
    alignment: str = "published"  # of its drafters; auto: measured, because nobody published it
    reference: bool = False  # transformers decodes it too (bench --reference)
    embedded_prompts: bool = False  # prompts are rows of features, else token ids before the codes
    codec: Callable[[Fields], Any] | None = None  # vq_config -> a codec that is not models.codecs.vq's
    published: bool = True  # ckpts/manifest.json says by its name what to fetch

    @property
    def target_folder(self) -> Path:
        """Where the target lies unless the options say otherwise."""
        return self.home / self.target

    @property
    def drafter_folder(self) -> Path:
        """Where the drafter lies unless it is beside its target or the options say otherwise."""
        return self.home / self.drafter

    def default_tree(self, method: str, auto: bool = False) -> Tree | None:
        """Returns the tree of a method unless the user gives one: the method's own default, or this model's
        tree of the type that the method names. auto: trees that the method can size while decoding are.

        UserError for an unknown method.
        """
        row = method_spec(method)
        tree = AutoTree() if auto and row.auto else row.tree
        own: dict[type, Tree] = {str: self.static_tree, TreeShape: self.tree, AdaptiveTree: self.adaptive}
        return own[tree] if isinstance(tree, type) else tree

    @property
    def adaptive(self) -> AdaptiveTree:
        """ADT-Tree's constants. A released tree is the budget and the first cell's shape; the rest was tuned
        on the embedded model alone."""
        own, base = self.tree, AdaptiveTree()
        if own == EMBEDDED_TREE:
            return base
        return replace(
            base, depth_start=own.depth, width_max=own.width, width_start=own.width, budget=own.budget
        )


def home_of(target: Path) -> Path:
    """The folder of a target, which may be a file."""
    return target.parent if target.is_file() else target
