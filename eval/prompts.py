"""Prompts with the names that travel with them, and the seed of each image; nothing is paired by rank."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from eval.errors import UserError

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
FACT_COLUMNS = ("category", "challenge")  # of PartiPrompts: they go into the statistics
CONFIGS = Path(__file__).resolve().parent.parent / "configs"
DEFAULT_FILE = CONFIGS / "emoji_prompts.txt"
HELD_OUT_FILE = CONFIGS / "emoji_held_out.txt"  # bench's 16
UNSEEN_FILE = CONFIGS / "emoji_unseen.txt"  # all pairs kept out of training
MANY_FILE = CONFIGS / "emoji_drafter_prompts.txt"  # what its drafter's data was drawn from


Facts = tuple[tuple[str, str | int], ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to draw. name: its row in the source (from 0) or annotation id; number: the same as integer.

    facts: what else the source says of it, for the statistics: category, challenge, image_id.
    """

    name: str
    text: str
    number: int | None
    facts: Facts = ()


class Selection(Protocol):
    """The options that select prompts; README has their order."""

    prompt: str | None
    class_labels: Sequence[int] | None
    prompt_dir: str
    captions: str | None
    num_images: int
    slice: str | None
    start_idx: int
    end_idx: int | None
    random_seed: int


def image_seed(run_seed: int, name: str) -> int:
    """The seed of one image, 48 bits: the same in any order, batch and subset."""
    digest = hashlib.sha256(f"{run_seed}\n{name}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big")


def held_out_texts() -> frozenset[str]:
    """The embedded model's prompts that name a (name, style) pair its training never saw."""
    return frozenset(UNSEEN_FILE.read_text(encoding="utf-8").splitlines())


def load_prompts(args: Selection, default: Path = DEFAULT_FILE) -> list[Prompt]:
    """The prompts of a run: read, --slice, --num_images, --start_idx/--end_idx. UserError if none is left."""
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
        raise UserError(
            f"no prompt is left of {total}: check --slice, --num_images, --start_idx and --end_idx"
        )
    return prompts


def _read(args: Selection, default: Path) -> list[Prompt]:
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
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"prompt file {path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"prompt file {path}: cannot be read ({error.strerror or error})") from None
    suffix = path.suffix.lower()
    if suffix == ".json":
        prompts = _from_json(content, path, captions)
    else:
        _refuse_captions(captions, str(path))
        prompts = _from_text(content, suffix, path)
    if not prompts:
        raise UserError(f"prompt file {path}: it holds no prompt")
    return prompts


def _from_text(content: str, suffix: str, path: Path) -> list[Prompt]:
    if suffix == ".txt":
        lines = [line.strip() for line in content.splitlines()]
        return _numbered([line for line in lines if line and not line.startswith("#")])
    return _from_table(content, "\t" if suffix == ".tsv" else ",", path)


def _numbered(texts: Sequence[str]) -> list[Prompt]:
    return [Prompt(str(row), text, row) for row, text in enumerate(texts)]


def _from_table(content: str, delimiter: str, path: Path) -> list[Prompt]:
    """Rows of a table with a header; PartiPrompts quotes nothing, so in .tsv a quote is a character."""
    stream = io.StringIO(content)
    tabs = csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
    reader = tabs if delimiter == "\t" else csv.reader(stream)
    try:
        rows = list(reader)
    except csv.Error as error:
        raise UserError(f"prompt file {path}: line {reader.line_num}: {error}") from None
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    column = next((header.index(name) for name in TEXT_COLUMNS if name in header), None)
    if column is None:
        raise UserError(f"prompt file {path}: its first line names no column Prompt, Caption or Text")
    named = next((header.index(name) for name in ("name", "id") if name in header), None)
    facts = [(name, header.index(name)) for name in FACT_COLUMNS if name in header]
    records = [
        (
            row[column] if len(row) > column else "",
            row[named] if named is not None and len(row) > named else None,
            tuple((name, row[at].strip()) for name, at in facts if len(row) > at and row[at].strip()),
        )
        for row in rows[1:]
        if any(row)
    ]
    return _from_records(records, path)


def _from_json(content: str, path: Path, captions: str | None) -> list[Prompt]:
    try:
        data = json.loads(content)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"prompt file {path}: not JSON ({error})") from None
    if isinstance(data, dict) and "annotations" in data:
        return _from_coco(data, path, captions or CAPTIONS[0])
    _refuse_captions(captions, str(path))
    if isinstance(data, list) and all(isinstance(item, str) for item in data):
        return _from_records([(text, None, ()) for text in data], path)
    if isinstance(data, list) and all(isinstance(item, dict) for item in data):
        lowered = [{str(key).lower(): value for key, value in item.items()} for item in data]
        records = [
            (
                _first(item, TEXT_COLUMNS),
                _first(item, ("name", "id")),
                tuple((key, str(item[key])) for key in FACT_COLUMNS if item.get(key)),
            )
            for item in lowered
        ]
        return _from_records(records, path)
    raise UserError(f"prompt file {path}: neither a list of texts, nor of objects, nor COCO annotations")


def _first(item: dict[str, object], keys: Sequence[str]) -> object:
    return next((item[key] for key in keys if key in item), None)


def _from_records(records: Sequence[tuple[object, object, Facts]], path: Path) -> list[Prompt]:
    """(text, name or None, facts) -> prompts; a missing text is an error that names its row."""
    prompts = []
    for row, (text, name, facts) in enumerate(records):
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"prompt file {path}: row {row} has no prompt")
        label = str(row) if name is None or not str(name).strip() else str(name).strip()
        number = int(label) if label.isascii() and label.isdigit() else None
        prompts.append(Prompt(label, text.strip(), number, facts))
    return prompts


def _from_coco(data: dict, path: Path, captions: str) -> list[Prompt]:
    """Captions named by annotation id, images in file order; of equally long ones the first."""
    try:
        found: dict[int, list[tuple[int, str]]] = {}
        for note in data["annotations"]:
            caption = int(note["id"]), " ".join(str(note["caption"]).split())
            found.setdefault(int(note["image_id"]), []).append(caption)
        order = [int(image["id"]) for image in data["images"]] if "images" in data else list(found)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"prompt file {path}: damaged COCO annotations ({type(error).__name__}: {error})"
        ) from None
    pick: dict[str, Callable[[list[tuple[int, str]]], list[tuple[int, str]]]] = {
        "first": lambda own: own[:1],
        "longest": lambda own: [max(own, key=lambda caption: len(caption[1]))],
        "all": lambda own: own,
    }
    return [
        Prompt(str(number), text, number, (("image_id", image),))
        for image in order
        if image in found
        for number, text in pick[captions](found[image])
    ]


def _check(prompts: Sequence[Prompt], source: str) -> None:
    """UserError for a name that stands twice, and for text that cannot be written down."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.name in seen:
            raise UserError(
                f"prompts of {source[:80]}: the name {prompt.name!r} stands twice, and names its image"
            )
        seen.add(prompt.name)
        try:
            f"{prompt.name}{prompt.text}{prompt.facts}".encode()
        except UnicodeEncodeError:
            raise UserError(
                f"prompts of {source[:80]!a}: prompt {prompt.name!a} is not UTF-8 text (a lone surrogate in "
                f"{prompt.text[:40]!a}); mend it"
            ) from None
