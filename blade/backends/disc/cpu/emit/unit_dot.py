# SPDX-License-Identifier: Apache-2.0
"""A target's way to multiply operands narrower than 32 bits: bytes (int8_dot.py), bfloat16 (bf16_dot.py)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class UnitDot:
    """Tiles of ``rows`` by ``vectors`` of ``lanes`` columns; ``how`` names the instructions."""

    how: str
    lanes: int
    vectors: int
    rows: int

    @property
    def width(self) -> int:
        """Columns per panel of packed weights."""
        return self.lanes * self.vectors
