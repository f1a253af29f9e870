"""The roles that decoding several rows at once asks for beyond those of adt_tree.roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from adt_tree.policy import TreeShape
from adt_tree.roles import Proposer, Scored, Target
from adt_tree.verify import Rule
from lab.rows.schedule import Schedule


class RowTarget(Target, Protocol):
    """A target whose cache can be addressed by position."""

    def score(self, codes: Tensor, depths: Tensor, ancestors: Tensor, committed: tuple[int, ...]) -> Scored:
        """Scores nodes with codes and positions (depths) [B, N]. They attend to the prompt and, by ancestors
        [B, N, P + N], to the P entries behind it and to one another; their own entries follow these."""

    def move(self, source: Tensor, place: Tensor) -> None:
        """Copies entry source [B, E] behind the prompt to entry place [B, E] behind it."""


class RowProposer(Proposer, Protocol):
    """A proposer with a slot for every head. A slot drafts cells of one row after the other."""

    def begin(self, slot: int, position: int) -> None:
        """Forgets the slot's drafts. Its next cell is that at `position`."""

    def know(self, codes: Tensor) -> None:
        """Takes over the committed codes [slots, P + 1] of the images, from which cells may be copied."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of the images in flight. Head a of the image in slot b is slot b * schedule.heads + a of the
    proposer and the rule."""

    schedule: Schedule
    shape: TreeShape  # the largest tree of a head
    proposer: RowProposer | None  # None: no drafts
    rule: Rule
