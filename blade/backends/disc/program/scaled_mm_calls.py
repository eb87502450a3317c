# SPDX-License-Identifier: Apache-2.0
"""The instruction for a ``scaled_linear`` without generated code: ATen's ``_scaled_mm`` (cuBLASLt).

It takes fp8 operands, a scale per row of both, and a bias of the result's dtype.
"""

from typing import TYPE_CHECKING

import torch

from blade.backends.disc.ir.graph import Value
from blade.backends.disc.ir.views import StridedView, row_distance, view_of
from blade.core.dtypes import HALVES
from blade.program.dtypes import DTYPES

if TYPE_CHECKING:
    from blade.backends.disc.program.writer import ProgramWriter

EVEN = 16  # row lengths of both operands must be multiples of this


def is_served(value: Value) -> bool:
    """Whether ``_scaled_mm`` can compute ``value``."""
    x, w, _, bias, *rows = value.args
    row = row_distance(x, len(x.shape) - 1)
    return (
        x.dtype == torch.float8_e4m3fn
        and len(rows) == 1
        and value.attrs["scale"] == 1.0
        and value.dtype in HALVES
        and (bias.op == "fill" or bias.dtype == value.dtype)
        and _is_even(*w.shape, row, *_row_major(w))
    )


def write_scaled_mm(writer: "ProgramWriter", value: Value) -> None:
    """aten::_scaled_mm, with the accumulation of tensor cores."""
    x, w, scales, bias, rows = value.args
    weight, across = view_of(w), view_of(scales)
    assert weight is not None and across is not None, value
    transposed = StridedView(weight.base, weight.strides[::-1], weight.offset)
    columns = StridedView(across.base, (w.shape[0], 1), across.offset)
    words = [
        f"t:{writer.matrix(x, 1)}",
        f"t:{writer.view(transposed, w.shape[::-1])}",
        f"t:{writer.matrix(rows, 1)}",
        f"t:{writer.view(columns, (1, w.shape[0]))}",
        "n" if bias.op == "fill" else f"t:{writer.seen(bias)}",
        "n",
        f"dt:{DTYPES[value.dtype]}",
        "b:1",
        f"t:{writer.matrix(value, 1)}",
    ]
    writer.emit([f"call aten::_scaled_mm.out {len(words)} {' '.join(words)} 0"])


def _row_major(w: Value) -> tuple[object, ...]:
    """The row distance of ``w`` if the elements of its rows are adjacent."""
    view = view_of(w)
    assert view is not None, w
    return view.strides[:1] if view.strides[1] == 1 else (None,)


def _is_even(*sizes: object) -> bool:
    return all(isinstance(n, int) and n % EVEN == 0 for n in sizes)
