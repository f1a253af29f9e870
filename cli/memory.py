"""memory: what every model needs while it decodes, computed from its dimensions. No checkpoint is needed."""

from __future__ import annotations

import json
from typing import Any

from cli.options import Options as Base
from cli.options import declare, option
from eval.errors import UserError
from eval.families import RELEASED, SHAPE_OF

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
NAMES = ("anole", "lumina_mgpt", "llamagen", "llamagen2")


@declare
class Options(Base):
    """memory"""

    names: tuple[str, ...] = option(
        f"of {', '.join(NAMES)} (default: all)", (), unit="NAME", positional=True
    )
    precision: str = option(
        "of weights and caches (beside bf16 weights a CPU with AVX-512 has fp32 caches: as for fp32)",
        "bf16",
        choices=tuple(BYTES),
    )
    batch_size: int = option("in flight at once", 1, unit="IMAGES", within=(1, None))
    total_token: int | None = option(
        "of a tree, root included (default: the model's)", unit="NODES", within=(2, None)
    )


def run(options: Options) -> None:
    """Print a table in GB; the last line printed is one JSON document in bytes."""
    from models.memory import parts

    for name in options.names:
        if name not in NAMES:
            raise UserError(f"memory {name}: there is no such model; choose from {', '.join(NAMES)}")
    found = {name: parts(use_of(name, options)) for name in options.names or NAMES}
    print(table(found))
    print(json.dumps(found))


def use_of(name: str, options: Options) -> Any:
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
        nodes=options.total_token or tree.budget + 1,
        scratch=max(tree.depth + 1, tree.depth * tree.width),
        images=options.batch_size,
        branches=2,
        element=BYTES[options.precision],
    )


def table(found: dict[str, dict[str, int]]) -> str:
    """A line per model, in GB."""
    heads = list(next(iter(found.values())))
    lines = [f"| GB | {' | '.join(heads)} |", "|---" + "|---:" * len(heads) + "|"]
    for name, row in found.items():
        lines.append(f"| `{name}` | " + " | ".join(f"{row[head] / 1e9:.2f}" for head in heads) + " |")
    return "\n".join(lines)
