"""Reads and selects the prompts of a run, and makes requests of them. No torch.

Every prompt has a name. The file, seed and record of its image depend on this name, not on the prompt's place
in the list, so a selection of prompts gives the same images.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adt_tree.errors import UserError
from models.checkpoint.files import expanded, lines_of, read_text, reading
from storage.prompt_settings import CAPTIONS, DEFAULT_END, PROMPT_DIR, PromptSettings

if TYPE_CHECKING:
    from adt_tree.pipeline import Pipeline
    from adt_tree.roles import Request

NAMED = {  # prompt set -> file names looked for in prompt_dir, the COCO annotation files first
    "PartiPrompts": ("PartiPrompts.tsv",),
    "SJDPrompts": ("SJDPrompts.tsv",),
    "MSCOCO2017Val": ("captions_val2017.json", "captions_val2017_longest.json"),
    "MSCOCO2017Train": ("captions_train2017.json",),
    "MSCOCO2014Val": ("captions_val2014.json", "captions_val_2014.json"),
}
SUFFIXES = (".txt", ".tsv", ".csv", ".json", ".jsonl")
# Names of files, such as prompts/a.text and a.yaml. "a cat/dog. Wow" is none: its last part has a space.
FILE = r"[/\\][^/\\\s]+\.[A-Za-z]\w{0,5}$|^\S+\.(parquet|arrow|xlsx|ya?ml|md|gz|zip|ndjson|pkl)$"
STDIN = "/dev/stdin"
TEXT_COLUMNS = ("prompt", "caption", "text")
NAME_COLUMNS = ("name", "id")
FACT_COLUMNS = ("category", "challenge")  # columns of PartiPrompts that go into the statistics
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
DEFAULT_FILE = CONFIGS / "emoji_prompts.txt"
BENCH_FILE = CONFIGS / "emoji_bench.txt"  # 16 prompts; training has seen half of them
HELD_OUT_FILE = CONFIGS / "emoji_held_out.txt"  # the prompts that training has not seen
DRAFTER_FILE = CONFIGS / "emoji_drafter_prompts.txt"  # the prompts of the drafter's training data


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to make an image of."""

    name: str  # its name or id in the source, else its row, from 0
    text: str
    number: int | None  # the name as an integer, if it is one
    # category, challenge or image_id, as far as the source has them
    facts: tuple[tuple[str, str | int], ...] = ()


def image_seed(run_seed: int, name: str) -> int:
    """Returns an image's seed, of 48 bits, which does not depend on the other prompts of the run."""
    digest = hashlib.sha256(f"{run_seed}\n{name}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big")


def make_requests(pipe: Pipeline, prompts: Sequence[Prompt], run_seed: int) -> list[Request]:
    """Returns the requests of a run. The seed of an image is a hash of the run's seed and the prompt's name.

    Raises UserError for a prompt that does not fit the model.
    """
    names = [prompt.name for prompt in prompts]
    seeds = [image_seed(run_seed, name) for name in names]
    return pipe.requests([prompt.text for prompt in prompts], seeds, names)


def held_out_texts() -> frozenset[str]:
    """Returns the prompts whose pair of name and style the embedded model has not seen in training."""
    return frozenset(lines_of(read_text(HELD_OUT_FILE)))


def load_prompts(args: PromptSettings, default: Path = DEFAULT_FILE) -> list[Prompt]:
    """Returns the prompts of a run: those read, cut by slice, sampled by num_images, cut by start_idx
    and end_idx, and repeated by images_per_prompt, in this order. Raises UserError if none is left.

    default: the file to read if the settings name none.
    """
    if args.end_idx is not None and args.end_idx <= args.start_idx:
        raise UserError(f"end_idx {args.end_idx}: it must exceed start_idx {args.start_idx}")
    if args.class_labels and args.prompt:
        raise UserError("class_labels with prompt: choose one")
    prompts = _read(args, default)
    source = "class_labels" if args.class_labels else args.prompt or str(default)
    if args.captions and "image_id" not in dict(prompts[0].facts):
        raise UserError(f"captions {args.captions}: {source[:80]} is no COCO annotation file; leave it out")
    _check(repeated(prompts, args.images_per_prompt), source)
    total = len(prompts)
    if args.slice:
        first, last = map(int, args.slice.split("-"))
        prompts = prompts[first:last]
    if 0 < args.num_images < len(prompts):
        prompts = random.Random(args.random_seed).sample(prompts, args.num_images)
    if args.end_idx is None and len(prompts) > DEFAULT_END:
        raise UserError(f"{len(prompts)} prompts: more than {DEFAULT_END} need an explicit end_idx")
    prompts = prompts[args.start_idx : args.end_idx]
    if not prompts:
        raise UserError(f"no prompt is left of {total}: check start_idx, end_idx, num_images and the slice")
    return repeated(prompts, args.images_per_prompt)


