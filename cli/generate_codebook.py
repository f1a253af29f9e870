"""generate_codebook: writes the table of nearest codes for relaxed acceptance, in the published format."""

from __future__ import annotations

from pathlib import Path

from cli.options import TargetOptions
from storage.command_line import CommandOptions, declare, option


@declare("run")
class Options(TargetOptions, CommandOptions):
    """The model, and where its table goes."""

    save_path: str | None = option(
        "folder of the table (default: ckpts/MODEL/vq_distances, where --lantern looks)", unit="DIR"
    )


def run(options: Options) -> None:
    """Writes the table [V, V - 1] uint16: row i lists all other codes by ascending L2 distance from code i.

    The distances are computed in fp64 on the model's device. The last line printed is one JSON document.
    """
    import numpy as np

    from adt_tree.lantern import nearest_table
    from cli.model_from_options import load_without_drafter
    from models.checkpoint.files import json_text, replacing

    model = load_without_drafter(options).model
    codes = model.num_codes
    folder = Path(options.save_path) if options.save_path else model.tables[-1]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"top_{codes - 1}_indices.npy"
    table = nearest_table(model.codebook, codes - 1).to("cpu").numpy().astype(np.uint16)
    with replacing(path) as part, part.open("wb") as stream:
        np.save(stream, table, allow_pickle=False)
    print(json_text({"table": str(path), "codes": codes, "bytes": path.stat().st_size}))
