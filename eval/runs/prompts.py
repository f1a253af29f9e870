"""Prompts with the names that travel with them, and the seed of each image; nothing is paired by rank."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adt_tree.errors import UserError

CAPTIONS = ("first", "longest", "all")  # of the captions of a COCO image; the default first
DEFAULT_END = 10000  # of --end_idx, as published
NAMED = {  # prompt set -> file names looked for in --prompt_dir, the COCO annotation files first
    "PartiPrompts": ("PartiPrompts.tsv",),
    "SJDPrompts": ("SJDPrompts.tsv",),
    "MSCOCO2017Val": ("captions_val2017.json", "captions_val2017_longest.json"),
    "MSCOCO2017Train": ("captions_train2017.json",),
    "MSCOCO2014Val": ("captions_val2014.json", "captions_val_2014.json"),
}
SUFFIXES = (".txt", ".tsv", ".csv", ".json")
TEXT_COLUMNS = ("prompt", "caption", "text")
NAME_COLUMNS = ("name", "id")
FACT_COLUMNS = ("category", "challenge")  # of PartiPrompts: they go into the statistics
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DEFAULT_FILE = CONFIGS / "emoji_prompts.txt"
BENCH_FILE = CONFIGS / "emoji_bench.txt"  # 16, half of them pairs kept out of training
HELD_OUT_FILE = CONFIGS / "emoji_held_out.txt"  # all pairs kept out of training
MANY_FILE = CONFIGS / "emoji_drafter_prompts.txt"  # what its drafter's data was drawn from


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to draw. name: its row in the source (from 0) or annotation id; number: the same as integer.

    facts: what else the source says of it, for the statistics: category, challenge, image_id.
    """

    name: str
    text: str
    number: int | None
    facts: tuple[tuple[str, str | int], ...] = ()


def image_seed(run_seed: int, name: str) -> int:
    """The seed of one image, 48 bits: the same in any order, batch and subset."""
    digest = hashlib.sha256(f"{run_seed}\n{name}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big")


def held_out_texts() -> frozenset[str]:
    """The embedded model's prompts that name a (name, style) pair its training never saw."""
    return frozenset(HELD_OUT_FILE.read_text(encoding="utf-8").splitlines())


def load_prompts(args: Any, default: Path = DEFAULT_FILE) -> list[Prompt]:
    """The prompts of a run: read, --slice, --num_images, --start_idx/--end_idx. UserError if none is left.

    args: the options of cli.options.PromptOptions. default: the file read where they name none.
    """
    if args.end_idx is not None and args.end_idx <= args.start_idx:
        raise UserError(f"--end_idx {args.end_idx}: it must exceed --start_idx {args.start_idx}")
    if args.class_labels and args.prompt:
        raise UserError("--class_labels with --prompt: choose one")
    prompts = _read(args, default)
    _check(prompts, "--class_labels" if args.class_labels else args.prompt or str(default))
    total = len(prompts)
    if args.slice:
        first, last = map(int, args.slice.split("-"))
        prompts = prompts[first:last]
    if 0 < args.num_images < len(prompts):
        prompts = random.Random(args.random_seed).sample(prompts, args.num_images)
    if args.end_idx is None and len(prompts) > DEFAULT_END:
        raise UserError(f"{len(prompts)} prompts: more than {DEFAULT_END} need an explicit --end_idx")
    prompts = prompts[args.start_idx : args.end_idx]
    if not prompts:
        raise UserError(f"no prompt is left of {total}: check --slice, --num_images, --start_idx, --end_idx")
    return prompts


def _read(args: Any, default: Path) -> list[Prompt]:
    source = args.prompt
    if args.class_labels:
        return [Prompt(str(label), str(label), label) for label in args.class_labels]
    if source is None:
        return read_file(default, args.captions)
    if source in NAMED:
        return read_file(_find(source, Path(args.prompt_dir)), args.captions)
    if source.lower().endswith(SUFFIXES):
        return read_file(Path(source), args.captions)
    _refuse_captions(args.captions, f"--prompt {source[:40]!r}")
    if not source.strip():
        raise UserError("--prompt is empty: give a text, a file or the name of a prompt set")
    if args.num_images < 1:
        raise UserError(f"--num_images {args.num_images}: a text is repeated, so give the number of images")
    return [Prompt(str(row), source, row) for row in range(args.num_images)]


def _find(name: str, folder: Path) -> Path:
    for file_name in NAMED[name]:
        if (folder / file_name).is_file():
            return folder / file_name
    raise UserError(
        f"--prompt {name}: {folder} holds no {' or '.join(NAMED[name])}; `bash scripts/get_data.sh` fetches "
        "it, or give --prompt_dir"
    )


def _refuse_captions(captions: str | None, source: str) -> None:
    if captions is not None:
        raise UserError(f"--captions {captions}: {source} is no COCO annotation file; leave the option out")


