"""Options of every command that runs a model: defined once, checked before weights load. No torch here."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from adt_tree.policy import INITS, SELF_DRAFTED
from eval.checkpoint_options import add_checkpoint_arguments
from eval.families import ADAPT, ALIGNMENT, DEFAULT_TREE, FASTEST, RELEASED, SHAPE_OF, STATIC_OF
from eval.family_options import add_family_arguments
from eval.parser import at_least, within
from eval.prompts import CAPTIONS, DEFAULT_END

STATIC_TREES = ("mc_sim_7b_63", "naive_extend_57", "chain")
DRAFTERS = ("eagle", "jacobi", "hybrid")
SEED_CELLS = ("above", "left", "both")
DEFAULT_DELTA = 0.1
# option -> field of AdaptiveTree; the budget is --total_token less the root
ADAPT_FIELDS = {
    "adt_init": "init", "adt_beta": "beta", "adt_step_depth": "step_depth", "adt_step_width": "step_width",
    "adt_depth_min": "depth_min", "adt_depth_max": "depth_max", "adt_width_min": "width_min",
    "adt_width_max": "width_max", "adt_depth_start": "depth_start", "adt_width_start": "width_start",
}  # fmt: skip


def _image_count(text: str) -> int:
    value = at_least(-1)(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 images: give a positive number, or -1 for all prompts")
    return value


def _window(text: str) -> str:
    first, dash, last = text.partition("-")
    if not (dash and first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not START-END with START < END, such as 0-100")
    return text


def add_model_arguments(parser: argparse.ArgumentParser, batch: bool = True) -> None:
    """Which model, from where, in which precision, on which device; with batch: --batch_size."""
    group = add_checkpoint_arguments(parser)
    group.add_argument(
        "--drafter_alignment",
        choices=("auto", "published", "unshifted"),
        help="published: the drafter reads a feature with the code behind it, as the released code drafts; "
        "unshifted: with its own code, as that code trains Anole's and Lumina's drafters; auto: the one that "
        "agrees better with the target on 32 cells (default: "
        f"{', '.join(f'{model} {choice}' for model, choice in ALIGNMENT.items())}; others published)",
    )
    group.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="of weights and activations; auto: bf16 where the device multiplies it, else fp16 on cuda "
        "and fp32 on a CPU, as emoji on any CPU; guidance, filters and probabilities are fp32 always",
    )
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one"
    )
    group.add_argument(
        "--device_map",
        choices=("auto",),
        help="auto: share a model's layers out over all visible GPUs; for models that one cannot hold "
        "(default: one device)",
    )
    if batch:
        group.add_argument(
            "--batch_size", type=at_least(1), default=1, metavar="IMAGES", help="images in flight at once"
        )
    add_family_arguments(parser)


def add_prompt_arguments(parser: argparse.ArgumentParser, source: str, count: int) -> None:
    """Which prompts. source: the file used without --prompt; count: the default of --num_images."""
    group = parser.add_argument_group(
        "prompts", "Selected in this order: --slice, --num_images, --start_idx/--end_idx."
    )
    group.add_argument(
        "--prompt",
        metavar="TEXT",
        help="a text, repeated num_images times under different seeds; a .txt, "
        ".tsv, .csv or .json file; or PartiPrompts, MSCOCO2017Val, MSCOCO2014Val, MSCOCO2017Train, "
        f"SJDPrompts from --prompt_dir (default: {source})",
    )
    group.add_argument(
        "--prompt_dir", default="data/prompts", metavar="DIR", help="folder of the named prompt sets"
    )
    group.add_argument(
        "--captions",
        choices=CAPTIONS,
        help="of each image of COCO annotations: its first caption, its longest, or all; the paper's 100 are "
        f"--num_images 100 of them (default: {CAPTIONS[0]})",
    )
    group.add_argument(
        "--num_images",
        type=_image_count,
        default=count,
        metavar="N",
        help="images; of a longer list of prompts a sample drawn with --random_seed; -1: all",
    )
    group.add_argument(
        "--slice",
        type=_window,
        metavar="START-END",
        help="rows of the list, half open, before --num_images (default: all)",
    )
    group.add_argument(
        "--start_idx", type=at_least(0), default=0, metavar="ROW", help="first of the selected prompts"
    )
    group.add_argument(
        "--end_idx",
        type=at_least(1),
        metavar="ROW",
        help=f"end of the selected prompts, exclusive (default: {DEFAULT_END}; more are refused, not cut)",
    )
    group.add_argument(
        "--random_seed",
        type=int,
        default=42,
        metavar="SEED",
        help="run seed; an image's seed is a hash of "
        "it and the prompt's name, so runs repeat with or without --set_seed",
    )
    group.add_argument(
        "--set_seed",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="also seed torch's own generator and choose deterministic cuDNN kernels",
    )


def add_law_arguments(parser: argparse.ArgumentParser, temperature: bool) -> None:
    """The sampling law; with temperature: the single --temperature."""
    group = parser.add_argument_group("sampling")
    if temperature:
        group.add_argument(
            "--temperature", type=within(0, 100), default=1.0, metavar="T", help="0 (up to 1e-5): greedy"
        )
    group.add_argument(
        "--top_k",
        type=at_least(0),
        default=2000,
        metavar="CODES",
        help="most probable codes kept; 0: all (Lumina-mGPT's text top-k has no part: no text is generated)",
    )
    group.add_argument(
        "--top_p", type=within(0, 1, open_low=True), default=1.0, metavar="P", help="probability mass kept"
    )
    group.add_argument(
        "--cfg",
        type=within(0, 100),
        default=3.0,
        metavar="SCALE",
        help="guidance scale; 1: none, one row an image instead of two",
    )
    group.add_argument(
        "--cfg_mode",
        choices=("sequential", "parallel"),
        metavar="MODE",
        help="sequential or parallel: for lumina_mgpt either name of the published code is taken, and means "
        "that both guidance rows share a pass, each at positions of its own: the tokens of sequential; other "
        "models refuse sequential (default: parallel)",
    )


def add_lantern_arguments(parser: argparse.ArgumentParser, switch: bool, delta: float, k: str) -> None:
    """Relaxed acceptance; with switch: the flag --lantern. delta and k: the defaults."""
    group = parser.add_argument_group("relaxed acceptance (LANTERN)")
    if switch:
        group.add_argument(
            "--lantern",
            action=argparse.BooleanOptionalAction,
            default=False,
            help="accept codes for the mass of their nearest neighbours: faster, no longer the target's law",
        )
    group.add_argument(
        "--lantern_k", type=at_least(0), metavar="CODES", help=f"neighbours looked at (default: {k})"
    )
    group.add_argument(
        "--lantern_delta",
        type=within(0, 1e6),
        metavar="D",
        help="up to 1: bound on the borrowed mass; above "
        f"1: LANTERN++'s factor on the code's own probability (default: {delta:g})",
    )
    group.add_argument(
        "--lantern_table",
        metavar="PATH",
        help="table of nearest codes, top_{V - 1}_indices.npy or its folder (default: the one in the "
        "checkpoint's or drafter's folder or in ckpts/MODEL/vq_distances, else computed from the codebook)",
    )


def _of_models(values: Mapping[str, object]) -> str:
    """What other models have for a default."""
    return "".join(f"; {model} {value}" for model, value in values.items())


def _both(field: str, more: int = 0) -> str:
    """The default of a fixed shape's field for either drafter, and for models with trees of their own."""
    own = {model: getattr(shape, field) + more for model, shape in RELEASED.items()}
    return ", ".join(str(getattr(SHAPE_OF[kind], field) + more) for kind in DRAFTERS) + _of_models(own)


