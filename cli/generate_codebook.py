"""generate_codebook: the table of nearest codes that relaxed acceptance reads, in the published format."""

from __future__ import annotations

import json
from pathlib import Path

from adt_tree.errors import UserError
from cli.options import ModelOptions
from cli.parser import declare, option

MOST_CODES = 1 << 16  # a table holds uint16


@declare
class Options(ModelOptions):
    """run"""

    save_path: str | None = option(
        "folder (default: ckpts/MODEL/vq_distances, where --lantern looks)", unit="DIR"
    )


def run(options: Options) -> None:
    """Write the table: row i all other codes by ascending raw L2 distance, uint16 [V, V - 1].

    The last line printed is one JSON document. Computed in fp64 on the model's device and written whole or
    not at all.
    """
    import numpy as np

    from adt_tree.relax import nearest_table
    from cli.loading import load_without_drafter
    from models.checkpoint.files import replacing

    model = load_without_drafter(options).model
    codes = model.num_codes
    if codes > MOST_CODES:
        raise UserError(f"--model {options.model}: {codes} codes do not fit the published tables' uint16")
    folder = Path(options.save_path) if options.save_path else model.tables[-1]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"top_{codes - 1}_indices.npy"
    table = nearest_table(model.codebook, codes - 1).to("cpu").numpy().astype(np.uint16)
    with replacing(path) as part, part.open("wb") as stream:
        np.save(stream, table, allow_pickle=False)
    print(json.dumps({"table": str(path), "codes": codes, "bytes": path.stat().st_size}))
