"""Pictures of a run: the contact sheet, and images beside maps of where trees were deep and accepted."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from eval.outputs import png_bytes, write_atomic

MOST_ON_SHEET = 64
TILE = 160  # pixels at least along a tile's side
MARGIN, CAPTION = 10, 34  # pixels
MAPS = ("codes a call", "depth", "width")  # of the cycles, by cell
TITLES = {
    "codes a call": "codes a target call",
    "depth": "depth of the draft tree",
    "width": "width of the draft tree",
    "top1": "probability of the likeliest code",
}
PAPER, INK, UNSEEN = (255, 255, 255), (40, 40, 40), (0, 90, 200)


def contact_sheet(images: Sequence[tuple[Path, str]], held_out: Collection[str], path: Path) -> None:
    """Up to 64 pictures in a near-square grid, each above its prompt (two lines at most).

    Prompts among held_out, (name, style) pairs that training never saw, are set in colour and framed.
    """
    images = images[:MOST_ON_SHEET]
    columns = min(len(images), max(4, round(len(images) ** 0.5)))
    rows = -(-len(images) // columns)
    pictures = [Image.open(file).convert("RGB") for file, _ in images]
    side = max(TILE, max(picture.width for picture in pictures))
    sheet = Image.new(
        "RGB", (columns * (side + MARGIN) + MARGIN, rows * (side + CAPTION + MARGIN) + MARGIN), PAPER
    )
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for number, (picture, (_, text)) in enumerate(zip(pictures, images, strict=True)):
        left = MARGIN + number % columns * (side + MARGIN)
        top = MARGIN + number // columns * (side + CAPTION + MARGIN)
        if picture.width < side:
            picture = picture.resize((side, side * picture.height // picture.width), Image.Resampling.LANCZOS)
        sheet.paste(picture, (left, top))
        ink = UNSEEN if text in held_out else INK
        if text in held_out:
            draw.rectangle((left - 2, top - 2, left + side + 1, top + side + 1), outline=UNSEEN, width=2)
        draw.multiline_text((left, top + side + 2), _wrap(text, font, side), fill=ink, font=font, spacing=2)
    write_atomic(path, png_bytes(sheet))


def _wrap(text: str, font: Any, width: int) -> str:
    """At most two lines of a text, no wider than the tile."""
    lines, line = [], ""
    for word in text[:200].split():
        longer = f"{line} {word}".strip()
        if line and font.getlength(longer) > width:
            lines.append(line)
            longer = word
        line = longer
    lines = [*lines, line]
    if len(lines) > 2:
        lines = [lines[0], lines[1] + " …"]
    for row, entry in enumerate(lines):
        while font.getlength(entry) > width and len(entry) > 1:
            entry = entry.rstrip("…")[:-1] + "…"
        lines[row] = entry
    return "\n".join(lines)


def maps(steps: Sequence[dict[str, Any]], height: int, width: int) -> dict[str, list[list[float]]]:
    """Codes committed by the target call that made each cell, and the depth and width of its tree.

    NaN where no call did: the first cell comes from the prompt's pass.
    """
    found = {kind: [[float("nan")] * width for _ in range(height)] for kind in MAPS}
    for step in steps:
        values = step["accepted"] + 1, step["depth"], step["width"]
        for position in range(step["position"], step["position"] + step["accepted"] + 1):
            row, column = divmod(position, width)
            for kind, value in zip(MAPS, values, strict=True):
                found[kind][row][column] = value
    return found


def heatmap(
    picture: Path, text: str, steps: Sequence[dict[str, Any]], grid: tuple[int, int], path: Path
) -> None:
    """The image and its maps, side by side: codes a target call, depth and width of the trees."""
    from matplotlib.backends.backend_agg import (
        FigureCanvasAgg,
    )  # a second of import that --help need not wait for
    from matplotlib.figure import Figure

    found = maps(steps, *grid)
    figure = Figure(figsize=(3.6 * (1 + len(found)), 3.9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 1 + len(found), width_ratios=(1, *(1.13 for _ in found)))
    axes[0].imshow(Image.open(picture), interpolation="lanczos")
    axes[0].set_title(_shorten(text, 46), fontsize=10)
    mean = sum(step["accepted"] + 1 for step in steps) / max(len(steps), 1)
    for axis, (kind, values) in zip(axes[1:], found.items(), strict=True):
        _show_map(figure, axis, kind, values, 0, None)
        axis.set_title(f"{TITLES[kind]}, mean {mean:.2f}" if kind == MAPS[0] else TITLES[kind], fontsize=10)
    _bare(axes)
    _save(figure, path)


def acceptance(
    rows: Sequence[tuple[str, Mapping[str, Sequence[Sequence[float | None]]]]], path: Path
) -> None:
    """A row a run, a panel a map, each map on one scale in all rows. rows: label, then map by kind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = [kind for kind in TITLES if any(kind in found for _, found in rows)]
    figure = Figure(figsize=(3.3 * len(kinds), 0.3 + 2.9 * len(rows)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), len(kinds), squeeze=False)
    for column, kind in enumerate(kinds):
        of_kind = [found[kind] for _, found in rows if kind in found]
        every = [value for cells in of_kind for row in cells for value in row if value is not None]
        for axis, (label, found) in zip(axes[:, column], rows, strict=True):
            if kind not in found:
                axis.set_axis_off()
                continue
            values = [[float("nan") if v is None else v for v in row] for row in found[kind]]
            _show_map(figure, axis, kind, values, 0, max(every))
            axis.set_ylabel(label if column == 0 else "", fontsize=9)
        axes[0, column].set_title(TITLES[kind], fontsize=10)
    _bare(axes.flat)
    _save(figure, path)


