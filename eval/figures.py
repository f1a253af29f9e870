"""PNG figures: contact sheet, heatmaps of one image, averaged maps of runs, and the speed plot of bench."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from adt_tree.grid import Grid
from eval.acceptance import CODES, COUNTS, TOP1, maps
from models.checkpoint.files import replacing, write_atomic
from storage.run_folder import png_bytes

MAX_ON_SHEET = 64
MIN_TILE = 160  # side of a tile, in pixels
MARGIN, CAPTION, CHARACTER = 10, 34, 7  # pixels; the last is the mean width of a letter of a caption
TITLES = {  # name of a map -> title of its panel
    CODES: "codes per target call",
    "depth": "depth of the draft tree",
    "width": "width of the draft tree",
    TOP1: "probability of the likeliest code",
}
WHITE, INK, UNSEEN = (255, 255, 255), (40, 40, 40), (0, 90, 200)


def contact_sheet(images: Sequence[tuple[Path, str]], held_out: Collection[str], path: Path) -> None:
    """Writes up to 64 pictures in a near-square grid, each above its prompt in at most two lines.

    images: files and prompts. held_out: prompts that training never saw; their pictures are framed.
    """
    images = images[:MAX_ON_SHEET]
    columns = min(len(images), max(4, round(len(images) ** 0.5)))
    rows = -(-len(images) // columns)
    pictures = [Image.open(file).convert("RGB") for file, _ in images]
    side = max(MIN_TILE, *(max(picture.size) for picture in pictures))
    sheet = Image.new(
        "RGB", (columns * (side + MARGIN) + MARGIN, rows * (side + CAPTION + MARGIN) + MARGIN), WHITE
    )
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for number, (picture, (_, text)) in enumerate(zip(pictures, images, strict=True)):
        left = MARGIN + number % columns * (side + MARGIN)
        top = MARGIN + number // columns * (side + CAPTION + MARGIN)
        sheet.paste(ImageOps.contain(picture, (side, side), Image.Resampling.LANCZOS), (left, top))
        ink = UNSEEN if text in held_out else INK
        if text in held_out:
            pen.rectangle((left - 2, top - 2, left + side + 1, top + side + 1), outline=UNSEEN, width=2)
        lines = textwrap.wrap(text, side // CHARACTER, max_lines=2, placeholder=" …")
        pen.multiline_text((left, top + side + 2), "\n".join(lines), fill=ink, font=font, spacing=2)
    write_atomic(path, png_bytes(sheet))


def heatmap(picture: Path, text: str, steps: Sequence[dict[str, Any]], grid: Grid, path: Path) -> None:
    """Writes an image beside maps of its steps: codes per target call, depth and width of the draft trees.

    Maps of several rasters lie side by side.
    """
    by_kind = maps(steps, grid)
    figure = _figure(3.6 * (1 + len(COUNTS)), 3.9)
    axes = figure.subplots(1, 1 + len(COUNTS), width_ratios=(1, 1.13, 1.13, 1.13))
    axes[0].imshow(Image.open(picture), interpolation="lanczos")
    title = text.replace("$", r"\$")
    axes[0].set_title(title if len(title) <= 46 else title[:45] + "…", fontsize=10)
    mean = sum(step["accepted"] + 1 for step in steps) / max(len(steps), 1)
    for axis, kind in zip(axes[1:], COUNTS, strict=True):
        _show_map(figure, axis, kind, by_kind[kind], None)
        axis.set_title(f"{TITLES[kind]}, mean {mean:.2f}" if kind == CODES else TITLES[kind], fontsize=10)
    _bare(axes)
    _save(figure, path)


def acceptance(rows: Sequence[tuple[str, Mapping[str, np.ndarray]]], path: Path) -> None:
    """Writes the averaged maps of runs: a row per run, a column per map, one colour scale per column.

    rows: label of a run, and its maps by name.
    """
    kinds = [kind for kind in TITLES if any(kind in by_kind for _, by_kind in rows)]
    figure = _figure(3.3 * len(kinds), 0.3 + 2.9 * len(rows))
    axes = figure.subplots(len(rows), len(kinds), squeeze=False)
    for column, kind in enumerate(kinds):
        high = max(float(np.nanmax(by_kind[kind])) for _, by_kind in rows if kind in by_kind)
        for axis, (label, by_kind) in zip(axes[:, column], rows, strict=True):
            if kind not in by_kind:
                axis.set_axis_off()
                continue
            _show_map(figure, axis, kind, by_kind[kind], high)
            axis.set_ylabel(label if column == 0 else "", fontsize=9)
        axes[0, column].set_title(TITLES[kind], fontsize=10)
    _bare(axes.flat)
    _save(figure, path)


def speed(rows: Sequence[Mapping[str, Any]], labels: Sequence[str], path: Path) -> None:
    """Writes bars of tau and of the speed-up with its 95 % interval: a group per label, a colour per
    temperature.

    rows: as bench stores them. labels: the name of each row without its temperature.
    """
    names, temperatures = list(dict.fromkeys(labels)), list(dict.fromkeys(row["temperature"] for row in rows))
    figure = _figure(10, 1.3 + 0.34 * len(names))
    axes = figure.subplots(1, 2, sharey=True)
    thickness = 0.8 / len(temperatures)
    for number, temperature in enumerate(temperatures):
        bars = [(names.index(label), row) for label, row in zip(labels, rows, strict=True)
                if row["temperature"] == temperature]  # fmt: skip
        offset = (number - (len(temperatures) - 1) / 2) * thickness
        heights = [group + offset for group, _ in bars]
        ratios = [row["SR"] for _, row in bars]
        errors = [[abs(row["SR_95"][end] - row["SR"]) for _, row in bars] for end in (0, 1)]
        axes[0].barh(heights, [row["tau"] for _, row in bars], thickness, label=f"T = {temperature:g}")
        axes[1].barh(heights, ratios, thickness, xerr=errors, ecolor="0.3", capsize=2)
    for axis, title in zip(axes, ("tau, codes per target call", "SR, speed-up in wall clock"), strict=True):
        axis.axvline(1, color="0.6", linewidth=1)
        axis.set_title(title, fontsize=10)
        axis.set_yticks(range(len(names)), names, fontsize=8)
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=8, frameon=False)
    _save(figure, path)


def frontier(rows: Sequence[Mapping[str, Any]], labels: Sequence[str], path: Path) -> None:
    """Writes quality against speed, measured for each number of images in flight and projected: a point for
    each row, beside it the values of its varied options, and a line through the points of a curve that varies
    one option.

    rows: as bench stores them, at one temperature, with the column nll. labels: the curve of each row.
    """
    sizes = list(dict.fromkeys(row["batch_size"] for row in rows))
    panels = [("SR", size, f"measured speed-up, {size} in flight") for size in sizes]
    panels.append(("projected", sizes[0], "speed-up projected where rows are free"))
    figure = _figure(6.5 * len(panels), 5.5)
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (key, size, title) in zip(axes, panels, strict=True):
        for number, curve in enumerate(dict.fromkeys(labels)):
            points = [row for row, label in zip(rows, labels, strict=True)
                      if label == curve and row["batch_size"] == size]  # fmt: skip
            line = "-" if all(len(row["varied"]) < 2 for row in points) else "none"
            options = ", ".join(dict.fromkeys(key for row in points for key in row["varied"]))
            name = f"{curve} ({options})" if options else curve
            colour, marker = f"C{number % 10}", "os^DvPX"[number % 7]
            xs, ys = [row[key] for row in points], [row["nll"] for row in points]
            axis.plot(xs, ys, linestyle=line, linewidth=1, marker=marker, color=colour, label=name)
            for x, y, row in zip(xs, ys, points, strict=True):
                text = ", ".join(map(str, row["varied"].values()))
                axis.annotate(f"  {text}", (x, y), fontsize=7, color=colour)
        axis.set_xlabel(title, fontsize=10)
        axis.margins(x=0.08)
    axes[0].set_ylabel("mean -log p of a code under the model (lower is better)", fontsize=10)
    axes[-1].legend(fontsize=8, frameon=False)
    _save(figure, path)


def _figure(width: float, height: float) -> Any:
    """Returns an empty figure; width and height are in inches."""
    from matplotlib.figure import Figure  # Importing it takes a second, for which --help must not wait.

    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def _show_map(figure: Any, axis: Any, kind: str, values: np.ndarray, high: float | None) -> None:
    """Shows one map with a colour bar from 0 to `high` (None: its maximum), in whole numbers for counts."""
    from matplotlib.ticker import MaxNLocator

    colours = {CODES: "magma", TOP1: "cividis"}.get(kind, "viridis")
    shown = axis.imshow(values, cmap=colours, interpolation="nearest", vmin=0, vmax=high)
    axis.set_facecolor("0.85")
    bar = figure.colorbar(shown, ax=axis, fraction=0.046, pad=0.03)
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=kind != TOP1))
    bar.outline.set_visible(False)


def _bare(axes: Iterable[Any]) -> None:
    for axis in axes:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    """Writes a figure as PNG, atomically and without metadata, so that equal plots are equal bytes."""
    with replacing(path) as part:
        figure.savefig(part, format="png", metadata={"Software": None})
