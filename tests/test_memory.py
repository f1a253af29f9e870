"""The memory table: weights and caches to the byte, the peak as a process reaches it, the README's copy."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

from adt_tree.pipeline import Pipeline
from adt_tree.policy import TreeShape
from adt_tree.sampling import Sampling
from cli.memory import NAMES, table
from models.checkpoint.weights import read_weights
from models.memory import Use, parts, published_use
from models.model import Model
from models.spec import CKPTS
from tests import tiny
from tests.checkpoints import load
from tests.conftest import Refused, Run
from tests.runs import python

SAMPLING = Sampling()
DEPTH, WIDTH, NODES = 4, 3, 13


def use(model: Model, images: int, prompt: int) -> Use:
    """The model under guidance with trees of those sizes."""
    net = model.drafter_net
    assert net is not None
    config, grid = model.codec.config, model.grid
    side = grid.height * config.patch_size
    scratch = max(DEPTH + 1, DEPTH * WIDTH)
    element = model.decoder.embed.weight.element_size()
    return Use(
        model.decoder.config, net.config, config, side, grid.size, prompt, NODES, scratch, images, 2, element
    )


def held(modules: Iterable[nn.Module]) -> int:
    """Bytes of parameters."""
    return sum(p.nbytes for module in modules for p in module.parameters())


def test_weights_and_caches_to_the_byte(tiny_checkpoint: Path) -> None:
    model = load("emoji", tiny_checkpoint, precision="fp16")  # nobody packs it
    target = model.target(3, SAMPLING, NODES, 20)
    drafter = model.drafter(target, DEPTH, WIDTH)
    found = parts(use(model, 3, 20))
    assert found["target"] == held([model.decoder])
    assert found["drafter"] == held([model.drafter_net]) and found["codec"] == held([model.codec])
    assert found["cache"] == target.cache.store.nbytes
    assert found["drafter cache"] == drafter.cache.store.nbytes
    assert found["peak"] > sum(found[name] for name in ("target", "drafter", "codec", "cache"))


def test_one_head_of_the_codes_alone(tiny_checkpoint: Path) -> None:
    """Cut when the model is loaded, the whole one dropped; all targets read it."""
    model = load("emoji", tiny_checkpoint, precision="fp16")  # nobody packs it
    head, stored = model.decoder.head, read_weights(tiny_checkpoint)["lm_head.weight"]
    rows = stored[model.first_code : model.first_code + model.num_codes]
    assert torch.equal(head.weight, rows.half()) and len(rows) < len(stored)
    assert head.weight.untyped_storage().nbytes() == head.weight.nbytes
    targets = [model.target(slots, SAMPLING, NODES, 20) for slots in (1, 2)]
    assert all(target.decoder.head is head for target in targets)


def status(key: str) -> int:
    """Bytes that the system counts for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def draw(folder: str, images: int) -> int:
    """Draw images at once; the peak computed for that."""
    model = load("emoji", folder)
    pipe = Pipeline(model)
    method = pipe.method("eagle-2", sampling=SAMPLING, tree=TreeShape(DEPTH, WIDTH, NODES - 1))
    requests = pipe.requests(["sun"] * images, 0)
    for decoded in pipe.engine(method, requests, images).decode(requests):
        model.image(decoded.codes)
    return parts(use(model, images, requests[0].prompt.length))["peak"]


def print_peaks(first: str, second: str) -> None:
    """The peak of drawing from the second checkpoint after the first, measured and computed."""
    draw(first, 1)
    before = status("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")
    computed = draw(second, 4)
    print(status("VmHWM:") - before, computed)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak counters")
def test_the_peak_of_a_process(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = tiny.build(tmp_path / "large", hidden_size=512, intermediate_size=1408, num_hidden_layers=4)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    code = f"from tests.test_memory import print_peaks; print_peaks({str(tiny_checkpoint)!r}, {str(large)!r})"
    measured, computed = map(int, python("-c", code).stdout.split())
    compiled = 40e6  # oneDNN's products for the shapes met here
    assert computed > 50e6 and 0.8 < measured / computed, (measured, computed)
    assert measured - compiled < 1.1 * computed, (measured, computed)


def test_the_command_and_the_copy_in_the_readme(run: Run, refused: Refused) -> None:
    status, out, _ = run("memory")
    found = json.loads(out.splitlines()[-1])
    text = (CKPTS / "README.md").read_text(encoding="utf-8")
    assert status == 0 and list(found) == list(NAMES) and table(found) in text and table(found) in out
    for name in NAMES:
        more = parts(published_use(name, "fp32", 2))
        assert more["target"] == 2 * found[name]["target"] and more["cache"] == 4 * found[name]["cache"]
    uncut = found["anole"]["target"] + 2 * (65_536 - 8_192) * 4_096  # with the rows that score no code
    assert uncut == pytest.approx(14.1e9, rel=0.01)  # published: 14.3 with the VQ encoder
    assert found["anole"]["cache"] < 1.3e9  # the released code allocates 4.3
    assert "memory emoji" in refused("memory", "emoji")
