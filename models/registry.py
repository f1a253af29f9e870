"""The families there are: a new one is its file and a line here. No torch."""

from __future__ import annotations

from models.anole import ANOLE, EMOJI_SPEC
from models.emu3 import EMU3
from models.errors import CheckpointError
from models.janus_pro import JANUS_PRO
from models.llamagen import LLAMAGEN, LLAMAGEN2
from models.lumina_mgpt import LUMINA_MGPT
from models.spec import ModelSpec

SPECS: dict[str, ModelSpec] = {
    spec.name: spec for spec in (EMOJI_SPEC, ANOLE, LUMINA_MGPT, LLAMAGEN, LLAMAGEN2, JANUS_PRO, EMU3)
}
EMOJI = EMOJI_SPEC.target_folder


def spec_of(name: str) -> ModelSpec:
    """The family of that name. CheckpointError if there is none."""
    if name not in SPECS:
        raise CheckpointError(f"there is no model {name}: choose one of {', '.join(SPECS)}")
    return SPECS[name]