def read_file(path: Path, captions: str | None = None) -> list[Prompt]:
    """All prompts of a file, by its suffix.

    .txt: one a line. .tsv, .csv: a column Prompt, Caption or Text, and Name or Id if there is one. .json: a
    list of texts or of objects with those keys, or COCO annotations, of which captions picks (one of
    CAPTIONS, None: first). UserError if the file is damaged, or has nothing to pick from.
    """
    suffix = path.suffix.lower()
    try:
        content = path.read_text(encoding="utf-8-sig")
        rows = _from_json(content) if suffix == ".json" else _rows(content, suffix)
        coco = isinstance(rows, dict)
        prompts = _from_coco(rows, captions or CAPTIONS[0]) if coco else _from_rows(rows)
    except UnicodeDecodeError as error:
        raise UserError(f"prompt file {path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"prompt file {path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise UserError(f"prompt file {path}: {error}") from None
    if not coco:
        _refuse_captions(captions, str(path))
    if not prompts:
        raise UserError(f"prompt file {path}: it holds no prompt")
    return prompts


def _rows(content: str, suffix: str) -> list[dict[str, Any]]:
    """The lines of a .txt, or a table's rows by column; PartiPrompts quotes nothing, so in .tsv a quote is a
    character."""
    if suffix == ".txt":
        lines = [line.strip() for line in content.splitlines()]
        return [{"prompt": line} for line in lines if line and not line.startswith("#")]
    tabs = suffix == ".tsv"
    quoting = csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL
    reader = csv.reader(io.StringIO(content), delimiter="\t" if tabs else ",", quoting=quoting)
    try:
        rows = list(reader)
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from None
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    if not set(TEXT_COLUMNS) & set(header):
        raise ValueError("its first line names no column Prompt, Caption or Text")
    return [dict(zip(header, row, strict=False)) for row in rows[1:] if any(row)]


def _from_json(content: str) -> Any:
    """Rows by column, or COCO annotations as they are."""
    try:
        data = json.loads(content)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if isinstance(data, dict) and "annotations" in data:
        return data
    if isinstance(data, list) and all(isinstance(item, str) for item in data):
        return [{"prompt": text} for text in data]
    if isinstance(data, list) and all(isinstance(item, dict) for item in data):
        return [{str(key).lower(): value for key, value in item.items()} for item in data]
    raise ValueError("neither a list of texts, nor of objects, nor COCO annotations")


def _from_rows(rows: Sequence[dict[str, Any]]) -> list[Prompt]:
    """Rows by column -> prompts; a missing text is an error that names its row."""
    prompts = []
    for number, row in enumerate(rows):
        text = _first(row, TEXT_COLUMNS)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"row {number} has no prompt")
        name = _first(row, NAME_COLUMNS)
        label = str("" if name is None else name).strip() or str(number)
        told = {key: str(row.get(key) or "").strip() for key in FACT_COLUMNS}
        facts = tuple((key, value) for key, value in told.items() if value)
        integer = int(label) if label.isascii() and label.isdigit() else None
        prompts.append(Prompt(label, text.strip(), integer, facts))
    return prompts


def _first(row: dict[str, Any], columns: Sequence[str]) -> Any:
    return next((row[column] for column in columns if column in row), None)


def _from_coco(data: dict, captions: str) -> list[Prompt]:
    """Captions named by annotation id, images in file order; of equally long ones the first."""
    try:
        found: dict[int, list[tuple[int, str]]] = {}
        for note in data["annotations"]:
            caption = int(note["id"]), " ".join(str(note["caption"]).split())
            found.setdefault(int(note["image_id"]), []).append(caption)
        order = [int(image["id"]) for image in data["images"]] if "images" in data else list(found)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"damaged COCO annotations ({type(error).__name__}: {error})") from None
    prompts = []
    for image in order:
        own = found.get(image, [])
        if captions == "longest":
            own = sorted(own, key=lambda caption: -len(caption[1]))
        kept = own if captions == "all" else own[:1]
        prompts += [Prompt(str(number), text, number, (("image_id", image),)) for number, text in kept]
    return prompts


def _check(prompts: Sequence[Prompt], source: str) -> None:
    """UserError for a name that stands twice, and for text that cannot be written down."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.name in seen:
            raise UserError(f"prompts of {source[:80]}: the name {prompt.name!r} stands twice: rename one")
        seen.add(prompt.name)
        try:
            f"{prompt.name}{prompt.text}{prompt.facts}".encode()
        except UnicodeEncodeError:
            raise UserError(
                f"prompts of {source[:80]!a}: prompt {prompt.name!a} is not UTF-8 text (a lone surrogate in "
                f"{prompt.text[:40]!a}); mend it"
            ) from None
