"""generate_codebook: the table of nearest codes that relaxed acceptance reads, in the published format."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eval.options import add_model_arguments

MOST_CODES = 1 << 16  # a table holds uint16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of generate_codebook."""
    add_model_arguments(parser)
    group = parser.add_argument_group("run")
    group.add_argument(
        "--save_path",
        metavar="DIR",
        help="folder of top_{V - 1}_indices.npy (default: ckpts/MODEL/vq_distances, where --lantern looks)",
    )
    group.add_argument(
        "--config", metavar="FILE", help="flat YAML file of options; the command line wins (default: none)"
    )
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")


def run(args: argparse.Namespace) -> None:
    """Write the table: row i all other codes by ascending raw L2 distance, uint16 [V, V - 1].

    The last line printed is one JSON document. Computed in fp64 on the model's device and written whole or
    not at all.
    """
    import numpy as np

    from adt_tree.relax import nearest_table
    from eval.errors import UserError
    from eval.session import load_undrawn
    from models.files import replacing

    model = load_undrawn(args)
    codes = model.num_codes
    if codes > MOST_CODES:
        raise UserError(f"--model {args.model}: {codes} codes do not fit the published tables' uint16")
    folder = Path(args.save_path) if args.save_path else model.tables[-1]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"top_{codes - 1}_indices.npy"
    table = nearest_table(model.codebook, codes - 1).to("cpu").numpy().astype(np.uint16)
    with replacing(path) as part, part.open("wb") as stream:
        np.save(stream, table, allow_pickle=False)
    print(json.dumps({"table": str(path), "codes": codes, "bytes": path.stat().st_size}))