def add_tree_arguments(parser: argparse.ArgumentParser) -> None:
    """Shape of static and dynamic trees, and how they are verified."""
    group = parser.add_argument_group(
        "draft trees", "Three defaults are those of eagle, jacobi and hybrid; one of a model is its eagle's."
    )
    group.add_argument(
        "--drafter_type",
        choices=(*DRAFTERS, "none"),
        help="eagle: the drafter network; jacobi: the target's own choices at rejected nodes, no network; "
        "hybrid: both in one tree, the network for its first levels; none: plain decoding (default: eagle "
        "with --static_tree, --verify rejection or --drafter_path, else the fastest exact one of the model: "
        f"{', '.join(f'{model} {drafter}' for model, drafter in FASTEST.items())}; others eagle)",
    )
    group.add_argument(
        "--seed_cells",
        choices=SEED_CELLS,
        help="jacobi, hybrid: the cell that drafts of positions not seen yet are copied from "
        "(default: above)",
    )
    group.add_argument(
        "--tree_choices",
        choices=STATIC_TREES,
        help=f"the static tree (default: {DEFAULT_TREE}{_of_models(STATIC_OF)})",
    )
    group.add_argument(
        "--total_token",
        type=at_least(2),
        metavar="NODES",
        help="nodes of a dynamic tree, root included "
        f"(default: {_both('budget', 1)})",
    )
    group.add_argument(
        "--depth",
        type=at_least(1),
        metavar="LEVELS",
        help="levels below the root of a dynamic tree of fixed shape; jacobi, hybrid: codes of its main "
        f"chain, by default three quarters of --total_token, half of a large one (default: {_both('depth')})",
    )
    group.add_argument(
        "--draft_top_k",
        "--drafter_top_k",
        type=at_least(1),
        metavar="NODES",
        help="children a node and nodes a level of a dynamic tree of fixed shape; jacobi, hybrid: "
        f"candidates a cell (default: {_both('width')})",
    )
    group.add_argument(
        "--verify",
        choices=("coupled", "rejection"),
        help="coupled: the image of plain decoding at the same "
        "seed; rejection: the published rules (default: coupled)",
    )
    group.add_argument(
        "--rules",
        choices=("fixed", "reference"),
        help="reference: the released code's arithmetic where it "
        "differs; needs --verify rejection (default: fixed)",
    )


