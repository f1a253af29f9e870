"""Prompts: sources, selection, names and seeds, and files and selections that are refused."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adt_tree.errors import UserError
from storage.prompt_settings import PromptSettings
from storage.prompts import image_seed, load_prompts
from tests.conftest import Refused, Run
from tests.support.checkpoints import Checkpoints
from tests.support.runs import statistics

COCO = {
    "images": [{"id": 9}, {"id": 4}, {"id": 7}],
    "annotations": [
        {"id": 100, "image_id": 4, "caption": "A  cat.\n"},
        {"id": 50, "image_id": 9, "caption": "A dog."},
        {"id": 51, "image_id": 9, "caption": "Another dog."},
    ],
}
DEFAULTS = PromptSettings()


def select(source: object, count: int = -1, **options: Any) -> list[tuple[Any, ...]]:
    """Returns name, text and facts of the prompts that a command line selects. options: options by name."""
    selection = replace(DEFAULTS, prompt=source and str(source), num_images=count, **options)
    return [(prompt.name, prompt.text, *prompt.facts) for prompt in load_prompts(selection)]


def test_literal_text_is_repeated_and_a_class_names_its_image() -> None:
    for text in ("a cat/dog. Wow", "50/50 grey, f/1.8", "node.js", "party"):
        assert select(text, 1) == [("0", text)]
    assert select("a cat", 3) == [("0", "a cat"), ("1", "a cat"), ("2", "a cat")]
    assert select(None, class_labels=(207, 360)) == [("207", "207"), ("360", "360")]


def test_pipes_are_read_and_names_of_other_files_are_no_texts(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"a\n\n b \n")
    os.close(writer)
    assert select(f"/dev/fd/{reader}") == [("0", "a"), ("1", "b")]
    os.close(reader)
    with pytest.raises(UserError, match="/dev/null holds no prompt"):
        select("/dev/null")
    for name in ("data.parquet", "prompts.yaml", "a/b.text", "P.XLSX", str(tmp_path / "p.txt")):
        with pytest.raises(UserError, match=name):
            select(name, 1)


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("p.txt", "#red\n\n  green \rblau\u2028ü\r\n", [("0", "#red"), ("1", "green"), ("2", "blau\u2028ü")]),
        ("p.tsv", 'prompt\tX\n"a sign: ""open"""\ty\nb\tz\n', [("0", 'a sign: "open"'), ("1", "b")]),
        ("p.jsonl", '{"prompt": "a", "tag": "x"}\n\n{"Prompt": "b", "id": 7}\n', [("0", "a"), ("7", "b")]),
        ("p.json", '{"annotations": [{"id": "x1", "image_id": "i1", "caption": "a"}, '
         '{"id": 2, "image_id": 3, "caption": "b"}]}',
         [("x1", "a", ("image_id", "i1")), ("2", "b", ("image_id", 3))]),
        ("p.tsv", 'Prompt\tX\na "red" cat\ty\n"half\tz\n', [("0", 'a "red" cat'), ("1", '"half')]),
        ("p.csv", 'id,caption\nx7,"a, b"\n12,c\n', [("x7", "a, b"), ("12", "c")]),
        ("p.json", '["a", "b"]', [("0", "a"), ("1", "b")]),
        ("p.json", '[{"Prompt": "a", "name": "n"}, {"prompt": "b", "Category": "X", "Challenge": null}]',
         [("n", "a"), ("1", "b", ("category", "X"))]),
        ("p.tsv", "Prompt\tCategory\tChallenge\tNote\na\tX\tY\tZ\nb\tX\t\n",
         [("0", "a", ("category", "X"), ("challenge", "Y")), ("1", "b", ("category", "X"))]),
    ],
)  # fmt: skip
def test_files(tmp_path: Path, name: str, content: str, prompts: list[tuple[Any, ...]]) -> None:
    file = tmp_path / name
    file.write_text(content, encoding="utf-8")
    assert select(file) == prompts
    assert select(file, start_idx=1, end_idx=2) == prompts[1:2]
    assert select(file, slice="1-3") == prompts[1:]


