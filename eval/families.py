"""What the command line knows of each model: names, who drafts, the trees it was published with. No torch."""

from __future__ import annotations

import argparse
from dataclasses import replace

from adt_tree.policy import BUDGET, SELF_DRAFTED, AdaptiveTree, TreeShape, self_drafted
from eval.errors import UserError

LLAMAGEN = ("llamagen", "llamagen2")
MODELS = ("emoji", "anole", "lumina_mgpt", *LLAMAGEN)
READ_BY = {  # option -> the only models that read it
    "tokenizer_base_path": ("anole", "lumina_mgpt"),
    **dict.fromkeys(("vq_path", "text_encoder", "keep_text_encoder", "class_labels"), LLAMAGEN),
}
# Who drafts unless a network is asked for: on emoji the fastest exact one, as bench measured it; for
# lumina_mgpt no drafter network is published.
FASTEST = {"emoji": "jacobi", "lumina_mgpt": "jacobi"}
ADAPT = AdaptiveTree()
ADAPT_OF = {"eagle": ADAPT, "self-draft": SELF_DRAFTED, "jacobi": SELF_DRAFTED, "hybrid": SELF_DRAFTED}
SELF_SHAPE = self_drafted(BUDGET)
SHAPE_OF = {
    "eagle": TreeShape(5, 4, 10),
    **dict.fromkeys(("self-draft", "jacobi", "hybrid"), SELF_SHAPE),
}
FP32_ON_CPU = ("emoji",)  # so that every exact method draws plain decoding's image, code for code
SPLITTABLE = ("emoji", "anole", "lumina_mgpt")  # over several GPUs
DEFAULT_TREE = "mc_sim_7b_63"
# How features and tokens of these models' drafters are paired; of the others it is known.
ALIGNMENT = {"anole": "auto", "lumina_mgpt": "auto"}
# The released code's EAGLE trees of these models: 58 drafted nodes, 10 wide. Those above are the embedded
# model's, which is far smaller: a node costs it more of a pass.
RELEASED = {
    **dict.fromkeys(("anole", *LLAMAGEN), TreeShape(5, 10, 58)),
    "lumina_mgpt": TreeShape(6, 10, 58),
}
STATIC_OF = dict.fromkeys(("anole", *LLAMAGEN), "naive_extend_57")


def _released(args: argparse.Namespace) -> TreeShape | None:
    """The model's own tree. Commands without --model play the embedded one."""
    return RELEASED.get(vars(args).get("model", "emoji")) if args.drafter_type == "eagle" else None


def shape_of(args: argparse.Namespace) -> TreeShape:
    """The default shape of fixed trees for a model and --drafter_type."""
    return _released(args) or SHAPE_OF[args.drafter_type]


def constants_of(args: argparse.Namespace) -> AdaptiveTree:
    """The adaptive tree's defaults. A released tree is the budget and the first cell's shape; nothing of it
    was tuned, for want of the weights."""
    base, released = ADAPT_OF[args.drafter_type], _released(args)
    if released is None:
        return base
    width = released.width
    return replace(
        base, depth_start=released.depth, width_max=width, width_start=width, budget=released.budget
    )


def static_of(args: argparse.Namespace) -> str:
    """The static tree that --static_tree means."""
    return args.tree_choices or STATIC_OF.get(args.model, DEFAULT_TREE)


def check_family(args: argparse.Namespace) -> None:
    """Refuse models that this version does not run, and options that belong to others alone."""
    if args.model not in MODELS:
        raise UserError(
            f"--model {args.model}: no such model; use one of {', '.join(MODELS)} (--model_path for other "
            "weights)"
        )
    if args.cfg_mode == "sequential" and args.model != "lumina_mgpt":
        raise UserError(
            "--cfg_mode sequential: it belongs to lumina_mgpt; both guidance rows share a pass, leave it out"
        )
    for name, models in READ_BY.items():
        if getattr(args, name) and args.model not in models:
            raise UserError(f"--{name}: it belongs to --model {' or '.join(models)}; leave it out")
    if args.class_labels and args.prompt:
        raise UserError("--class_labels with --prompt: choose one")


def by_eagle_version(args: argparse.Namespace) -> argparse.Namespace:
    """The options with --static_tree and the drafter network in place of --eagle_version, lumina_mgpt's
    switch: 1 is static, any other dynamic."""
    version = args.eagle_version
    if version is None:
        return args
    if args.model != "lumina_mgpt":
        raise UserError(
            f"--eagle_version {version}: it belongs to lumina_mgpt; choose --static_tree (1) or leave it out "
            "(2)"
        )
    if args.static_tree and version != 1:
        raise UserError(f"--eagle_version {version} with --static_tree: one says dynamic trees, choose one")
    drafter = args.drafter_type or "eagle"
    return argparse.Namespace(**{**vars(args), "static_tree": version == 1, "drafter_type": drafter})
