"""The options of methods that do not keep the distribution of the model. This file does not import torch."""

from __future__ import annotations

from adt_tree.method import METHODS
from cli.options import by_model
from cli.parser import Options, declare, option
from models.family import PUBLISHED_LANTERN as USUAL

LANTERN_VALUES = ("lantern_k", "lantern_delta", "lantern_table")


def readers(name: str) -> str:
    """Returns the names of the methods that read an option."""
    return ", ".join(spec.name for spec in METHODS.values() if name in spec.options)


@declare("relaxed acceptance (LANTERN)")
class LanternOptions(Options):
    """The settings of relaxed acceptance."""

    lantern_k: int | None = option(
        f"number of neighbours whose probability counts (default: {USUAL.max_k}"
        f"{by_model(USUAL.max_k, lambda spec: spec.lantern.max_k)}; or an eighth of the codebook if that is "
        "less)",
        unit="CODES",
    )
    lantern_delta: float | None = option(
        "up to 1: bound on the probability that a code gains from its neighbours; above 1: LANTERN++'s "
        f"factor on the probability of the code itself (default: {USUAL.delta:g}"
        f"{by_model(USUAL.delta, lambda spec: spec.lantern.delta)})",
        unit="D",
    )
    lantern_table: str | None = option(
        "table of nearest codes, top_{V - 1}_indices.npy or its folder (default: the one in the checkpoint's "
        "or drafter's folder or in ckpts/MODEL/vq_distances, else computed from the codebook)",
        unit="PATH",
    )


@declare("relaxed acceptance (LANTERN)")
class LanternSwitch(Options):
    """Relaxed acceptance."""

    lantern: bool = option(
        "count the probability of a code's nearest neighbours when it is verified, so that more codes are "
        f"accepted: faster, but not the model's distribution; read by {readers('lantern')}",
        False,
        reads={True: LANTERN_VALUES},
    )


@declare("several rows at once")
class RowOptions(Options):
    """The settings of methods that decode several rows at once."""

    row_start: int | None = option(
        f"{readers('row_start')}: begin a row when the row above it has this many cells, its row end "
        "included; fewer give fewer passes and another distribution, a whole row gives raster order "
        "(default: a third of a row in zipar and pjd, raster order in the others)",
        unit="CELLS",
    )
