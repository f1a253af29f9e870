"""memory: what every model needs while it draws, computed from its dimensions. No checkpoint is needed."""

from __future__ import annotations

import argparse
import json
from typing import Any

from eval.errors import UserError
from eval.families import RELEASED, SHAPE_OF
from eval.parser import at_least

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
NAMES = ("anole", "lumina_mgpt", "llamagen", "llamagen2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of memory."""
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument(
        "--precision",
        choices=tuple(BYTES),
        default="bf16",
        help="of weights and caches (beside bf16 weights a CPU with AVX-512 has fp32 caches: as for fp32)",
    )
    parser.add_argument(
        "--batch_size", type=at_least(1), default=1, metavar="IMAGES", help="in flight at once"
    )
    parser.add_argument(
        "--total_token",
        type=at_least(2),
        metavar="NODES",
        help="of a tree, root included (default: the model's)",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def run(args: argparse.Namespace) -> None:
    """Print a table in GB; the last line printed is one JSON document in bytes."""
    from models.memory import parts

    for name in args.names:
        if name not in NAMES:
            raise UserError(f"memory {name}: there is no such model; choose from {', '.join(NAMES)}")
    found = {name: parts(use_of(name, args)) for name in args.names or NAMES}
    print(table(found))
    print(json.dumps(found))


def use_of(name: str, args: argparse.Namespace) -> Any:
    """The published dimensions of a model, guided, with the drafter's trees."""
    from models import chameleon, llamagen
    from models.memory import Use
    from models.registry import CKPTS
    from models.vq import VQConfig

    shape = json.loads((CKPTS / "manifest.json").read_text(encoding="utf-8"))["shapes"][name]
    tree = RELEASED.get(name, SHAPE_OF["eagle"])
    read = llamagen.decoder_config if name.startswith("llamagen") else chameleon.decoder_config
    return Use(
        decoder=read(shape["target"]),
        drafter=read(shape["drafter"]),
        vq=VQConfig.from_hf(shape["vq"]),
        side=shape["side"],
        tokens=shape["image_tokens"],
        prompt=shape["prompt"],
        nodes=args.total_token or tree.budget + 1,
        scratch=max(tree.depth + 1, tree.depth * tree.width),
        images=args.batch_size,
        branches=2,
        element=BYTES[args.precision],
    )


def table(found: dict[str, dict[str, int]]) -> str:
    """A line a model, in GB."""
    heads = list(next(iter(found.values())))
    lines = [f"| GB | {' | '.join(heads)} |", "|---" + "|---:" * len(heads) + "|"]
    for name, row in found.items():
        lines.append(f"| `{name}` | " + " | ".join(f"{row[head] / 1e9:.2f}" for head in heads) + " |")
    return "\n".join(lines)
