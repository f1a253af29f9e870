"""Options that say which model and where its files are. No torch."""

from __future__ import annotations

import argparse

from eval.parser import at_least


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Which model, and where its files are."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default="emoji",
        metavar="NAME",
        help="emoji: the embedded model; anole: Anole-7b; lumina_mgpt: Lumina-mGPT-7B; llamagen: its "
        "stage 1, or one of classes; llamagen2: its stage 2",
    )
    group.add_argument(
        "--model_path",
        metavar="PATH",
        help="the target's checkpoint: a folder (LlamaGen's .pt: the file), or a Hugging Face hub id "
        "OWNER/NAME, which is fetched into the hub's cache (HF_HOME) and used without a network from then on "
        "(default: the one of --model)",
    )
    group.add_argument(
        "--revision",
        metavar="REV",
        help="branch, tag or commit of a hub id given as --model_path; OWNER/NAME@REV says the same, for a "
        "drafter too (default: the repository's own)",
    )
    group.add_argument(
        "--tokenizer_base_path",
        metavar="DIR",
        help="where text_tokenizer.json, vqgan.ckpt and vqgan.yaml lie, or chameleon/tokenizer below it has "
        "them (default: the target's folder, else chameleon/tokenizer beside it or in ckpts/MODEL); of anole "
        "and lumina_mgpt",
    )
    group.add_argument(
        "--vq_path",
        metavar="PATH",
        help="LlamaGen's VQ decoder, a file or OWNER/NAME/FILE on the hub (default: vq_ds16_t2i.pt, for "
        "classes vq_ds16_c2i.pt, in the target's folder, the one around it or ckpts/llamagen)",
    )
    group.add_argument(
        "--text_encoder",
        metavar="PATH",
        help="LlamaGen's T5 encoder, a folder or a hub id; published: google/flan-t5-xl (default: "
        "t5/flan-t5-xl or flan-t5-xl in the same folders)",
    )
    group.add_argument(
        "--drafter_path",
        metavar="PATH",
        help="the drafter's checkpoint, a folder or a hub id (default: the one of --model)",
    )
    group.add_argument(
        "--target_size",
        type=at_least(1),
        metavar="PIXELS",
        help="side of the image. lumina_mgpt: 512, 768, 1024 or another multiple of 32 (default: 768, which "
        "the model of that name was trained for); a LlamaGen "
        ".pt of classes: 256 or 384; other models have one, and any other is refused",
    )
    return group