def repeated(prompts: Sequence[Prompt], seeds: int) -> list[Prompt]:
    """Returns every prompt `seeds` times, each time under another name, because the name decides an image's
    seed. All prompts come once before the first comes again, so that neighbours in a batch differ."""
    return [replace(p, name=repeated_name(p.name, number)) for number in range(seeds) for p in prompts]


def repeated_name(name: str, number: int) -> str:
    """Returns the name under which a prompt comes again: its own for number 0."""
    return f"{name}.{number}" if number else name


def _read(args: PromptSettings, default: Path) -> list[Prompt]:
    source = args.prompt
    if args.prompt_dir != PROMPT_DIR and source not in NAMED:
        raise UserError(
            f"prompt_dir {args.prompt_dir}: only {', '.join(NAMED)} are read from it; give a file as "
            "prompt, or leave it out"
        )
    if args.class_labels:
        return [Prompt(str(label), str(label), label) for label in args.class_labels]
    if source is None:
        return read_file(default, args.captions)
    if is_stream(source):
        return read_file(Path(STDIN if source == "-" else source))
    if source in NAMED:
        return read_file(_find(source, Path(args.prompt_dir)), args.captions)
    if os.path.isdir(expanded(source)):
        return read_folder(Path(expanded(source)))
    if source.lower().endswith(SUFFIXES):
        return read_file(Path(expanded(source)), args.captions)
    _refuse_names(source)
    if args.num_images < 1:
        raise UserError(f"num_images {args.num_images}: a text is repeated, so give the number of images")
    return [Prompt(str(row), source, row) for row in range(args.num_images)]


def is_stream(source: str) -> bool:
    """Returns whether a text names the standard input, a pipe or a device."""
    plain = os.path.isfile(source) or os.path.isdir(source)
    return source in ("-", STDIN) or (os.path.exists(source) and not plain)


def _find(name: str, folder: Path) -> Path:
    for file_name in NAMED[name]:
        if (folder / file_name).is_file():
            return folder / file_name
    raise UserError(
        f"prompt {name}: {folder} holds no {' or '.join(NAMED[name])}; `bash scripts/get_data.sh` fetches "
        "it, or give prompt_dir"
    )


def _refuse_names(text: str) -> None:
    """Raises UserError for a text that is empty, or that looks like the name of a file or a prompt set."""
    if not text.strip():
        raise UserError("prompt is empty: give a text, a file or the name of a prompt set")
    if os.path.isfile(expanded(text)) or re.search(FILE, text, re.IGNORECASE):
        raise UserError(f"prompt {text[:80]}: prompt files end in {', '.join(SUFFIXES)}; give one, or a text")
    names = {name.lower(): name for name in NAMED}
    if near := get_close_matches(text.lower(), names, n=1, cutoff=0.8):
        raise UserError(f"prompt {text}: did you mean {names[near[0]]}? If it is a text, add a word")


def read_file(path: Path, captions: str | None = None) -> list[Prompt]:
    """Returns all prompts of a file; its suffix says how to read it.

    .txt, and a pipe: one prompt per line. .tsv, .csv: a column Prompt, Caption or Text, and Name or Id if
    there is one. .json: a list of texts, a list of objects with those keys, or COCO annotations. .jsonl: such
    a text or object per line. captions: one of CAPTIONS, for COCO annotations alone; None: the first. Raises
    UserError if the file is damaged or has no prompt.
    """
    with reading(path, f"give a prompt file in UTF-8 ({', '.join(SUFFIXES)})"):
        rows = _rows(read_text(path), path.suffix.lower() if path.is_file() else ".txt")
        prompts = _from_coco(rows, captions or CAPTIONS[0]) if isinstance(rows, dict) else _from_rows(rows)
    if not prompts:
        raise UserError(f"prompt file {path} holds no prompt")
    return prompts


def read_folder(path: Path) -> list[Prompt]:
    """Returns the prompts of a folder of .txt files, as in DPG-Bench: one in each, of the file's name.

    They are in the order of their names. Raises UserError for a damaged file, and if there is none.
    """
    prompts = []
    for file in sorted(path.glob("*.txt")):
        with reading(file, "give one prompt in UTF-8"):
            prompts.append(Prompt(file.stem, _text(read_text(file), "it"), _number(file.stem)))
    if not prompts:
        raise UserError(f"prompt {path}: this folder holds no .txt file; if it is a text, add a word")
    return prompts


