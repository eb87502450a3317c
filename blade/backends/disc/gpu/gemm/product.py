# SPDX-License-Identifier: Apache-2.0
"""Products with weights on a GPU: a product of the IR and the pointwise group after it, as one kernel.

product = product_of(linear, plain_epilogue(linear))
launch(product, GemmTile(32, 32, 128, split=4, warps=4, stages=4), when)
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.gpu.compile.triton_unit import LaunchChoice, named_unit
from blade.backends.disc.gpu.emit.library_launch import LibraryLaunch, pointer, starts_aligned
from blade.backends.disc.gpu.emit.specialize_sizes import specialize_sizes
from blade.backends.disc.gpu.emit.tile_table import power
from blade.backends.disc.gpu.gemm.conv_as_gemm import (
    ConvWindow,
    columns_of,
    is_served,
    window_of,
)
from blade.backends.disc.gpu.gemm.depthwise import depthwise_text, depthwise_window
from blade.backends.disc.gpu.gemm.epilogue import GemmEpilogue, epilogue_text
from blade.backends.disc.gpu.gemm.scales import TOTAL, Scales, scales_of
from blade.backends.disc.gpu.gemm.template import GemmForm, gemm_text
from blade.backends.disc.ir.graph import Value, numel, plain
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.ir.views import row_distance, view_of
from blade.backends.disc.program.instructions import Counters, ScratchBuffer
from blade.backends.disc.program.scaled_mm_calls import is_served as is_atens
from blade.core.dtypes import HALVES

DTYPES = (*HALVES, torch.float32)
LINE_BYTES = 128
MOST_LINES = 32  # cache lines prefetched per row of weights, at most
LEAST_DEPTH = 32  # must divide the channels of a convolution
GROUP = 8  # rows of blocks that run together
DEPTH_SIZES = ("K", "X_ROW", "W_N")  # what follows from a depth, of a convolution of pixels


@dataclass(frozen=True)
class GemmTile:
    """A block of the result, m x n, k of the depth at a time; ``split`` programs share the depth."""

    m: int
    n: int
    k: int
    split: int = 1
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True)
class GemmProduct:
    """x [rows, depth] @ w [columns, depth].T and then ``epilogue``."""

    x: Value
    w: Value
    rows: Dim
    columns: int
    depth: int
    epilogue: GemmEpilogue
    biased: bool  # has a bias operand, which ATen's product also adds
    scales: Scales | None = None  # of 8-bit operands
    by_aten: bool = True  # ATen has this product
    conv: Value | None = None  # the convolution that this product computes on the images ``x``
    window: ConvWindow | None = None  # the window of rows in ``x``; None: rows are contiguous
    depthwise: bool = False  # each column has a window of its own channel of ``x``
    any_depth: bool = False  # the depth is passed, so that products of any depth share code

    @property
    def row(self) -> Dim:
        """The row stride of ``x``."""
        return row_distance(self.x, len(self.x.shape) - 1)

    @property
    def step(self) -> Dim:
        """The distance of adjacent elements of a row of ``x``: 1 unless it is a transposed matrix."""
        view = view_of(self.x)
        assert view is not None, self.x
        return 1 if self.x.shape[-1] == 1 else view.strides[-1]

    @property
    def weight_strides(self) -> tuple[Dim, ...]:
        if self.conv is not None:
            found = columns_of(self.conv)
            assert found is not None, self.conv
            return found
        view = view_of(self.w)
        assert view is not None, self.w
        return view.strides

    @cached_property
    def key(self) -> str:
        """Equal for products with equal kernels, such as those of a model's layers."""
        sizes = (self.rows, self.columns, self.depth, self.row, self.step, self.weight_strides)
        conv = None if self.conv is None else (self.x.shape, self.conv.attrs, self.window)
        scales = None if self.scales is None else self.scales.key
        return repr(
            (
                *(self.x.dtype, *sizes, conv, scales),
                *(self.epilogue.kernel, self.epilogue.product, self.any_depth),
            )
        )


def product_of(value: Value, epilogue: GemmEpilogue) -> GemmProduct | None:
    """``value`` (``linear``, ``scaled_linear`` or ``conv``) followed by ``epilogue``; ``None``: no kernel."""
    if value.op == "conv":
        return _convolution(value, epilogue)
    if value.op == "scaled_linear":
        return _scaled(value, epilogue)
    x, w = value.args[:2]
    columns, depth = w.shape
    rows = numel(x.shape[:-1])
    if not (isinstance(columns, int) and isinstance(depth, int)) or 0 in (rows, columns, depth):
        return None
    if value.dtype not in DTYPES or any(a.dtype != value.dtype for a in value.args[:2]):
        return None
    view = view_of(w)
    if view is None or not all(isinstance(s, int) for s in view.strides):
        return None
    return GemmProduct(x, w, rows, columns, depth, epilogue, len(value.args) == 3)


def _scaled(value: Value, epilogue: GemmEpilogue) -> GemmProduct:
    x, w = value.args[:2]
    columns, depth = (int(d) for d in w.shape)
    rows = numel(x.shape[:-1])
    scales, by_aten = scales_of(value), is_atens(value)
    return GemmProduct(x, w, rows, columns, depth, epilogue, False, scales, by_aten)


