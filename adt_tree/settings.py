"""The settings of a method that are no trees: those of the distribution that is sampled, and of LANTERN."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from adt_tree.errors import UserError, integer, real, store


@dataclass(frozen=True, slots=True)
class Sampling:
    """The settings of the distribution. Temperature 0 is greedy decoding; top_k 0, top_p 1 and guidance 1
    each switch their step off. UserError for a number out of range."""

    temperature: float = 1.0  # 0 to 100
    top_k: int = 0
    top_p: float = 1.0
    guidance: float = 3.0  # 0 to 100
    top_p_first: bool = False  # true: top-p before top-k, as in the released EAGLE code

    def __post_init__(self) -> None:
        numbers = {
            "temperature": real("temperature", self.temperature, most=100),
            "top_k": integer("top_k", self.top_k),
            "top_p": real("top_p", self.top_p, most=1, above=0),
            "guidance": real("guidance", self.guidance, most=100),
        }
        store(self, numbers)

    @property
    def greedy(self) -> bool:
        """True if the argmax is taken: up to a temperature of 1e-5, as in the published code."""
        return self.temperature <= 1e-5

    @property
    def row(self) -> tuple[float, float, float, bool]:
        """The row of an image in PassSampling.numbers."""
        if self.greedy:  # a temperature of 1 leaves the logits as they are
            return 1.0, self.guidance, math.inf, True
        return self.temperature, self.guidance, self.top_p if self.top_p < 1 else math.inf, False

    @property
    def branches(self) -> int:
        """Rows per image in a pass: 2 under classifier-free guidance, else 1."""
        return 1 if self.guidance == 1 else 2


@dataclass(frozen=True, slots=True)
class Lantern:
    """Relaxed acceptance (LANTERN, 2410.03355): a code borrows the probability of its neighbours."""

    delta: float = 0.1  # up to 1: bound on the borrowed mass; above 1: LANTERN++'s factor (2502.06352)
    k: int | None = None  # number of neighbours; None: max_k, or an eighth of the codebook if that is less
    max_k: int = 1000
    table: str | None = None  # file or folder of the nearest codes; None: beside the model, or computed

    def __post_init__(self) -> None:
        values = {
            "delta": real("lantern.delta", self.delta, most=1e6),
            "k": None if self.k is None else integer("lantern.k", self.k),
            "max_k": integer("lantern.max_k", self.max_k),
            "table": None if self.table is None else os.fspath(self.table),
        }
        store(self, values)

    def neighbours(self, num_codes: int) -> int:
        """Returns k for a codebook of that size. UserError if the codebook has too few codes for k."""
        if self.k is None:
            return min(self.max_k, num_codes // 8)
        if self.k > num_codes - 2:
            raise UserError(
                f"lantern.k {self.k}: the codebook has {num_codes} codes; give at most {num_codes - 2}"
            )
        return self.k
