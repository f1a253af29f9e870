"""generate_images stopped at any point and started again, alone or in several processes: nothing that was
generated is lost, and the folder ends as that of a run that was never stopped. The checkpoint is tiny and
random."""

from __future__ import annotations

import gc
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import main
from adt_tree.errors import UserError
from adt_tree.grid import Grid
from adt_tree.noise_table import NoiseTable
from adt_tree.pipeline import Pipeline
from cli.generate_images import Options, fingerprint
from models.decoder.cache import KVCache
from models.target import ARTarget
from storage.run_folder import RunFolder
from tests.conftest import Command, Refused, Result, Run
from tests.support.processes import finished, signalled, started
from tests.support.runs import contents, images, statistics

OPTIONS = ("--method", "adt-tree", "--heatmaps", "1")


@pytest.fixture(scope="module")
def whole(words_of_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns what a run leaves that was never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "o"
    assert main.main([*words_of_run, str(folder), *OPTIONS]) == 0
    return contents(folder)


def records(folder: Path) -> list[str]:
    """Returns the names of the images whose codes are stored."""
    return sorted(path.stem for path in (folder / "records").iterdir())


def test_interrupt_and_resume_lose_nothing(
    result: Result, command: Command, whole: dict[str, Any], tmp_path: Path
) -> None:
    """The signal comes from a scheduler. test_bench.py and test_cli.py interrupt as from the keyboard."""
    interrupted = signalled(signal.SIGTERM, command("parts", *OPTIONS))
    assert (interrupted.returncode, interrupted.stdout, interrupted.stderr.count("\n")) == (130, "", 1)
    assert interrupted.stderr.splitlines()[-1].startswith("interrupted: ")
    assert len(records(tmp_path / "parts")) == len(images(tmp_path / "parts")) == 1
    assert result(*command("parts", *OPTIONS))["skipped"] == 1
    assert contents(tmp_path / "parts") == whole


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("step", "number", "codes", "pixels"),
    [("add", 2, ["1"], 1), ("finish", 2, ["1", "3"], 1), ("statistics", 1, None, 5)],
)
def test_a_killed_process_loses_nothing(
    generate: Run,
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: dict[str, Any],
    step: str,
    number: int,
    codes: list[str] | None,
    pixels: int,
) -> None:
    """Process 1 of 2 is killed before it stores codes, before it stores pixels, or before it writes the
    statistics, for which process 0 must be done. Once both have ended well, the folder is as a single process
    leaves it, and the last has printed the summary."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    def as_process(rank: int, share: int) -> str:
        monkeypatch.setenv("RANK", str(rank))
        status, out, _ = generate("o", *OPTIONS)
        assert status == 0 and f"process {rank} of 2: {share} images" in out
        return out

    last = step == "statistics"
    if last:
        assert '"output_dir"' not in as_process(0, 3)
    monkeypatch.setenv("RANK", "1")
    assert signalled(signal.SIGKILL, command("o", *OPTIONS), step, number).returncode == -9
    assert len(images(tmp_path / "o")) == pixels and (codes is None or records(tmp_path / "o") == codes)
    assert not list((tmp_path / "o").glob("global_statistics_*"))
    if not last:
        assert '"output_dir"' not in as_process(0, 3)
    assert '"images": 5' in as_process(1, 0 if last else 2 - pixels)
    assert contents(tmp_path / "o") == whole


def test_two_runs_in_one_folder(command: Command, whole: dict[str, Any], tmp_path: Path) -> None:
    """The second is refused in a line that names the first."""
    outputs = [tmp_path / name for name in ("first", "second")]
    for output in outputs:
        output.mkdir()
    both = [started(command("two", *OPTIONS), output) for output in outputs]
    first, second = sorted(map(finished, both, outputs), key=lambda process: process.returncode)
    assert (first.returncode, second.returncode) == (0, 2)
    assert f"{tmp_path / 'two'} is in use by process " in second.stderr and second.stderr.count("\n") == 1
    assert json.loads(first.stdout.splitlines()[-1])["images"] == 5
    assert contents(tmp_path / "two") == whole


def test_a_process_waits_for_the_damaged_files_of_the_others(
    generate: Run, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generate("o", *OPTIONS)[0] == 0
    (tmp_path / "o" / "img" / "1.png").write_bytes(b"")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, summaries in (("0", 0), ("1", 1)):
        monkeypatch.setenv("RANK", rank)
        status, out, _ = generate("o", *OPTIONS)
        assert status == 0 and out.count('"output_dir"') == summaries
    assert contents(tmp_path / "o") == whole


def test_a_folder_that_cannot_be_written_to_is_named(
    generate: Run, command: Command, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generate("o")[0] == 0

    def read_only(path: Path, *modes: str, real: Any = Path.open, **more: Any) -> Any:
        if path.name.endswith(".lock"):
            raise OSError(30, "Read-only file system", str(path))
        return real(path, *modes, **more)

    monkeypatch.setattr(Path, "open", read_only)
    assert f"Read-only file system: '{tmp_path / 'o'}'" in refused(*command("o"))


def test_a_disk_that_fills_up(
    generate: Run, command: Command, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "o"
    with monkeypatch.context() as patch:

        def filling(path: Path, data: bytes, real: Any = Path.write_bytes) -> int:
            if (folder / "img" / "0.png").exists():
                raise OSError(28, "No space left on device")
            return real(path, data)

        patch.setattr(Path, "write_bytes", filling)
        assert f"No space left on device: '{folder / 'records' / '1.json'}'" in refused(*command("o"))
    assert list(images(folder)) == ["0.png"] and not list(folder.rglob(".*.??????*"))
    first = images(folder)["0.png"]
    assert generate("o")[0] == 0
    assert images(folder)["0.png"] == first and len(statistics(folder)) == 5


def test_memory_that_runs_out_at_the_pixels_leaves_the_codes(
    generate: Run, command: Command, refused: Refused, whole: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The next run decodes pixels only, without a call of the target."""
    decoded: list[int] = []

    def full(pipe: Pipeline, codes: list[int], real: Any = Pipeline.image) -> Image.Image:
        decoded.append(len(codes))
        if len(decoded) > 3:
            raise torch.OutOfMemoryError("Tried to allocate 7.90 GiB. GPU 0 has 3 GiB free.")
        return real(pipe, codes)

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "image", full)
        error = refused(*command("o", *OPTIONS))
    assert "--batch_size" in error and "7.90 GiB" in error
    assert records(tmp_path / "o") == ["0", "1", "2", "3"] and len(images(tmp_path / "o")) == 3
    assert generate("o", *OPTIONS)[0] == 0
    assert contents(tmp_path / "o") == whole
    for name in ("1.png", "4.png"):
        (tmp_path / "o" / "img" / name).unlink()
    calls: list[str] = []
    for method in ("prefill", "features"):
        monkeypatch.setattr(ARTarget, method, lambda *_: calls.append("called"))
    status, out, _ = generate("o", *OPTIONS)
    assert status == 0 and not calls and '"skipped": 3' in out
    assert contents(tmp_path / "o") == whole


