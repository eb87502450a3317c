# SPDX-License-Identifier: Apache-2.0
"""A target's way to multiply operands narrower than 32 bits: bytes (int8_dot.py), bfloat16 (bf16_dot.py).

A *unit* are the elements that share 32 bits.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from blade.backends.disc.cpu.emit.mlir_builder import MlirBuilder, SsaValue


@dataclass(frozen=True)
class UnitDot(ABC):
    """Tiles of ``rows`` by ``vectors`` of ``lanes`` columns; ``how`` names the instructions.

    ``tile_product``: the instruction that multiplies matrix tiles, "" without one (matrix_tiles.py). ``step``: units
    that they multiply at a time.
    """

    how: str
    lanes: int
    vectors: int
    rows: int
    tile_product: str = ""
    step: int = 16

    @property
    def name(self) -> str:
        """A part of kernels' names."""
        tiles = "_tiles" * bool(self.tile_product) + f"_by{self.step}" * (self.step != 16)
        return f"{self.how}{self.lanes}x{self.vectors}" + tiles

    @property
    def width(self) -> int:
        """Columns per panel of packed weights."""
        return self.lanes * self.vectors

    @abstractmethod
    def nothing(self, code: MlirBuilder) -> SsaValue:
        """A vector of empty sums."""

    @abstractmethod
    def spread(self, code: MlirBuilder, unit: SsaValue) -> tuple[SsaValue, ...]:
        """A unit of ``a`` (an i32) broadcast to every lane, in the form that ``add`` takes."""

    @abstractmethod
    def widened(self, code: MlirBuilder, units: SsaValue) -> tuple[SsaValue, ...]:
        """A unit of ``b`` in every lane (a vector of i32), in the form that ``add`` takes."""

    @abstractmethod
    def add(
        self, code: MlirBuilder, acc: SsaValue, a: tuple[SsaValue, ...], b: tuple[SsaValue, ...]
    ) -> SsaValue:
        """``acc`` plus the products of ``a`` and ``b``."""
