"""Tiny random checkpoints of every family, and models loaded from them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from models.family import LoadOptions, home_of
from models.loading import load as load_model
from models.model import Model
from tests.support import published, tiny, tiny_glm_image, tiny_llamagen, tiny_transformers
from training.new_drafter import default_fields, new_drafter, write_drafter

LOAD = LoadOptions()
# Pixels along the side of an image, for the families that support several sizes by target_size.
SIDE = {"lumina_mgpt": 8, "emu3": tiny_transformers.SIZE, "simplear": 64}


def load(
    family: str,
    path: Path | str | None = None,
    drafter: Path | None = None,
    *,
    need_drafter: bool = True,
    precision: str = "fp32",
    options: LoadOptions = LOAD,
) -> Model:
    """Loads a model on the CPU."""
    complete = replace(
        options,
        model_path=path and str(path),
        drafter_path=drafter and str(drafter),
        precision=precision,
        device="cpu",
        need_drafter=need_drafter,
    )
    return load_model(family, complete)


def untrained(family: str, folder: Path) -> Path:
    """Writes a new drafter, from which training starts, beside a target. Returns its folder."""
    options = LoadOptions(target_size=SIDE.get(family))
    model = load(family, folder, need_drafter=False, options=options)
    fields = default_fields(model)
    write_drafter(folder / "drafter", fields, new_drafter(fields, model).state_dict(), model)
    return folder / "drafter"


@dataclass(frozen=True)
class Tiny:
    """A tiny checkpoint on the disk."""

    family: str
    path: Path  # of the target: a folder or a file
    drafter: Path

    def words(self, side: int | None = None) -> list[str]:
        """Returns the options that name the target on a command line. side: pixels along the side of its
        images, by default those of SIDE."""
        side = side or SIDE.get(self.family)
        size = ["--target_size", str(side)] if side else []
        return ["--model", self.family, "--model_path", str(self.path), "--precision", "fp32", *size]

    def copied(self, folder: Path) -> Tiny:
        """Returns a copy of the target, the drafter and the files beside them, which a test may damage."""
        root = self.path.parent
        copy = Path(shutil.copytree(root, folder))
        path, drafter = (copy / part.relative_to(root) for part in (self.path, self.drafter))
        return replace(self, path=path, drafter=drafter)

    def load(self, need_drafter: bool = True, side: int | None = None) -> Model:
        """Returns the model with its drafter."""
        small = 64 if self.family == "glm_image" else None
        options = LoadOptions(target_size=side or SIDE.get(self.family), height=small, width=small)
        drafter = self.drafter if need_drafter else None
        return load(self.family, self.path, drafter, need_drafter=need_drafter, options=options)


def _beside(family: str, build: Callable[[Path], Path], root: Path) -> Tiny:
    """Builds a target whose drafter lies beside it."""
    path = build(root / family)
    return Tiny(family, path, home_of(path) / "drafter")


def _published(family: str, root: Path) -> Tiny:
    return Tiny(family, *published.build(root, lumina=family == "lumina_mgpt"))


def _untrained(family: str, build: Callable[..., Path], root: Path) -> Tiny:
    path = build(root / family, kv_heads=2)
    return Tiny(family, path, untrained(family, path))


BUILD: dict[str, Callable[[Path], Tiny]] = {
    "emoji": partial(_beside, "emoji", tiny.build),
    "anole": partial(_published, "anole"),
    "lumina_mgpt": partial(_published, "lumina_mgpt"),
    "llamagen": partial(_beside, "llamagen", tiny_llamagen.build),
    "llamagen classes": partial(_beside, "llamagen", tiny_llamagen.classes),
    "llamagen file": partial(_beside, "llamagen", tiny_llamagen.lone_file),
    "llamagen2": partial(_beside, "llamagen2", tiny_llamagen.second_stage),
    "janus_pro": partial(_untrained, "janus_pro", tiny_transformers.janus),
    "emu3": partial(_untrained, "emu3", tiny_transformers.emu3),
    "glm_image": partial(_untrained, "glm_image", tiny_glm_image.build),
    "simplear": partial(_untrained, "simplear", tiny_transformers.simplear),
    "liquid": partial(_untrained, "liquid", tiny_transformers.liquid),
}


class Checkpoints:
    """The checkpoints by the names of BUILD. Each is written at its first use; tests must not change them."""

    def __init__(self, root: Path) -> None:
        self._get = cache(lambda name: BUILD[name](root / name.replace(" ", "_")))

    def __getitem__(self, name: str) -> Tiny:
        return self._get(name)
