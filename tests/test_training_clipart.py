"""The optional style from a Debian package: which drawings are kept; the emoji stay as they are."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from training import clipart, data
from training.errors import StageError

FREE = "http://web.resource.org/cc/PublicDomain"
SQUARE = '<rect width="4" height="8"/>'
DRAWING = """<svg xmlns="http://www.w3.org/2000/svg" xmlns:cc="http://web.resource.org/cc/"
 xmlns:dc="http://purl.org/dc/elements/1.1/" xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"
 width="{width}" height="8"><metadata><rdf:RDF><cc:Work><dc:title>{title}</dc:title>
 <dc:subject><rdf:Bag><rdf:li>mammal</rdf:li><rdf:li>cat</rdf:li><rdf:li>hash</rdf:li><rdf:li/></rdf:Bag></dc:subject>
 <cc:license rdf:resource="{licence}"/></cc:Work></rdf:RDF></metadata>{body}</svg>"""


def put(path: Path, title: str, licence: str = FREE, width: int = 8, body: str = SQUARE) -> None:
    """Write a drawing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(DRAWING.format(title=title, licence=licence, width=width, body=body))


@pytest.fixture()
def drawings(tmp_path: Path) -> Path:
    """A folder as the package has it: two drawings to keep and one of each kind to drop."""
    pytest.importorskip("resvg_py")
    folder = tmp_path / "svg"
    put(folder / "animals" / "cats" / "a.svg", "Cat (B and W)")
    put(folder / "tools" / "b.svg", "Claw_Hammer 02", width=12)
    put(folder / "tools" / "same.svg", "cat")
    put(folder / "tools" / "owned.svg", "owned", licence="http://creativecommons.org/licenses/by-nc/2.0/")
    put(folder / "tools" / "unnamed.svg", " (01) ")
    put(folder / "tools" / "long.svg", "one two three four five six seven")
    put(folder / "tools" / "wide.svg", "wide", width=24)
    put(folder / "tools" / "blank.svg", "blank", body="")
    put(folder / "people" / "man.svg", "man")
    (folder / "tools" / "plain.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (folder / "tools" / "torn.svg").write_text("<svg")
    put(tmp_path / "elsewhere.svg", "link")
    (folder / "tools" / "link.svg").symlink_to(tmp_path / "elsewhere.svg")
    return folder


def test_short_titles_of_free_drawings_become_captions(drawings: Path) -> None:
    rows, images = zip(*clipart.pictures(drawings, 16), strict=True)
    assert [(row["name"], row["keywords"], row["subgroup"]) for row in rows] == [
        ("cat", ("mammal",), "animals"),
        ("claw hammer", ("mammal", "cat"), "tools"),
    ]
    assert {(row["style"], row["split"]) for row in rows} == {("openclipart", "train")}
    assert (images[0][:, :8] == 0).all() and (images[0][:, 8:] == 255).all()
    assert images[1].shape == (16, 16, 3) and (images[1][:2] == 255).all()  # 3:2, centred on white


def test_the_emoji_are_the_same_with_and_without_drawings(
    drawings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by default; on, rows, pictures and a licence follow, and the checksums say so."""
    icon = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8">{SQUARE}</svg>'
    entries = [
        data.Entry("red heart", ("love",), "2764", "heart"),
        data.Entry("sun", (), "2600", "sky-weather"),
    ]
    monkeypatch.setattr(data, "fetch", lambda package, cache: cache / package)
    monkeypatch.setattr(data, "load_icons", lambda tarball: {"2764": icon, "2600": icon})
    monkeypatch.setattr(data, "read_entries", lambda tarball: entries)
    monkeypatch.setattr(data, "licence_record", lambda styles, cache: [{"style": "noto"}])
    monkeypatch.setattr(clipart, "fetch", lambda cache: drawings)
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    built = {}
    for flags in ((), ("--openclipart",)):
        work = tmp_path / f"data{len(flags)}"
        data.run(parser.parse_args(["--work_dir", str(work), "--image_size", "16", *flags]))
        licences = json.loads((work / "licences.json").read_text())
        built[flags] = data.read_captions(work), np.load(work / "images.npy"), licences
    (plain, few, licences), (rows, more, longer) = built.values()
    assert len(plain) == 6 and licences == [{"style": "noto"}]
    assert rows[:6] == plain and (more[:6] == few).all()
    assert [row["index"] for row in rows] == list(range(8)) and len(more) == 8
    assert longer == [*licences, clipart.LICENCE]


def test_only_the_pinned_package_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No apt-get, no such version and another content are refused; nothing half made is used."""

    def missing(words: list[str], cwd: Path, check: bool) -> None:
        raise FileNotFoundError(2, "No such file", words[0])

    def refusing(words: list[str], cwd: Path, check: bool) -> None:
        raise subprocess.CalledProcessError(100, words)

    def forging(words: list[str], cwd: Path, check: bool) -> None:
        assert words == ["apt-get", "download", "--quiet", clipart.PACKAGE]
        (cwd / "openclipart-svg_0_all.deb").write_bytes(b"something else")

    for command, message in (
        (missing, "cannot give .* No such file"),
        (refusing, "cannot give .* exit status 100"),
        (forging, "another checksum"),
    ):
        monkeypatch.setattr(subprocess, "run", command)
        with pytest.raises(StageError, match=message):
            clipart.fetch(tmp_path)
    home = tmp_path / clipart.PACKAGE.replace(":", ".")
    assert not home.exists()
    home.mkdir()
    monkeypatch.setattr(subprocess, "run", missing)  # what is there is not fetched again
    assert clipart.fetch(tmp_path).is_relative_to(home)