def _rows(content: str, suffix: str) -> Any:
    """Returns the rows of a file as dictionaries, or COCO annotations unchanged."""
    if suffix in (".tsv", ".csv"):
        return _table(content, "\t" if suffix == ".tsv" else ",")
    lines = [line for line in lines_of(content) if line.strip()]
    if suffix == ".txt":
        return [{"prompt": line} for line in lines]
    if suffix not in SUFFIXES:
        raise ValueError("is no file of prompts")
    # As one document, so that an error names the line.
    data = json.loads(content if suffix == ".json" else "[" + ",\n".join(lines) + "]")
    if isinstance(data, dict) and "annotations" in data:
        return data
    if isinstance(data, list) and all(isinstance(item, str) for item in data):
        return [{"prompt": text} for text in data]
    if isinstance(data, list) and all(isinstance(item, dict) for item in data):
        return [{key.strip().lower(): value for key, value in item.items()} for item in data]
    raise ValueError("it is neither a list of texts, nor a list of objects, nor COCO annotations")


def _table(content: str, delimiter: str, quotes: bool = True) -> list[dict[str, str]]:
    """Returns the rows of a table by column. If the quotation marks of a .tsv are not those that programs
    write, as in PartiPrompts, all of them are characters like any other.

    Rows end at line feeds if there are any. Then a carriage return alone belongs to its cell, also outside
    quotation marks, where pandas leaves it; the csv module would end the row there.
    """
    inner = next(mark for mark in map(chr, range(0xE000, 0xF900)) if mark not in content)
    lines = io.StringIO(re.sub("\r(?!\n)", inner, content) if "\n" in content else content, newline="")
    table = csv.DictReader(
        lines,
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE,
        strict=True,
        restval="",
    )
    try:
        rows = []
        for row in table:
            if None in row:
                raise csv.Error(f"{len(row) - 1 + len(row[None])} cells, the first line has {len(row) - 1}")
            rows.append({key.strip().lower(): cell.replace(inner, "\r") for key, cell in row.items()})
    except csv.Error as error:
        if delimiter == "\t" and quotes:
            return _table(content, delimiter, quotes=False)
        hint = f"are its quotation marks closed, and its cells with {delimiter!r} quoted?"
        raise ValueError(f"near line {table.line_num}: {error} ({hint})") from None
    if rows and not set(TEXT_COLUMNS) & set(rows[0]):
        columns = f"no column Prompt, Caption or Text; columns are separated by {delimiter!r}"
        raise ValueError(f"its first line names {columns}")
    return rows


def _from_rows(rows: Sequence[dict[str, Any]]) -> list[Prompt]:
    """Returns the prompts of rows. Raises ValueError that names the row if a text is missing."""
    prompts = []
    for number, row in enumerate(rows):
        text = _text(_first(row, TEXT_COLUMNS), f"row {number}")
        name = _first(row, NAME_COLUMNS)
        label = _label(name) if name is not None and str(name).strip() else str(number)
        cells = {key: str(row.get(key) or "").strip() for key in FACT_COLUMNS}
        facts = tuple((key, value) for key, value in cells.items() if value)
        prompts.append(Prompt(label, text, _number(label), facts))
    return prompts


def _text(value: Any, where: str) -> str:
    """Returns a prompt without the space around it. ValueError if it is no text or blank."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where} has no prompt")
    return value.strip()


def _label(value: Any) -> str:
    """Returns a name or id as text. ValueError if it is neither a text nor a number."""
    if not isinstance(value, str | int | float) or not str(value).strip():
        raise ValueError(f"the name or id {value!r} is neither a text nor a number")
    return str(value).strip()


def _number(label: str) -> int | None:
    return int(label) if label.isascii() and label.isdigit() else None


def _first(row: dict[str, Any], columns: Sequence[str]) -> Any:
    return next((row[column] for column in columns if column in row), None)


def _from_coco(data: dict, captions: str) -> list[Prompt]:
    """Returns captions named by their annotation id, in the order of the images. Of equally long captions the
    first is the longest."""
    by_image: dict[str, list[tuple[str, str]]] = {}
    for note in data["annotations"]:
        caption = _label(note["id"]), " ".join(str(note["caption"] or "").split())
        by_image.setdefault(_label(note["image_id"]), []).append(caption)
    order = [_label(image["id"]) for image in data["images"]] if "images" in data else list(by_image)
    prompts = []
    for image in order:
        notes = by_image.get(image, [])
        if captions == "longest":
            notes = sorted(notes, key=lambda note: -len(note[1]))
        chosen = notes if captions == "all" else notes[:1]
        number = _number(image)
        facts = (("image_id", image if number is None else number),)
        prompts += [
            Prompt(name, _text(text, f"annotation {name}"), _number(name), facts) for name, text in chosen
        ]
    return prompts


def _check(prompts: Sequence[Prompt], source: str) -> None:
    """Raises UserError if two prompts have one name."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.name in seen:
            raise UserError(f"prompts of {source[:80]}: two have the name {prompt.name!r}: rename one")
        seen.add(prompt.name)