def add_adapt_arguments(parser: argparse.ArgumentParser) -> None:
    """The constants of the adaptive tree."""
    group = parser.add_argument_group(
        "adaptive trees (ADT-Tree)", "These constants need --peanut where it exists."
    )
    group.add_argument(
        "--adt_init",
        choices=INITS,
        help="the decoded neighbour whose state a tree starts from: left, above, the mean of both, or any "
        f"cell (default: {ADAPT.init})",
    )
    group.add_argument(
        "--adt_beta",
        type=within(0, 1),
        metavar="RATE",
        help=f"acceptance rate from which trees deepen (default: {ADAPT.beta:g}, {SELF_DRAFTED.beta:g})",
    )
    words = {
        "step_depth": (0, "LEVELS", "l_d, change of depth a step"),
        "step_width": (0, "NODES", "l_k, change of width a step"),
        "depth_min": (1, "LEVELS", "least depth"), "depth_max": (1, "LEVELS", "greatest depth"),
        "width_min": (1, "NODES", "least width"), "width_max": (1, "NODES", "greatest width"),
        "depth_start": (1, "LEVELS", "depth of the first tree"),
        "width_start": (1, "NODES", "width of the first tree"),
    }  # fmt: skip
    for name, (low, unit, text) in words.items():
        group.add_argument(
            f"--adt_{name}",
            type=at_least(low),
            metavar=unit,
            help=f"{text} (default: {getattr(ADAPT, name)}, {getattr(SELF_DRAFTED, name)})",
        )


def add_run_arguments(parser: argparse.ArgumentParser, output_dir: str, graphs: bool = False) -> None:
    """Where results go and where options come from; graphs: and whether work is captured."""
    group = parser.add_argument_group("run")
    if graphs:
        group.add_argument(
            "--cuda_graphs",
            action=argparse.BooleanOptionalAction,
            default=False,
            help="capture the parts of a cycle as CUDA graphs and replay them; needs one CUDA device",
        )
    group.add_argument("--output_dir", default=output_dir, metavar="DIR", help="folder of everything written")
    group.add_argument(
        "--config",
        metavar="FILE",
        help="flat YAML file of these options; the command line wins (default: none)",
    )
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of generate_images."""
    add_model_arguments(parser)
    add_prompt_arguments(parser, "configs/emoji_prompts.txt", 10)
    add_law_arguments(parser, temperature=True)
    group = parser.add_argument_group("method")
    group.add_argument(
        "--model_type",
        choices=("eagle", "base", "vllm"),
        default="eagle",
        help="eagle: draft trees; base: plain autoregressive decoding; vllm is refused",
    )
    group.add_argument(
        "--peanut",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="ADT-Tree: depth and width of each tree from the adjacent cell and the last acceptance rate",
    )
    group.add_argument(
        "--static_tree",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="EAGLE-1: a static tree of the drafter network; without it and --peanut: dynamic trees of fixed "
        "shape (with --drafter_type eagle, EAGLE-2)",
    )
    group.add_argument(
        "--eagle_version",
        type=int,
        metavar="N",
        help="lumina_mgpt's switch between static (1) and dynamic trees (any other number); refused for "
        "other models (default: none, which is dynamic)",
    )
    group.add_argument(
        "--grid_search",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="never read by the published code: refused; `main.py bench --vary` searches",
    )
    add_lantern_arguments(
        parser, switch=True, delta=DEFAULT_DELTA, k="1000, or an eighth of a smaller codebook"
    )
    add_tree_arguments(parser)
    add_adapt_arguments(parser)
    add_run_arguments(parser, "generated_images", graphs=True)
    parser.add_argument(
        "--heatmaps",
        type=at_least(0),
        default=4,
        metavar="N",
        help="first images drawn beside their maps of accepted codes and tree depth",
    )
