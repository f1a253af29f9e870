"""Files that people and programs write: what is in them is what the readers give, whatever the text."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pandas
import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from adt_tree.errors import UserError
from cli.generate_images import Options
from cli.parser import PATHS
from eval.metrics.pictures import read_image
from main import COMMANDS, module_of
from storage.prompts import read_file
from tests.conftest import Refused, Result, Run
from tests.support.checkpoints import Checkpoints
from tests.support.runs import statistics

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda text: text == text.strip()
)
LINES = TEXTS.filter(lambda text: not {"\r", "\n"} & {*text})
LISTS = st.lists(TEXTS | st.sampled_from(['"', "a\rb", 'a\r\n"b"', "a,b\tc\n#", "a\u2028b"]), min_size=1)
BOM = "\ufeff".encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder whose files every example writes anew."""
    return tmp_path_factory.mktemp("inputs")


def texts_of(path: Path) -> list[str]:
    """Returns the texts of a prompt file."""
    return [prompt.text for prompt in read_file(path)]


def by_csv(path: Path, texts: Sequence[str], delimiter: str) -> None:
    """Writes a table by the csv module."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([["id", "prompt"], *enumerate(texts)])


def by_pandas(path: Path, texts: Sequence[str], delimiter: str) -> None:
    """Writes a table by pandas."""
    pandas.DataFrame({"prompt": texts}).to_csv(path, sep=delimiter)


@pytest.mark.parametrize("write", [by_csv, by_pandas])
@pytest.mark.parametrize(("name", "delimiter"), [("p.csv", ","), ("p.tsv", "\t")])
@given(texts=LISTS)
def test_tables(
    folder: Path, write: Callable[..., None], name: str, delimiter: str, texts: list[str]
) -> None:
    write(folder / name, texts, delimiter)
    assert texts_of(folder / name) == texts


@given(texts=LISTS, ascii_only=st.booleans())
def test_json(folder: Path, texts: list[str], ascii_only: bool) -> None:
    rows = [{"prompt": text} for text in texts]
    (folder / "p.json").write_text(json.dumps(texts, ensure_ascii=ascii_only), encoding="utf-8")
    lines = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)
    (folder / "p.jsonl").write_text(lines, encoding="utf-8")
    assert texts_of(folder / "p.json") == texts_of(folder / "p.jsonl") == texts


@given(texts=st.lists(LINES), end=st.sampled_from(["\n", "\r\n", "\r"]), mark=st.booleans())
def test_lines(folder: Path, texts: list[str], end: str, mark: bool) -> None:
    content = "".join(text + end for text in ["first", *texts]).encode()
    (folder / "p.txt").write_bytes(BOM * mark + content)
    assert texts_of(folder / "p.txt") == ["first", *texts]


@given(text=TEXTS | st.sampled_from(["~", "null", "12:30", "no"]), ascii_only=st.booleans())
def test_yaml(folder: Path, text: str, ascii_only: bool) -> None:
    content = yaml.safe_dump({"prompt": text}, allow_unicode=not ascii_only)
    assume(yaml.safe_load(content)["prompt"] == text)  # PyYAML writes U+0085 as it is, and reads a line end
    (folder / "run.yaml").write_text(content, encoding="utf-8")
    assert Options.parse(["--config", str(folder / "run.yaml")]).prompt == text


@pytest.mark.parametrize("text", "12:30 16:9 no on 1_000 017 0x10 1e3 2024-01-01 .inf =".split())
def test_plain_words_of_yaml_are_texts(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(BOM + f"prompt: {text}\r\nlantern: Yes\r\nset_seed: off\r\n".encode())
    options = Options.parse(["--config", str(file)])
    assert (options.prompt, options.lantern, options.set_seed) == (text, True, False)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_path_may_begin_with_the_home_folder(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").touch()  # --config reads it
    command = module_of(name).Options
    groups = [group for group in command.__mro__ if is_dataclass(group)]  # a subclass changes only defaults
    for item in (item for group in groups for item in fields(group) if item.metadata):
        if item.metadata["unit"] in PATHS:
            flag = () if item.metadata.get("positional") else (f"--{item.name}",)
            value = getattr(command.parse([*flag, "~/x"]), item.name)
            assert value in (f"{tmp_path}/x", (f"{tmp_path}/x",)), item.name
        else:
            assert not item.name.endswith(("_dir", "_path", "_file", "folder")), item.name


def test_paths_of_a_yaml_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path, result: Result
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").symlink_to(tiny_checkpoint)
    (tmp_path / "p.txt").write_text("red heart\n")
    file = tmp_path / "run.yaml"
    file.write_text("output_dir: ~/out\nprompt: ~/p.txt\nmodel_path: ~/model\nheatmaps: 0\ndevice: cpu\n")
    words = ("--total_token", "8", "--set_seed", "--random_seed", 2**64)
    assert result("generate_images", "--config", file, *words)["output_dir"] == str(tmp_path / "out")
    assert (tmp_path / "out" / "img" / "0.png").is_file()


@pytest.mark.parametrize("order", ["<u2", ">u2"])
def test_grey_of_16_bits_is_scaled_to_8(tmp_path: Path, order: str) -> None:
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    Image.fromarray((grey.astype(np.uint16) * 257).astype(order)).save(tmp_path / "a.png")
    assert (np.asarray(read_image(tmp_path / "a.png")) == grey[..., None]).all()
    Image.fromarray(grey.astype(np.float32)).save(tmp_path / "b.tiff")
    with pytest.raises(UserError, match=r"b\.tiff.* mode F"):
        read_image(tmp_path / "b.tiff")


def test_a_prompt_that_is_emptied_or_cut_is_a_warning(
    run: Run, refused: Refused, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("a red heart\n@someone\n" + "the sea " * 20)
    words = ["--prompt", prompts, "--num_images", -1, "--output_dir", tmp_path / "out"]
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
