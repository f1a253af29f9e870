"""A decoder over several devices: consecutive layers a device, each with the part of the cache it uses.

The first device is home: embedding, norm and head stay there, and whoever runs the decoder sees it alone.
Between devices go the features of a pass and its attention metadata, once each way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from models.cache import AttentionMetadata, KVCache
from models.checkpoint.meta_init import on_meta
from models.errors import CheckpointError
from models.packed import cache_dtype
from models.transformer import Decoder, DecoderConfig


class Stage(nn.Module):
    """The layers of one device, in a Decoder's list of blocks."""

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device, after: torch.device) -> None:
        """after: where the features go from here."""
        super().__init__()
        self.blocks, self.device, self.after = nn.ModuleList(blocks), device, after

    def forward(
        self, x: Tensor, turn: Tensor, layer: int, cache: SpreadCache, meta: AttentionMetadata
    ) -> Tensor:
        """As Block.forward; layer counts stages."""
        place, stage_cache = self.device, cache.parts[layer]
        x, turn = x.to(place), turn.to(place)
        slots, positions, mask = (part.to(place) for part in (meta.slots, meta.positions, meta.mask))
        own = AttentionMetadata(slots, positions, mask, meta.context_len)
        for number, block in enumerate(self.blocks):
            x = block(x, turn, number, stage_cache, own)
        return x.to(self.after)


class SpreadCache:
    """A KVCache of parts, one per stage, in step. The first one's counters speak for all."""

    def __init__(self, parts: Sequence[KVCache]) -> None:
        self.parts = list(parts)

    @property
    def length(self) -> Tensor:
        """Committed slots [R]."""
        return self.parts[0].length

    def row(self, index: int) -> SpreadCache:
        return SpreadCache([part.row(index) for part in self.parts])

    def clear(self, rows: slice = slice(None)) -> None:
        for part in self.parts:
            part.clear(rows)

    def begin(self, count: int, padding: int = 0) -> None:
        for part in self.parts:
            part.begin(count, padding)

    def metadata(self, depths: Tensor, ancestors: Tensor, max_length: int) -> AttentionMetadata:
        return self.parts[0].metadata(depths, ancestors, max_length)

    def commit(self, path: Tensor, count: Tensor, leafy_chain: bool = False) -> None:
        for part in self.parts:
            part.commit(path.to(part.length.device), count.to(part.length.device), leafy_chain)


def spread(decoder: Decoder, devices: Sequence[torch.device]) -> Decoder:
    """The decoder, its layers grouped by the devices they lie on (one a layer, in runs)."""
    runs = [n for n in range(len(devices)) if n == 0 or devices[n] != devices[n - 1]]
    ends = [*runs[1:], len(devices)]
    home = decoder.embed.weight.device
    after = [*(devices[n] for n in runs[1:]), home]
    blocks = list(decoder.blocks)
    decoder.blocks = nn.ModuleList(
        Stage(blocks[start:end], devices[start], then)
        for start, end, then in zip(runs, ends, after, strict=True)
    )
    return decoder


def allocate(
    decoder: Decoder, rows: int, capacity: int, dtype: torch.dtype | None = None
) -> KVCache | SpreadCache:
    """A decoder's cache of `rows` rows of `capacity` slots, where its layers lie; dtype None: the fastest."""
    config, weight = decoder.config, decoder.embed.weight
    dtype = dtype or cache_dtype(weight)
    padded = config.raster_side > 0  # positions of a raster count the padding before a prompt too

    def part(layers: int, device: torch.device) -> KVCache:
        sizes = (layers, rows, capacity, config.num_kv_heads, config.head_dim)
        return KVCache.allocate(*sizes, dtype, device, padded)

    stages = [block for block in decoder.blocks if isinstance(block, Stage)]
    if not stages:
        return part(config.num_layers, weight.device)
    return SpreadCache([part(len(stage.blocks), stage.device) for stage in stages])


def share_out(
    config: DecoderConfig, dtype: torch.dtype, free: dict[int, int] | None = None
) -> list[torch.device]:
    """A device for every layer, in runs, such that the GPUs are filled evenly (accelerate's rule).

    free: bytes by GPU; None: what is free now. A tenth of each is left for caches and activations.
    CheckpointError if the layers do not fit.
    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory, get_max_memory

    model = on_meta(lambda: Decoder(config))
    room = {place: int(0.9 * size) for place, size in get_max_memory(free).items() if place != "cpu"}
    whole = {"no_split_module_classes": ["Block"], "dtype": dtype}
    limits = get_balanced_memory(model, max_memory={**room, "cpu": 0}, **whole)
    found = infer_auto_device_map(model, max_memory=limits, clean_result=False, **whole)
    places = [
        next(p for name, p in found.items() if f"blocks.{n}".startswith(name))
        for n in range(config.num_layers)
    ]
    if not all(isinstance(place, int) for place in places):
        held = sum(isinstance(place, int) for place in places)
        raise CheckpointError(
            f"--device_map auto: the {len(room)} GPUs have room for {held} of {config.num_layers} layers as "
            f"{dtype}: choose a smaller --precision, or more of them"
        )
    return [torch.device("cuda", place) for place in places]


def by_layer(devices: Sequence[torch.device], prefix: str) -> Callable[[str], torch.device]:
    """Where a published tensor goes: with its layer (its number follows the prefix), else home."""

    def place(name: str) -> torch.device:
        if not name.startswith(prefix):
            return devices[0]
        return devices[int(name[len(prefix) :].split(".")[0])]

    return place
