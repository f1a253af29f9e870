"""memory: what every model needs while it decodes, computed from its dimensions. No checkpoint is needed."""

from __future__ import annotations

import json

from adt_tree.errors import UserError
from cli.parser import Options as Base
from cli.parser import declare, option, positional
from eval.tables import markdown
from models.registry import SPECS
from models.spec import PRECISIONS

NAMES = tuple(name for name, spec in SPECS.items() if spec.published)


@declare
class Options(Base):
    """memory"""

    names: tuple[str, ...] = positional(f"of {', '.join(NAMES)} (default: all)", "NAME")
    precision: str = option(
        "of weights and caches (beside bf16 weights a CPU with AVX-512 has fp32 caches: as for fp32)",
        "bf16",
        choices=tuple(name for name in PRECISIONS if name != "auto"),
    )
    batch_size: int = option("in flight at once", 1, unit="IMAGES", least=1)
    total_token: int | None = option("of a tree, root included (default: the model's)", unit="NODES", least=2)


def run(options: Options) -> None:
    """Print a table in GB; the last line printed is one JSON document in bytes."""
    from models.memory import parts, published_use

    for name in options.names:
        if name not in NAMES:
            raise UserError(f"memory {name}: there is no such model; choose from {', '.join(NAMES)}")
    found = {
        name: parts(published_use(name, options.precision, options.batch_size, options.total_token))
        for name in options.names or NAMES
    }
    print(table(found))
    print(json.dumps(found))


def table(found: dict[str, dict[str, int]]) -> str:
    """A line per model, in GB."""
    rows = [[f"`{name}`", *(f"{size / 1e9:.2f}" for size in row.values())] for name, row in found.items()]
    return markdown([["GB", *next(iter(found.values()))], *rows])