def test_sample_keeps_row_names_and_is_repeatable(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("\n".join(f"prompt {i}" for i in range(50)))
    first = select(file, 5)
    assert len(first) == 5 and first == select(file, 5)
    assert all(text == f"prompt {name}" for name, text in first)


def test_named_sets_lie_in_their_folder(tmp_path: Path) -> None:
    """--captions chooses among the captions of an image."""
    (tmp_path / "PartiPrompts.tsv").write_text("Prompt\tCategory\na cat\tAnimals\n")
    file = tmp_path / "captions_val2017.json"
    file.write_text(json.dumps(COCO))
    assert select("PartiPrompts", prompt_dir=str(tmp_path)) == [("0", "a cat", ("category", "Animals"))]
    coco = partial(select, "MSCOCO2017Val", prompt_dir=str(tmp_path))
    nine, four = ("image_id", 9), ("image_id", 4)
    every = [("50", "A dog.", nine), ("51", "Another dog.", nine), ("100", "A cat.", four)]
    assert coco(captions="first") == coco() == select(file) == [every[0], every[2]]
    assert coco(captions="longest") == every[1:] and coco(captions="all") == every


def test_a_folder_of_texts_is_a_prompt_each(tmp_path: Path) -> None:
    for name, content in {"b1.txt": "a red\ncar\n", "7.txt": " a cat ", "notes.md": "none"}.items():
        (tmp_path / name).write_text(content)
    assert select(tmp_path) == [("7", "a cat"), ("b1", "a red\ncar")]


def test_seeds_repeat_the_selected_prompts_under_other_names(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text('["a", "b", "c"]')
    assert select(file, slice="1-3", images_per_prompt=3) == [
        ("1", "b"), ("2", "c"), ("1.1", "b"), ("2.1", "c"), ("1.2", "b"), ("2.2", "c"),
    ]  # fmt: skip
    file.write_text('[{"name": "x", "prompt": "a"}, {"name": "x.1", "prompt": "b"}]')
    assert len(select(file)) == 2
    with pytest.raises(UserError, match=r"p\.json.*'x\.1'"):
        select(file, images_per_prompt=2)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.txt", b"", "holds no prompt"),
        ("p.txt", b"\xff\xfe\x00", "not UTF-8.*position 0"),
        ("p.csv", b"id,prompt\n1,a red heart, on a table\n", "line 2.*3 cells"),
        ("p.csv", b'prompt\na\n"b\nc\nd\n', "line 2.*quotation"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "line 2"),
        ("p.jsonl", b'{"text": 5}\n', "row 0"),
        ("p.json", b'{"annotations": [{"id": 1, "image_id": 2, "caption": null}]}', "annotation 1"),
        ("p.json", b'[{"name": ["a"], "prompt": "b"}]', "id .'a'."),
        ("p.tsv", b"Text1\tB\nx\ty\n", "Prompt, Caption or Text"),
        ("p.csv", b"name,prompt\na,x\na,y\n", "'a'"),
        ("p.json", b"[1, 2]", "COCO"),
        ("p.json", b"[" * 100_000, "JSON"),
    ],
)
def test_an_error_names_the_file_and_what_is_wrong_in_it(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file}.*{says}"):
        select(file)


@pytest.mark.parametrize(
    ("selection", "says"),
    [
        ({"source": "none.txt"}, r"none\.txt"),
        ({"source": "MSCOCO2014Val"}, r"get_data\.sh.*prompt_dir"),
        ({"source": "a cat", "count": 2, "slice": "7-9"}, "of 2.*slice"),
        ({"source": "a cat"}, "num_images -1"),
        ({"source": "  ", "count": 1}, "prompt"),
        ({"source": "MSCOCO2017val"}, "MSCOCO2017Val"),
        ({"source": "notes", "count": 1}, r"prompt notes.*\.jsonl"),
        ({"source": None, "start_idx": 5, "end_idx": 5}, "end_idx 5.*start_idx 5"),
        ({"source": "a cat", "class_labels": (1,)}, "class_labels .*prompt"),
        ({"source": "p.json", "captions": "longest"}, r"captions longest: p\.json"),
        ({"source": "a cat", "count": 1, "captions": "longest"}, "captions longest: a cat"),
        ({"source": "a cat", "count": 1, "prompt_dir": "x"}, "prompt_dir x"),
        ({"source": "texts"}, r"texts/2\.txt: it has no prompt"),
        ({"source": "bytes"}, r"bytes/1\.txt: is not UTF-8"),
        ({"source": "empty"}, r"prompt empty: .*\.txt"),
    ],
)
def test_selections_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selection: dict[str, Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.json").write_text('["a", "b"]')
    Path("notes").write_text("a cat")
    for name, texts in {"texts": ["a", " "], "bytes": ["\udcff"], "empty": []}.items():
        Path(name).mkdir()
        for number, text in enumerate(texts, start=1):
            Path(name, f"{number}.txt").write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=says):
        select(**selection)


