"""The commands there are, and the modules that do them. No imports: --help must answer at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """Where a command's options and its work live: modules with add_arguments(parser) and run(args)."""

    options: str
    work: str
    help: str


COMMANDS = {
    "generate_images": Command(
        "eval.options", "eval.generate", "make images from prompts, with statistics and maps"
    ),
    "bench": Command(
        "eval.bench_options", "eval.bench", "time every method against plain decoding in one run"
    ),
    "check_ckpts": Command(
        "eval.check_ckpts", "eval.check_ckpts", "name what is wrong with a model's files, from headers"
    ),
    "gpu_check": Command(
        "eval.gpu_check", "eval.gpu_check", "what a GPU has to prove, one document; on the CPU, tiny"
    ),
    "memory": Command("eval.memory", "eval.memory", "what each model needs in memory, from its dimensions"),
    "generate_train_data": Command(
        "eval.train_data_options", "eval.train_data", "let the target draw what its drafter learns from"
    ),
    "extract_code": Command(
        "eval.extract_code_options", "eval.extract_code", "pictures with captions -> codes to learn from"
    ),
    "train_drafter": Command(
        "eval.drafter_options", "training.train_drafter", "train a drafter for any of the models"
    ),
    "generate_codebook": Command(
        "eval.codebook", "eval.codebook", "write the table of nearest codes that --lantern reads"
    ),
    "eval_fid_clip": Command(
        "eval.eval_fid_clip", "eval.eval_fid_clip", "CLIP score of a run, FID against real images"
    ),
    "eval_prec_recall": Command(
        "eval.eval_prec_recall", "eval.eval_prec_recall", "precision and recall against real images"
    ),
    "eval_hpsv2": Command("eval.eval_hpsv2", "eval.eval_hpsv2", "human preference score of a run"),
    "eval_quality": Command(
        "eval.eval_quality", "eval.eval_quality", "Inception Score, KID, aesthetic score, EffNet-FD"
    ),
    "acceptance": Command(
        "eval.acceptance",
        "eval.acceptance",
        "codes a target call, tree shapes and certainty by cell of a run",
    ),
    "report": Command("eval.report", "eval.report", "stored results -> tables, plots, a document or a page"),
}
STAGES = {
    name: Command(f"training.emoji.{name}", f"training.emoji.{name}", text)
    for name, text in {
        "data": "fetch and rasterise the emoji sets, write captions",
        "tokenizer": "train the VQ tokenizer",
        "bpe": "train the text vocabulary",
        "target": "train the target",
        "measure": "figures of the tokenizer and the target on pictures never trained on",
        "prompts": "write prompts for the drafter's data",
        "export": "write the checkpoint and its model card",
        "contact": "draw the contact sheet of trained and held-out prompts",
        "recognise": "how often a picture's nearest original has the right name",
    }.items()
}
