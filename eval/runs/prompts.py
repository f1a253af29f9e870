"""Reads and selects the prompts of a run, and makes requests of them. No torch.

Every prompt has a name. The file, seed and record of its image depend on this name, not on the prompt's place
in the list, so a selection of prompts gives the same images.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adt_tree.errors import UserError
from models.checkpoint.files import reading

if TYPE_CHECKING:
    from adt_tree.pipeline import Pipeline
    from adt_tree.roles import Request

PROMPT_DIR = "data/prompts"
CAPTIONS = ("first", "longest", "all")  # which captions of a COCO image are prompts; the first is the default
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
FACT_COLUMNS = ("category", "challenge")  # columns of PartiPrompts that go into the statistics
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
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
    return frozenset(HELD_OUT_FILE.read_text(encoding="utf-8").splitlines())


def load_prompts(args: Any, default: Path = DEFAULT_FILE) -> list[Prompt]:
    """Returns the prompts of a run: those read, cut by --slice, sampled by --num_images, and cut by
    --start_idx and --end_idx, in this order. Raises UserError if none is left.

    args: the options of cli.options.PromptOptions. default: the file to read if they name none.
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
    if args.prompt_dir != PROMPT_DIR and source not in NAMED:
        raise UserError(
            f"--prompt_dir {args.prompt_dir}: only {', '.join(NAMED)} are read from it; give a file "
            "by --prompt, or leave it out"
        )
    if args.class_labels:
        _refuse_captions(args.captions, "--class_labels")
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
        raise UserError(
            f"--captions {captions}: {source} is not a COCO annotation file; leave the option out"
        )


def read_file(path: Path, captions: str | None = None) -> list[Prompt]:
    """Returns all prompts of a file; its suffix says how to read it.

    .txt: one prompt per line. .tsv, .csv: a column Prompt, Caption or Text, and Name or Id if there is one.
    .json: a list of texts, a list of objects with those keys, or COCO annotations. captions: one of CAPTIONS,
    for COCO annotations alone; None: the first. Raises UserError if the file is damaged or has no prompt.
    """
    suffix = path.suffix.lower()
    with reading(path, "give a .txt, .tsv, .csv or .json file of prompts"):
        content = path.read_text(encoding="utf-8-sig")
        rows = _from_json(content) if suffix == ".json" else _rows(content, suffix)
        coco = isinstance(rows, dict)
        prompts = _from_coco(rows, captions or CAPTIONS[0]) if isinstance(rows, dict) else _from_rows(rows)
    if not coco:
        _refuse_captions(captions, str(path))
    if not prompts:
        raise UserError(f"prompt file {path} holds no prompt")
    return prompts


def _rows(content: str, suffix: str) -> list[dict[str, Any]]:
    """Returns the lines of a .txt, or the rows of a table as dictionaries.

    In a .tsv a quotation mark is a character like any other, because PartiPrompts does not quote.
    """
    if suffix == ".txt":
        lines = [line.strip() for line in content.splitlines()]
        return [{"prompt": line} for line in lines if line and not line.startswith("#")]
    tabs = suffix == ".tsv"
    file = io.StringIO(content)
    rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(file))
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    if not set(TEXT_COLUMNS) & set(header):
        raise ValueError("its first line names no column Prompt, Caption or Text")
    return [dict(zip(header, row, strict=False)) for row in rows[1:] if any(row)]


def _from_json(content: str) -> Any:
    """Returns rows as dictionaries, or COCO annotations unchanged."""
    data = json.loads(content)
    if isinstance(data, dict) and "annotations" in data:
        return data
    if isinstance(data, list) and all(isinstance(item, str) for item in data):
        return [{"prompt": text} for text in data]
    if isinstance(data, list) and all(isinstance(item, dict) for item in data):
        return [{str(key).lower(): value for key, value in item.items()} for item in data]
    raise ValueError("it is neither a list of texts, nor a list of objects, nor COCO annotations")


def _from_rows(rows: Sequence[dict[str, Any]]) -> list[Prompt]:
    """Returns the prompts of rows. Raises ValueError that names the row if a text is missing."""
    prompts = []
    for number, row in enumerate(rows):
        text = _first(row, TEXT_COLUMNS)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"row {number} has no prompt")
        name = _first(row, NAME_COLUMNS)
        label = str("" if name is None else name).strip() or str(number)
        cells = {key: str(row.get(key) or "").strip() for key in FACT_COLUMNS}
        facts = tuple((key, value) for key, value in cells.items() if value)
        integer = int(label) if label.isascii() and label.isdigit() else None
        prompts.append(Prompt(label, text.strip(), integer, facts))
    return prompts


def _first(row: dict[str, Any], columns: Sequence[str]) -> Any:
    return next((row[column] for column in columns if column in row), None)


def _from_coco(data: dict, captions: str) -> list[Prompt]:
    """Returns captions named by their annotation id, in the order of the images. Of equally long captions the
    first is the longest."""
    by_image: dict[int, list[tuple[int, str]]] = {}
    for note in data["annotations"]:
        caption = int(note["id"]), " ".join(str(note["caption"]).split())
        by_image.setdefault(int(note["image_id"]), []).append(caption)
    order = [int(image["id"]) for image in data["images"]] if "images" in data else list(by_image)
    prompts = []
    for image in order:
        notes = by_image.get(image, [])
        if captions == "longest":
            notes = sorted(notes, key=lambda note: -len(note[1]))
        chosen = notes if captions == "all" else notes[:1]
        prompts += [Prompt(str(number), text, number, (("image_id", image),)) for number, text in chosen]
    return prompts


def _check(prompts: Sequence[Prompt], source: str) -> None:
    """Raises UserError if two prompts have one name, or if a text cannot be written as UTF-8."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.name in seen:
            raise UserError(f"prompts of {source[:80]}: two have the name {prompt.name!r}: rename one")
        seen.add(prompt.name)
        try:
            f"{prompt.name}{prompt.text}{prompt.facts}".encode()
        except UnicodeEncodeError:
            raise UserError(
                f"prompts of {source[:80]!a}: prompt {prompt.name!a} is not UTF-8 text (a lone surrogate in "
                f"{prompt.text[:40]!a}); repair it"
            ) from None
