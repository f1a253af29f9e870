"""Folders in the naming of the scorers of GenEval and DPG-Bench, from a run of generate_images. No torch.

    GenEval     00000/metadata.jsonl      the first line of its prompt file
                00000/samples/0000.png    to 0003.png, the images of this line
    DPG-Bench   NAME.png                  the images of the prompt NAME.txt, 2 x 2

The scorers are programs with environments of their own. They count every picture in their folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from PIL import Image

from adt_tree.errors import UserError
from models.checkpoint.files import expanded, lines_of, read_text, write_atomic
from storage.prompts import repeated_name
from storage.run_folder import png_bytes, stored_options, stored_run

IMAGES = 4  # of every prompt, as both benchmarks have it
ALL = {
    "slice": None,
    "num_images": -1,
    "start_idx": 0,
    "end_idx": None,
    "images_per_prompt": IMAGES,
}  # of their prompts


def geneval(root: Path, target: Path) -> str:
    """Writes GenEval's folder, from a run over its prompt file. Returns the command of its scorer."""
    source, images, _ = images_of(root)
    if source.suffix.lower() != ".jsonl":  # of another suffix the lines themselves would be the prompts
        raise UserError(f"{source}: make the run with --prompt evaluation_metadata.jsonl")
    files: dict[str, Callable[[], bytes]] = {}
    lines = [line for line in lines_of(read_text(source)) if line.strip()]
    for row, (line, paths) in enumerate(zip(lines, images.values(), strict=True)):
        files[f"{row:05}/metadata.jsonl"] = f"{line}\n".encode
        files |= {f"{row:05}/samples/{number:04}.png": path.read_bytes for number, path in enumerate(paths)}
    write(target, files)
    return f"evaluation/evaluate_images.py {target}"


def dpg(root: Path, target: Path) -> str:
    """Writes DPG-Bench's folder, from a run over its folder of prompts. Returns the command of its scorer."""
    source, images, sizes = images_of(root)
    if not source.is_dir():
        raise UserError(f"{source}: make the run with --prompt dpg_bench/prompts, a folder of .txt files")
    if len({side for size in sizes for side in size}) > 1:
        raise UserError(f"{root} has images of {sizes} pixels: DPG-Bench's scorer cuts squares of one size")
    side, _ = sizes[0]
    write(target, {f"{name}.png": partial(square_of, paths, side) for name, paths in images.items()})
    return f"dpg_bench/compute_dpg_bench.py --image-root-path {target} --pic-num {IMAGES} --resolution {side}"


def images_of(root: Path) -> tuple[Path, dict[str, list[Path]], list[tuple[int, int]]]:
    """Returns where a run's prompts are, the images of each prompt by its name, and their sizes in pixels.

    Raises UserError if the prompts are in no file, and for images that are missing, damaged, or made from
    other prompts than there are now.
    """
    options = stored_options(root)
    source = Path(expanded(str(options.get("prompt"))))
    if not os.path.exists(source):  # a text may be too long for Path.exists
        raise UserError(f"{root}: its prompts, --prompt {source}, are no file and no folder")
    folder = stored_run(root, options | ALL)
    missing = [folder.png(name).name for name in folder.prompts if not folder.is_finished(name)]
    if missing:
        raise UserError(
            f"{root} lacks {len(missing)} of {len(folder.prompts)} images ({', '.join(missing[:8])}): run it "
            f"again with --num_images -1 --images_per_prompt {IMAGES}"
        )
    for _, error in folder.faults(folder.prompts):
        raise error
    sizes = {Image.open(folder.png(name)).size for name in folder.prompts}
    prompts = list(folder.prompts)[: len(folder.prompts) // IMAGES]
    images = {name: [folder.png(repeated_name(name, n)) for n in range(IMAGES)] for name in prompts}
    return source, images, sorted(sizes)


def square_of(paths: Sequence[Path], side: int) -> bytes:
    """Returns a PNG of four images of side x side pixels, in raster order."""
    square = Image.new("RGB", (2 * side, 2 * side))
    for number, path in enumerate(paths):
        square.paste(Image.open(path), (number % 2 * side, number // 2 * side))
    return png_bytes(square)


def write(target: Path, files: Mapping[str, Callable[[], bytes]]) -> None:
    """Writes files into a new folder. Raises UserError if it holds anything, which the scorer might count."""
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise UserError(f"{target} is not empty: give another folder, or empty it")
    for name, content in files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content())
