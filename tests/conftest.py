"""Fixtures shared by the tests."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import lab as lab  # its rows of METHODS are tested, too

if TYPE_CHECKING:
    from adt_tree.pipeline import Pipeline
    from tests.support.checkpoints import Checkpoints
    from tests.support.service import Running

Command = Callable[..., list[str]]
Run = Callable[..., tuple[int, str, str]]
Refused = Callable[..., str]
Result = Callable[..., dict[str, Any]]

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Returns the tiny random checkpoints of every family. Tests must not change them."""
    from tests.support.checkpoints import Checkpoints

    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def tiny_checkpoint(checkpoints: Checkpoints) -> Path:
    """Returns the folder of a tiny checkpoint with a drafter, laid out as the embedded model."""
    return checkpoints["emoji"].path


@pytest.fixture(scope="session")
def pipe(tiny_checkpoint: Path) -> Pipeline:
    """Returns the tiny checkpoint as a pipeline in fp32 on the CPU."""
    from adt_tree.pipeline import Pipeline

    return Pipeline.from_pretrained(str(tiny_checkpoint), device="cpu", precision="fp32")


@pytest.fixture(scope="session")
def load_emu3(checkpoints: Checkpoints) -> Callable[[], Any]:
    """Returns a function that loads transformers' model of the tiny Emu3 in fp32."""

    def load() -> Any:
        import transformers

        path = checkpoints["emu3"].path
        return transformers.Emu3ForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()

    return load


@pytest.fixture(scope="session")
def emu3(load_emu3: Callable[[], Any]) -> Any:
    """Returns that model. Tests must not change it."""
    return load_emu3()


@pytest.fixture(scope="module")
def live(request: pytest.FixtureRequest, pipe: Pipeline) -> Iterator[Running]:
    """Serves the tiny checkpoint with the test module's SETTINGS."""
    from tests.support.service import running

    with running(pipe, request.module.SETTINGS) as service:
        yield service


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Returns a function that runs main.py in this process. It takes the words of a command line and returns
    the status, stdout and stderr."""
    import main

    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main.main([str(word) for word in words])
        return status, *capsys.readouterr()

    return call


@pytest.fixture(scope="session")
def words_of_run(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns the words of generate_images for the tiny checkpoint and five prompts. The output folder is to
    be appended."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    prompts.write_text("red heart\npizza\ncat face\nsun\nrocket\n")
    fixed = [*checkpoints["emoji"].words(), "--prompt", str(prompts), "--heatmaps", "0"]
    return ["generate_images", *fixed, "--output_dir"]


@pytest.fixture
def command(words_of_run: list[str], tmp_path: Path) -> Command:
    """Returns a function that appends the name of the output folder, and more options, to these words."""
    return lambda folder, *more: [*words_of_run, str(tmp_path / folder), *map(str, more)]


@pytest.fixture
def generate(run: Run, command: Command) -> Run:
    """Returns a function that runs generate_images with the words that `command` builds."""
    return lambda *words: run(*command(*words))


@pytest.fixture
def refused(run: Run) -> Refused:
    """Returns a function that runs a command, checks that it ends with status 2 and one line on stderr, and
    returns that line."""

    def call(*words: object) -> str:
        status, _, err = run(*words)
        assert (status, err.count("\n")) == (2, 1) and err.startswith("error: "), err
        return err

    return call


@pytest.fixture
def result(run: Run) -> Result:
    """Returns a function that runs a command, checks that it succeeds, and returns the JSON document in the
    last line of its output."""

    def call(*words: object) -> dict[str, Any]:
        status, out, err = run(*words)
        assert status == 0, err
        return json.loads(out.splitlines()[-1])

    return call


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Leaves what lives already, such as libraries, out of the garbage collections that commands ask for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Gives the tests a cache folder, so that they neither read nor write that of the user."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
