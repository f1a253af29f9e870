"""What is published about a model: files to fetch, and the dimensions of its networks. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CKPTS = Path(__file__).resolve().parent.parent / "ckpts"
UNSTATED = "not stated"


@dataclass(frozen=True, slots=True)
class Source:
    """Published files of a model: where they come from, where they belong, how large and under which licence
    they are."""

    part: str  # a few words on what they are
    hub: str  # hub id
    place: str  # folder below ckpts/, where the code of LANTERN and ADT-Tree expects them
    files: tuple[str, ...] = ()  # names or patterns of the files to fetch; (): the whole repository
    choices: tuple[
        str, ...
    ] = ()  # files of which one is enough; the first is fetched unless another is named
    size: str = UNSTATED  # as the hub's pages state it
    licence: str = UNSTATED
    also: str = ""  # what may be taken instead
    space: bool = False  # the hub id is that of a space
    optional: bool = False  # only makes pixels of codes, and is fetched on demand
    form: str = ""  # a page whose form sends the files by mail: they cannot be fetched

    @property
    def folder(self) -> Path:
        return CKPTS / self.place


@dataclass(frozen=True, slots=True)
class Networks:
    """The dimensions of a family's published model, on which memory and speed depend."""

    target: Mapping[str, Any]  # fields of config.json
    vq: Mapping[str, Any]  # those of its vq_config; num_embeddings and embed_dim alone: it has no VQ decoder
    image_tokens: int  # row ends included
    prompt: int  # tokens of a long prompt
    side: int  # pixels
    frames: int = 1  # that the codec decodes for one image