def test_seeds_depend_on_run_and_name_only() -> None:
    seeds, again = ({image_seed(run, name) for run in (0, 1) for name in ("0", "1", "ü")} for _ in range(2))
    assert seeds == again and len(seeds) == 6 and max(seeds) < 2**48


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda t: t == t.strip())
LINES = TEXTS.filter(lambda text: not {"\r", "\n"} & {*text})
LISTS = st.lists(TEXTS | st.sampled_from(['"', "a\rb", 'a\r\n"b"', "a,b\tc\n#", "a\u2028b"]), min_size=1)


def by_csv(file: TextIO, texts: Sequence[str], delimiter: str) -> None:
    csv.writer(file, delimiter=delimiter).writerows([["id", "prompt"], *enumerate(texts)])


def by_pandas(file: TextIO, texts: Sequence[str], delimiter: str) -> None:
    pandas.DataFrame({"prompt": texts}).to_csv(file, sep=delimiter)


def by_json(file: TextIO, texts: Sequence[str], delimiter: str) -> None:
    json.dump(texts, file, ensure_ascii=delimiter == ",")


def by_json_lines(file: TextIO, texts: Sequence[str], delimiter: str) -> None:
    file.writelines(json.dumps({"prompt": text}, ensure_ascii=delimiter == ",") + "\n" for text in texts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder whose files every example writes anew."""
    return tmp_path_factory.mktemp("inputs")


@pytest.mark.parametrize(
    ("write", "name", "delimiter"),
    [
        *((write, *kind) for write in (by_csv, by_pandas) for kind in (("p.csv", ","), ("p.tsv", "\t"))),
        *((by_json, "p.json", delimiter) for delimiter in ",\t"),
        *((by_json_lines, "p.jsonl", delimiter) for delimiter in ",\t"),
    ],
)
@given(texts=LISTS)
def test_what_programs_write_is_read(
    folder: Path, write: Callable[..., None], name: str, delimiter: str, texts: list[str]
) -> None:
    """Whatever the texts, the prompts are those that were written."""
    with (folder / name).open("w", encoding="utf-8", newline="") as file:
        write(file, texts, delimiter)
    assert [text for _, text, *_ in select(folder / name)] == texts


@given(texts=st.lists(LINES), end=st.sampled_from(["\n", "\r\n", "\r"]), mark=st.booleans())
def test_lines(folder: Path, texts: list[str], end: str, mark: bool) -> None:
    content = "".join(text + end for text in ["first", *texts]).encode()
    (folder / "p.txt").write_bytes("\ufeff".encode() * mark + content)
    assert [text for _, text, *_ in select(folder / "p.txt")] == ["first", *texts]


def test_a_prompt_that_is_emptied_or_cut_is_a_warning(
    run: Run, refused: Refused, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("a red heart\n@someone\n" + "the sea " * 20)
    words = ["--prompt", prompts, "--num_images", -1, "--method", "ar", "--output_dir", tmp_path / "out"]
    status, _, err = run("generate_images", *checkpoints["llamagen"].words(), *words)
    assert status == 0 and err.count("warning: ") == 1 and "prompt 1: " in err and "2 prompts" in err
    whole, empty, cut = (entry.get("warnings") for entry in statistics(tmp_path / "out").values())
    assert whole is None and "nothing" in empty[0] and "first 12 tokens" in cut[0]
    classes = ["generate_images", *checkpoints["llamagen classes"].words(), "--class_labels", "3"]
    assert "--text_encoder x" in refused(*classes, "--text_encoder", "x")


@pytest.mark.parametrize("command", ["generate_images", "generate_train_data"])
def test_a_control_token_in_a_prompt_file_is_refused_before_anything_is_written(
    refused: Refused, tmp_path: Path, command: str
) -> None:
    (tmp_path / "p.txt").write_text("red heart\na <s> cat\n")
    words = ["--prompt", tmp_path / "p.txt", "--device", "cpu", "--output_dir", tmp_path / "out"]
    assert "'a <s> cat': <s> is a control token" in refused(command, *words)
    assert not list(tmp_path.glob("out/*"))
