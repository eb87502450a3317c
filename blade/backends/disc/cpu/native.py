# SPDX-License-Identifier: Apache-2.0
"""Which library instructions run as code we generate, and how: one function per op of the IR.

native(value, target) -> Native(call, code) | None: then ATen serves it
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.cpu import gemm
from blade.backends.disc.cpu.micro_kernel import panel_width
from blade.backends.disc.cpu.target import Target
from blade.backends.disc.ir import Value, numel, plain
from blade.backends.disc.legalize import is_packed
from blade.backends.disc.program import NativeCall, Packed
from blade.backends.disc.views import row_distance, view_of


@dataclass(frozen=True)
class Native:
    """``call`` and the functions it needs, its packing included: (name, MLIR)."""

    call: NativeCall
    code: tuple[tuple[str, str], ...]


def native(value: Value, target: Target) -> Native | None:
    """How ``value`` runs natively on ``target``, or ``None``."""
    rule = _RULES.get(value.op)
    return None if rule is None else rule(value, target)


def _linear(value: Value, target: Target) -> Native | None:
    """A product with constant weights, packed once per loaded engine."""
    if not is_packed(value):
        return None
    x, weight = value.args[:2]
    columns, depth = weight.shape
    view = view_of(weight)
    assert view is not None and isinstance(columns, int) and isinstance(depth, int), value
    constant, width = view.base.attrs["index"], panel_width(target)
    panels = gemm.panels(columns, target)
    sizes = (columns, depth, *(int(s) for s in view.strides))
    packed = Packed(gemm.PACK, constant, panels * width * depth, panels, sizes)
    # without a bias: as many zeros, which nothing is written into
    bias = value.args[2] if len(value.args) == 3 else Packed(gemm.PACK, constant, columns, 0, sizes)
    rows = numel(x.shape[:-1])
    blocks = FloorDiv(sympy.sympify(rows) + gemm.BLOCK_ROWS - 1, gemm.BLOCK_ROWS)
    call = NativeCall(
        gemm.NAME,
        plain(sympy.sympify(blocks) * panels),
        plain(sympy.Min(rows, gemm.BLOCK_ROWS) * depth * 2),
        0,
        (x, packed, bias, value),
        (rows, columns, depth, row_distance(x, len(x.shape) - 1), columns),
    )
    return Native(call, ((gemm.NAME, gemm.gemm_text(target)), (gemm.PACK, gemm.pack_text(target))))


_RULES: Mapping[str, Callable[[Value, Target], Native | None]] = {"linear": _linear}
