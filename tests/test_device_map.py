"""A decoder over several devices makes the images of one device. The devices are two names of this CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adt_tree.method import Method
from adt_tree.pipeline import Pipeline
from adt_tree.policy import TreeShape
from adt_tree.sampling import Sampling
from models.cache import KVCache
from models.device_map import SpreadCache, Stage, allocate, by_layer, share_out, spread
from models.errors import CheckpointError
from models.model import Model
from models.registry import spec_of
from models.spec import Checkpoint, LoadOptions
from models.transformer import DecoderConfig
from tests.checkpoints import load

CPU = torch.device("cpu")


def codes(model: Model, method: Method) -> list[list[int]]:
    """What the method makes, two images in flight."""
    return Pipeline(model)(["sun", "red heart", "pizza"], method, batch_size=2).codes


@pytest.mark.parametrize(
    "method", [Method("ar", Sampling()), Method("eagle-2", Sampling(), TreeShape(4, 3, 9))]
)
def test_the_same_images(tiny_checkpoint: Path, method: Method) -> None:
    alone, split = (load("emoji", tiny_checkpoint) for _ in range(2))
    # "cpu" and "cpu:0" are one memory under two names: a copy that is forgotten goes unnoticed here.
    spread(split.decoder, [CPU, torch.device("cpu", 0)])
    assert [type(block) for block in split.decoder.blocks] == [Stage, Stage]
    cache = split.target(2, Sampling(), 5, 9).cache
    assert isinstance(cache, SpreadCache) and [part.store.shape[0] for part in cache.parts] == [1, 1]
    assert codes(split, method) == codes(alone, method)


def test_what_a_pass_crosses(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor a stage reads is moved to its device: moves are written down."""
    decoder = spread(load("emoji", tiny_checkpoint).decoder, [CPU, torch.device("cpu", 0)])
    cache, moved, to = allocate(decoder, 1, 8), [], torch.Tensor.to
    meta = cache.metadata(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, 1, dtype=torch.bool), 0)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, place: (moved.append(place), to(self, place))[1])
    with torch.inference_mode():
        decoder(torch.zeros(1, 1, decoder.config.hidden_size), cache, meta)
    devices = [str(place) for place in moved if isinstance(place, torch.device)]
    assert devices == 5 * ["cpu"] + ["cpu:0"] + 5 * ["cpu:0"] + ["cpu"]


def test_weights_are_read_to_their_layers(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.layouts.networks.share_out", lambda *_: [CPU, torch.device("cpu", 0)])
    folder = tiny_checkpoint
    spec = spec_of("emoji")
    files = Checkpoint(spec, folder, folder / "drafter", torch.float32, CPU, LoadOptions(), split=True)
    loaded = spec.load(files)
    assert [block.device for block in loaded.decoder.blocks] == [CPU, torch.device("cpu", 0)]
    method = Method("eagle-1", Sampling(temperature=0.0), "chain")
    assert codes(loaded, method) == codes(load("emoji", tiny_checkpoint), method)
    where = by_layer([torch.device("cuda", n) for n in (0, 0, 1)], "model.layers.")
    names = ("model.layers.2.mlp", "model.layers.1.mlp", "lm_head.weight")
    assert [where(name).index for name in names] == [1, 0, 0]


def test_one_device_has_a_plain_cache(tiny_checkpoint: Path) -> None:
    assert isinstance(allocate(load("emoji", tiny_checkpoint).decoder, 2, 8), KVCache)


def test_sharing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DecoderConfig(vocab_size=1000, hidden_size=256, intermediate_size=512, num_layers=8, num_heads=4)
    layer = 4 * (4 * 256 * 256 + 3 * 256 * 512)
    rest = 4 * 2 * 1000 * 256
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    places = share_out(config, torch.float32, {0: 12 * layer + 2 * rest, 1: 12 * layer + 2 * rest})
    order = [place.index for place in places]
    assert order == sorted(order) and set(order) == {0, 1}
    with pytest.raises(CheckpointError, match=r"room for \d of 8 layers as torch.float32: choose a smaller"):
        share_out(config, torch.float32, {0: 2 * layer + 2 * rest, 1: 2 * layer})
    assert share_out(replace(config, num_layers=1), torch.float32, {0: 99 * rest, 1: 1}) == [
        torch.device("cuda", 0)
    ]
