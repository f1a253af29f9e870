"""SJD (speculative Jacobi decoding, 2410.01699): what is behind the first rejected draft is drawn anew."""

from __future__ import annotations

from torch import Tensor

from adt_tree.rivals.window import Judged, draw


def redraw(judged: Judged) -> Tensor:
    """X' ~ p after every node [B, N], whatever X was. The uniform of a node draws either this or what follows
    the last accepted draft, never both."""
    return draw(judged.p, judged.chances)
