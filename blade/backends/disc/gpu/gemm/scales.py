# SPDX-License-Identifier: Apache-2.0
"""The scales of a ``scaled_linear``, which its kernel applies to the sums before the epilogue.

total = acc.to(tl.float32) * (tl.load(x_scale + near)[:, None] * tl.load(w_scale + beside)[None, :])
total += tl.load(bias + beside).to(tl.float32)[None, :]
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from blade.backends.disc.ir.graph import Value
from blade.backends.disc.ir.views import view_of

TOTAL = "total"
"""The name that the lines define, [BLOCK_M, BLOCK_N] in float32."""


@dataclass(frozen=True)
class Scales:
    """``columns`` [N] of the weights; ``rows`` [.., 1] of the activation, or one ``number`` for all rows;
    ``bias`` [N] or ``None``. All are float32 and row-major."""

    columns: Value
    rows: Value | None
    number: float
    bias: Value | None

    @property
    def operands(self) -> tuple[Value, ...]:
        return tuple(v for v in (self.columns, self.rows, self.bias) if v is not None)

    @property
    def names(self) -> list[str]:
        """The operands' names in the text."""
        named = (("w_scale", self.columns), ("x_scale", self.rows), ("bias", self.bias))
        return [name for name, v in named if v is not None]

    @cached_property
    def key(self) -> str:
        """Equal for products with equal kernels."""
        bias = None if self.bias is None else self.bias.dtype
        return repr((self.rows is None, self.number, bias))

    def text(self, indent: int) -> str:
        """The lines, which read ``acc``, ``near`` and ``beside`` (template.py)."""
        scale = "tl.load(w_scale + beside)[None, :]"
        if self.rows is not None:
            scale = f"(tl.load(x_scale + near)[:, None] * {scale})"
        elif self.number != 1.0:
            scale = f"({scale} * {self.number!r})"
        lines = [f"{TOTAL} = acc.to(tl.float32) * {scale}"]
        if self.bias is not None:
            lines.append(f"{TOTAL} += tl.load(bias + beside).to(tl.float32)[None, :]")
        return "".join(f"{' ' * indent}{line}\n" for line in lines)


def scales_of(value: Value) -> Scales:
    """The scales of a ``scaled_linear`` whose operands are in memory (legalize.addressable)."""
    columns, bias, *rows = value.args[2:]
    assert view_of(columns) is not None and columns.dtype == torch.float32, value
    given = None if bias.op == "fill" else bias
    return Scales(columns, rows[0] if rows else None, float(value.attrs["scale"]), given)