def _show_map(
    figure: Any, axis: Any, kind: str, values: Sequence[Sequence[float]], low: float, high: float | None
) -> None:
    """One map with its scale; whole numbers on scales of counts."""
    from matplotlib.ticker import MaxNLocator

    colours = "magma" if kind == MAPS[0] else "viridis" if kind in MAPS else "cividis"
    shown = axis.imshow(values, cmap=colours, interpolation="nearest", vmin=low, vmax=high)
    axis.set_facecolor("0.85")
    bar = figure.colorbar(shown, ax=axis, fraction=0.046, pad=0.03)
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=kind in MAPS))
    bar.outline.set_visible(False)


def _bare(axes: Iterable[Any]) -> None:
    """Neither ticks nor frames."""
    for axis in axes:
        axis.set_xticks([])
        axis.set_yticks([])
        for spine in axis.spines.values():
            spine.set_visible(False)


def _save(figure: Any, path: Path) -> None:
    """A figure of matplotlib as PNG without metadata."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    write_atomic(path, stream.getvalue())


def reliability(
    arms: Mapping[str, Mapping[str, Mapping[int, Sequence[tuple[int, float, float]]]]], path: Path
) -> None:
    """A row an arm, a panel a source of drafts: observed against predicted rate of acceptance.

    arms: arm -> source -> rank -> points (nodes reached, mean predicted rate, observed rate). A point's area
    follows its nodes, its colour the rank; on the diagonal drafts are accepted as often as predicted.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    every = dict.fromkeys(source for found in arms.values() for source in found)
    sources = [source for source in every if any(found[source] for found in arms.values())]
    figure = Figure(figsize=(0.9 + 2.8 * len(sources), 0.3 + 2.8 * len(arms)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(arms), len(sources), squeeze=False)
    ranks = sorted({rank for found in arms.values() for curve in found.values() for rank in curve})
    colours = {rank: colormaps["viridis"](number / len(ranks)) for number, rank in enumerate(ranks)}
    for row, (name, found) in zip(axes, arms.items(), strict=True):
        for axis, source in zip(row, sources, strict=True):
            curve = [(rank, *point) for rank, points in found[source].items() for point in points]
            if not curve:
                axis.set_axis_off()
                continue
            axis.plot((0, 1), (0, 1), color="0.6", linewidth=1, zorder=0)
            rank, count, said, seen = zip(*curve, strict=True)
            areas = [8 + 120 * n / max(count) for n in count]
            axis.scatter(said, seen, areas, [colours[r] for r in rank], alpha=0.75, linewidths=0)
            axis.set(xticks=(0, 0.5, 1), yticks=(0, 0.5, 1), xlabel=f"predicted, {name}", ylabel="observed")
    for axis, source in zip(axes[0], sources, strict=True):
        axis.set_title(source, fontsize=10)
    dots = [axes[0, 0].scatter([], [], color=of, label=f"rank {rank}") for rank, of in colours.items()]
    figure.legend(handles=dots, loc="outside right upper", fontsize=8, frameon=False)
    _save(figure, path)


def budget(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """tau, and the speed-up over plain decoding with its 95 % interval, by drafted nodes; a line a drafter.

    rows: as `main.py budget` stores them, plain decoding left out: it is the line at 1.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, ScalarFormatter

    figure = Figure(figsize=(9, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    for drafter in dict.fromkeys(row["drafter"] for row in rows):
        own = sorted(
            (row for row in rows if row["drafter"] == drafter), key=lambda row: row["shape"]["budget"]
        )
        nodes = [row["shape"]["budget"] for row in own]
        axes[0].plot(nodes, [row["tau"] for row in own], marker="o", label=drafter)
        below = [row["SR"] - row["SR_95"][0] for row in own]
        above = [row["SR_95"][1] - row["SR"] for row in own]
        axes[1].errorbar(
            nodes, [row["SR"] for row in own], (below, above), marker="o", capsize=3, label=drafter
        )
    titles = ("tau, codes a target call", "SR, speed-up in wall clock")
    for axis, title in zip(axes, titles, strict=True):
        axis.axhline(1, color="0.6", linewidth=1, label="plain decoding")
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({row["shape"]["budget"] for row in rows}))
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("drafted nodes a tree")
        axis.set_title(title, fontsize=10)
    axes[0].legend(fontsize=8, frameon=False)
    _save(figure, path)


def throughput(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Images a minute by images in flight, a line a method; beside them the nodes of its trees.

    rows: as `main.py throughput` stores them.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, ScalarFormatter

    figure = Figure(figsize=(9, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["batch_size"])
        counts = [row["batch_size"] for row in own]
        axes[0].plot(counts, [row["images_per_min"] for row in own], marker="o", label=arm)
        axes[1].plot(counts, [row["nodes"] for row in own], marker="o", label=arm)
    titles = ("images a minute", "drafted nodes a tree; 0: plain decoding")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({row["batch_size"] for row in rows}))
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("images in flight")
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=8, frameon=False)
    _save(figure, path)


def speed(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """tau, and the speed-up over plain decoding with its 95 % interval, of every arm; a colour a temperature.

    rows: as `main.py bench` and its like store them.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    arms = list(dict.fromkeys(row["arm"] for row in rows))
    laws = list(dict.fromkeys(row["temperature"] for row in rows))
    figure = Figure(figsize=(10, 1.3 + 0.34 * len(arms)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    thick = 0.8 / len(laws)
    for number, law in enumerate(laws):
        own = [row for row in rows if row["temperature"] == law]
        places = [arms.index(row["arm"]) + (number - (len(laws) - 1) / 2) * thick for row in own]
        axes[0].barh(places, [row["tau"] for row in own], thick, label=f"T = {law:g}")
        sides = [[row["SR"] - row["SR_95"][0] for row in own], [row["SR_95"][1] - row["SR"] for row in own]]
        sides = [[max(side, 0) for side in of_all] for of_all in sides]
        axes[1].barh(places, [row["SR"] for row in own], thick, xerr=sides, ecolor="0.3", capsize=2)
    for axis, title in zip(axes, ("tau, codes a target call", "SR, speed-up in wall clock"), strict=True):
        axis.axvline(1, color="0.6", linewidth=1)
        axis.set_title(title, fontsize=10)
        axis.set_yticks(range(len(arms)), arms, fontsize=8)
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=8, frameon=False)
    _save(figure, path)


def _shorten(text: str, most: int) -> str:
    plain = text.replace("$", r"\$")
    return plain if len(plain) <= most else plain[: most - 1] + "…"