def test_damaged_files_are_made_anew(generate: Run, whole: dict[str, Any], tmp_path: Path) -> None:
    assert generate("o", *OPTIONS)[0] == 0
    for name, damage in {"img/0.png": b"", "img/3.png": b"\x89PNG", "records/2.json": b'{"name"'}.items():
        (tmp_path / "o" / name).write_bytes(damage)
    status, out, err = generate("o", *OPTIONS)
    assert status == 0 and '"skipped": 2' in out
    assert err == f"warning: 3 damaged files are made anew, {tmp_path / 'o' / 'img' / '0.png'} first\n"
    assert contents(tmp_path / "o") == whole


def living() -> int:
    """Returns the number of key/value caches and noise tables that the collector tracks."""
    gc.collect()
    return sum(type(thing) in (KVCache, NoiseTable) for thing in gc.get_objects())


def test_caches_and_noise_are_gone_before_the_last_pixels(
    generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def counting(pipe: Pipeline, codes: list[int], real: Any = Pipeline.image) -> Image.Image:
        counts.append(living())
        return real(pipe, codes)

    gc.freeze()  # what lives already is not looked at
    monkeypatch.setattr(Pipeline, "image", counting)
    assert generate("o", "--method", "adt-tree")[0] == 0
    assert min(counts[:4]) > 0 and counts[4:] == [0]


def test_a_second_size_in_one_folder_is_refused(pipe: Pipeline, tmp_path: Path) -> None:
    """Even one with as many codes."""
    options, method, grids = Options.parse([]), pipe.method("ar"), (Grid(2, 8), Grid(4, 4))
    first, second = (fingerprint(options, method, replace(pipe.model, grid=grid)) for grid in grids)
    RunFolder(tmp_path, [], first, grids[0]).start({})
    with pytest.raises(UserError, match=r"grid = \[\[2, 8, "):
        RunFolder(tmp_path, [], second, grids[1])
