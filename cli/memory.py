"""memory: computes the memory that each model needs to generate images, from its published dimensions."""

from __future__ import annotations

from eval.tables import markdown
from models.checkpoint.files import json_text
from models.family import DTYPE_NAMES
from models.registry import PUBLISHED
from storage.command_line import CommandOptions, declare, option, positional


@declare("memory")
class Options(CommandOptions):
    """Which models, and what for."""

    names: tuple[str, ...] = positional("models (default: all)", "NAME", choices=PUBLISHED)
    precision: str = option(
        "type of weights and caches (a CPU that multiplies bf16 weights keeps fp32 caches beside them)",
        "bf16",
        choices=tuple(DTYPE_NAMES),
    )
    batch_size: int = option("images generated at the same time", 1, unit="IMAGES", least=1)
    total_token: int | None = option(
        "nodes of a draft tree, root included (default: the model's own)", unit="NODES", least=2
    )
    image_tokens: int | None = option(
        "tokens of an image: the codes of all its rasters, and row ends (default: those of the model's own "
        "size; glm_image: 1280 at 1024 px, 4352 at 2048 px)",
        unit="TOKENS",
        least=1,
    )


def run(options: Options) -> None:
    """Prints a table in GB; the last line printed is one JSON document in bytes."""
    from models.footprint import parts, published_dimensions

    sizes = options.precision, options.batch_size, options.total_token, options.image_tokens
    by_model = {name: parts(published_dimensions(name, *sizes)) for name in options.names or PUBLISHED}
    print(table(by_model))
    print(json_text(by_model))


def table(by_model: dict[str, dict[str, int]]) -> str:
    """Returns a Markdown table with a row per model, in GB."""
    rows = [[f"`{name}`", *(f"{size / 1e9:.2f}" for size in row.values())] for name, row in by_model.items()]
    return markdown([["GB", *next(iter(by_model.values()))], *rows])
