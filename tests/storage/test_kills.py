"""Work that is lost or mixed: two processes in one folder, killed at random moments and started again. After
that every stored code belongs to its prompt and seed, nothing is there twice, and nothing is missing."""

from __future__ import annotations

import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from models.model import Model
from storage.prompts import image_seed
from storage.run_folder import read_records
from tests.conftest import Run
from tests.support.checkpoints import Checkpoints
from tests.support.processes import started
from training.shards import read_index, read_shards

ROUNDS, NAMES = 16, [str(row) for row in range(24)]
Facts = dict[str, tuple[str, int | None, list[int]]]  # of each image: its text, seed and codes


def status_of(process: BaseProcess, end_s: float | None = None) -> int | None:
    """Returns a process's exit status, or the negative number of the signal that ended it. end_s: kills it at
    this time of the clock."""
    if end_s is not None:
        time.sleep(max(0.0, end_s - time.perf_counter()))
        process.kill()
    process.join()
    return process.exitcode


def shards_in(root: Path, model: Model) -> Facts:
    """Returns what is stored of the images in a folder of shards, where no image is twice."""
    shards = read_shards([root], model)
    listed = [image for shard in read_index(root)["shards"] for image in shard["images"]]
    assert len(listed) == len({image["name"] for image in listed}) == len(shards)
    codes = dict(zip(shards.names, shards.codes.tolist(), strict=True))
    return {i["name"]: (i["prompt"], i["seed"], codes[f"{root.name}/{i['name']}"]) for i in listed}


def records_in(root: Path, model: Model) -> Facts:
    """Returns what is stored of the images in a run's folder, whose pictures are those of their codes."""
    records = list(read_records(root))
    for record in records:
        with Image.open(root / "img" / f"{record.name}.png") as image:
            assert np.array_equal(np.asarray(image), np.asarray(model.image(record.codes)))
    return {r.name: (r.statistics["prompt"], r.statistics["seed"], r.codes) for r in records}


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, list[str]]:
    """Returns the words of each command that name what it reads."""
    (tmp_path / "p.txt").write_text("".join(f"text {name}\n" for name in NAMES))
    (tmp_path / "pictures").mkdir()
    for name in NAMES:
        noise = np.random.default_rng(int(name)).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / "pictures" / f"{name}.png")
        (tmp_path / "pictures" / f"{name}.txt").write_text(f"text {name}")
    prompts = ["--prompt", str(tmp_path / "p.txt"), "--num_images", "-1"]
    return {
        "generate_images": [*prompts, "--method", "ar"],
        "generate_train_data": [*prompts, "--batch_size", "2", "--shard_size", "2"],
        "extract_code": ["--data_path", str(tmp_path / "pictures"), "--batch_size", "2"],
    }


COMMANDS = {  # command -> reader of its folder, and how two processes of it differ
    "generate_images": (records_in, (["--end_idx", "14"], ["--start_idx", "10"])),
    "generate_train_data": (shards_in, (["--end_idx", "14"], ["--start_idx", "10"])),
    "extract_code": (shards_in, (["--shard_size", "2"], ["--shard_size", "3"])),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_processes_that_are_killed_lose_and_mix_nothing(
    command: str, sources: dict[str, list[str]], checkpoints: Checkpoints, tmp_path: Path, run: Run
) -> None:
    (stored, parts), model = COMMANDS[command], checkpoints["emoji"].load(need_drafter=False)
    words = [command, *checkpoints["emoji"].words(), *sources[command], "--output_dir"]
    begun = time.perf_counter()
    assert run(*words, tmp_path / "whole")[0] == 0
    length = time.perf_counter() - begun
    moments, out = random.Random(command), tmp_path / "out"
    for number in range(ROUNDS):
        both, now = [started([*words, str(out), *part]) for part in parts], time.perf_counter()
        ends = sorted(now + moments.uniform(0, length / 2) for _ in both) if number % 8 else (None, None)
        for process, end in zip(moments.sample(both, 2), ends, strict=True):
            assert status_of(process, end) in (0, 2, -signal.SIGKILL)  # 2: the folder is in use
    assert [status_of(started([*words, str(out)]))] == [0]
    facts = stored(out, model)
    assert facts == stored(tmp_path / "whole", model)
    for name, (text, seed, _) in facts.items():
        assert text == f"text {name}" and seed in (None, image_seed(42, name))
    assert sorted(facts) == sorted(NAMES)