def _convolution(value: Value, epilogue: GemmEpilogue) -> GemmProduct | None:
    """A convolution of halves; for float32, cuDNN is faster than exact products on tensor cores (3 steps).

    Depthwise ones are of any float.
    """
    if (own := depthwise_window(value)) is not None:
        (x, w), depth = value.args, prod(own.kernel)
        rows, columns = numel(value.shape[:-1]), int(w.shape[0])
        made = GemmProduct(x, w, rows, columns, depth, epilogue, False, conv=value, window=own)
        return replace(made, depthwise=True)
    if value.dtype not in HALVES or not is_served(value):
        return None
    x, w = value.args
    out, channels, *taps = (int(d) for d in w.shape)
    if {x.dtype, w.dtype} != {value.dtype} or channels % LEAST_DEPTH or out % 8:
        return None
    rows, window = numel(value.shape[:-1]), window_of(value)
    depth = channels * prod(taps)
    return GemmProduct(x, w, rows, out, depth, epilogue, False, conv=value, window=window)


def launch(
    product: GemmProduct,
    tile: GemmTile,
    when: sympy.Basic | None,
    counters: Counters,
    facts: SizeRelations,
    early: bool = False,
) -> LibraryLaunch:
    """``product`` in blocks of ``tile`` where ``when`` holds. ``counters``: the program's, for the blocks.

    ``early``: the launch may start before the previous one has ended.
    """
    x, w = product.x, product.w
    row, step = product.weight_strides
    sizes = {f"n{k}": size for k, size in enumerate(product.epilogue.kernel.sizes())}
    numbers = specialize_sizes(
        {
            "M": product.rows,
            "N": product.columns,
            "K": product.depth,
            **_x_strides(product),
            "W_N": row,
            "W_K": step,
            **sizes,
        },
        facts,
        DEPTH_SIZES if product.any_depth else (),
    )
    blocks = plain(_ceil(product.rows, tile.m) * _ceil(product.columns, tile.n))
    read = (x, w) if product.scales is None else (x, w, *product.scales.operands)
    operands: tuple[Value | ScratchBuffer | Counters, ...] = (*read, *product.epilogue.operands)
    scales = [] if product.scales is None else product.scales.names
    names = ["x", "w", *scales, *product.epilogue.pointers]
    if tile.split > 1:
        partial = plain(sympy.sympify(blocks) * (tile.split * tile.m * tile.n))
        sums = torch.int32 if x.dtype == torch.int8 else torch.float32
        operands += (ScratchBuffer(sums, partial), counters)
        names += ["partial", "counters"]
    pointers = tuple((n, pointer(o)) for n, o in zip(names, operands, strict=True))
    aligned = [
        n
        for k, (n, o) in enumerate(zip(names, operands, strict=True))
        if k >= len(read) or _aligned(o, facts)
    ]
    constants = {
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "EVEN_N": product.columns % tile.n == 0,
        **({} if product.depthwise else _depth_constants(product, tile)),
        **({} if product.window is None else product.window.constants),
    }
    even, indent = product.columns % tile.n == 0, 8 if tile.split > 1 else 4
    given = "acc" if product.scales is None else TOTAL
    lines = epilogue_text(product.epilogue, tile.m, tile.n, even, indent, given)
    if product.scales is not None:
        lines = product.scales.text(indent) + lines
    unit = named_unit(
        "linear",
        _text(product, [*names, *numbers.names], lines, tile, early),
        (*pointers, *numbers.signature),
        (*numbers.constants, *constants.items()),
        (*aligned, *numbers.aligned),
        tile.warps,
        tile.stages,
        early,
    )
    grid = (blocks, tile.split, 1)
    return LibraryLaunch(LaunchChoice(when, unit, grid), operands, numbers.values)


def _x_strides(product: GemmProduct) -> dict[str, Dim]:
    if product.window is not None:
        return product.window.numbers
    return {"X_ROW": product.row, "X_K": product.step}


def _text(product: GemmProduct, names: list[str], lines: str, tile: GemmTile, early: bool) -> str:
    window = product.window
    if window is not None and product.depthwise:
        return depthwise_text(names, lines, tile, window, early)
    if window is not None:
        whole = tile.k * tile.split
        assert window.channels % tile.k == 0 and product.depth % whole == 0, (product.key, tile)
        names = [*names, *(f"{name}: tl.constexpr" for name in window.constants)]
    form = GemmForm(
        split=tile.split > 1,
        early=early,
        windowed=window is not None,
        integers=product.x.dtype == torch.int8,
        any_depth=product.any_depth,
    )
    return gemm_text(names, lines, form)


def _depth_constants(product: GemmProduct, tile: GemmTile) -> dict[str, object]:
    """What a program needs to walk the depth."""
    return {
        "BLOCK_K": tile.k,
        "GROUP": GROUP,
        "SPLIT": tile.split,
        "EVEN_K": product.depth % (tile.k * tile.split) == 0,
        **_lines(product, tile),
        "PRECISION": "tf32x3" if product.x.dtype == torch.float32 else "tf32",
    }


def _lines(product: GemmProduct, tile: GemmTile) -> dict[str, int]:
    """Cache lines of a program's weights: elements per line, and lines prefetched at once."""
    line = LINE_BYTES // product.w.dtype.itemsize
    share = -(-product.depth // (tile.k * tile.split)) * tile.k
    lines = MOST_LINES // 4 if product.any_depth else min(MOST_LINES, power(-(-share // line)))
    return {"LINE": line, "LINES": lines}


def _aligned(operand: Value | ScratchBuffer | Counters, facts: SizeRelations) -> bool:
    return not isinstance(operand, Value) or starts_aligned(operand, facts)


def _ceil(dim: Dim, by: int) -> sympy.Expr:
    return FloorDiv(sympy.sympify(dim) + (by - 1), by)
