# SPDX-License-Identifier: Apache-2.0
"""Kernel -> Triton functions, one per class of shapes, and the condition of each.

for each tile of rows:                      a program; loop kernels are also tiled along columns
  statements over the tile                  short rows stay in registers from the loads to the stores
  or for each pass, for each tile of columns    long rows (kernel_schedule.py) are read in each pass
"""

import sympy

from blade.backends.disc.cpu.emit.column_blocks import side_by_side
from blade.backends.disc.gpu.compile.triton_unit import LaunchChoice, condition, named_unit
from blade.backends.disc.gpu.emit import tile_table as shapes
from blade.backends.disc.gpu.emit.kernel_text import KernelVariant, kernel_text
from blade.backends.disc.gpu.emit.pointwise import POINTERS
from blade.backends.disc.gpu.emit.tile_table import KernelTile
from blade.backends.disc.gpu.emit.tiling import (
    Alignment,
    alignment,
    ceil_div,
    known_multiple,
    product,
    streamed,
)
from blade.backends.disc.ir.iteration_space import across, coalesce, number
from blade.backends.disc.ir.kernel import Dim, Kernel, Reduce
from blade.backends.disc.ir.kernel_powers import constant_powers
from blade.backends.disc.target.gpu import GpuTarget
from blade.core.reason import Code
from blade.errors import Refused


def emit(kernel: Kernel, target: GpuTarget) -> tuple[LaunchChoice, ...]:
    """Exclusive, complete choices. Raises ``Refused`` (unsupported_dtype) if code cannot be generated."""
    for arg in kernel.args:
        if arg.dtype not in POINTERS:
            name = str(arg.dtype).removeprefix("torch.")
            raise Refused(Code.UNSUPPORTED_DTYPE, f"The GPU emitter has no {name} buffers.")
    merged = coalesce(constant_powers(kernel))
    return tuple(
        choice(kernel, merged, target, when, variant)
        for when, variant in variants(merged)
        if when not in (False, sympy.false)
    )


def variants(kernel: Kernel) -> list[tuple[sympy.Basic | bool, KernelVariant]]:
    """(condition, code) pairs for a kernel whose dimensions are merged as far as possible."""
    reduces = any(isinstance(s, Reduce) for s in kernel.body)
    if not reduces and not kernel.outer:
        return _flat(kernel)
    if reduces:
        beside = side_by_side(kernel)
        if beside is not None:
            return [(True, _column_sums(kernel, beside))]
        return _rows(kernel)
    beside = across(kernel)
    if beside is not None:
        tile = shapes.transposed(number(kernel.outer[beside]), number(kernel.inner))
        return [(True, KernelVariant(tile, tiled=True, beside=beside))]
    return _points(kernel)


def _flat(kernel: Kernel) -> list[tuple[sympy.Basic | bool, KernelVariant]]:
    length = number(kernel.inner)
    masked = known_multiple(kernel, kernel.inner, 16) or (
        length is not None and length <= shapes.FLAT.columns
    )
    larger = shapes.grown_flat(streamed(kernel))
    return [
        (when, KernelVariant(tile, tiled=True, guarded=not masked))
        for when, tile in _by_size(
            shapes.FLAT, larger, kernel.inner, shapes.FEW * shapes.FLAT.columns
        )
    ]


def _points(kernel: Kernel) -> list[tuple[sympy.Basic | bool, KernelVariant]]:
    length, rows = number(kernel.inner), product(kernel.outer)
    tile = shapes.pointwise(length, number(rows))
    larger = shapes.grown(tile, min(length or tile.columns, tile.columns), streamed(kernel))
    even = alignment(kernel)
    return [
        (sympy.And(when, size), KernelVariant(one, tiled=True, even=known))
        for when, known in _by_alignment(even)
        for size, one in _by_size(tile, larger, rows * kernel.inner, shapes.FEW * tile.elements)
    ]


def _by_size(
    tile: KernelTile, larger: KernelTile, count: Dim, most: int
) -> list[tuple[sympy.Basic, KernelTile]]:
    """``tile`` if ``count`` is at most ``most``, else ``larger``."""
    few = sympy.Le(count, most)
    if larger == tile or few == sympy.true:
        return [(sympy.true, tile)]
    return [(sympy.true, larger)] if few == sympy.false else [(few, tile), (~few, larger)]


def _by_alignment(even: Alignment) -> list[tuple[sympy.Basic, Alignment | None]]:
    if even.open is None:
        return [(sympy.true, None)]
    if not even.open:
        return [(sympy.true, even)]
    return [(even.holds, even), (sympy.Not(even.holds), None)]


def _column_sums(kernel: Kernel, beside: int) -> KernelVariant:
    length, rows = number(kernel.inner), number(kernel.outer[beside])
    tile = shapes.column_sums(rows, length, pieces=len(kernel.outer) > 1)
    return KernelVariant(tile, walked=length is None or length > tile.columns, beside=beside)


def _rows(kernel: Kernel) -> list[tuple[sympy.Basic | bool, KernelVariant]]:
    """Whole rows in registers, by classes of their length; longer rows are walked."""
    length, rows = number(kernel.inner), product(kernel.outer)
    count = number(rows)
    if count == 1 and length is None:  # one program: the way it reads its row does not matter
        return [(True, KernelVariant(shapes.walked(False), walked=True))]
    found: list[tuple[sympy.Basic | bool, KernelVariant]] = []
    for aligned, even in _by_alignment(alignment(kernel)):
        walked = KernelVariant(shapes.walked(even is not None), walked=True, even=even)
        elements = 1 if even is None else even.elements
        if length is not None and length > shapes.LONGEST:
            found.append((aligned, walked))
        elif length is not None:
            tile = shapes.persistent(length, count, elements)
            larger = shapes.grown_rows(tile, length, streamed(kernel), elements)
            for size, one in _by_size(tile, larger, rows, shapes.FEW_ROWS * tile.rows):
                found.append((sympy.And(aligned, size), KernelVariant(one, even=even)))
        else:
            low: int | None = None
            for high in shapes.CLASSES if even is not None else shapes.UNALIGNED_CLASSES:
                variant = KernelVariant(shapes.up_to(high, count, elements), even=even)
                found.append((sympy.And(aligned, *_between(kernel.inner, low, high)), variant))
                low = high
            found.append((sympy.And(aligned, *_between(kernel.inner, low, None)), walked))
    return found


def _between(dim: Dim, low: int | None, high: int | None) -> list[sympy.Basic]:
    above = [] if low is None else [sympy.Gt(dim, low)]
    return above if high is None else [*above, sympy.Le(dim, high)]


def choice(
    kernel: Kernel,
    merged: Kernel,
    target: GpuTarget,
    when: sympy.Basic | bool,
    variant: KernelVariant,
) -> LaunchChoice:
    """``kernel``, in its ``merged`` form, computed by ``variant``."""
    sizes, early = kernel.sizes(), target.starts_early
    text = kernel_text(merged, sizes, variant, early)
    pointers = tuple((f"p{k}", POINTERS[arg.dtype]) for k, arg in enumerate(kernel.args))
    ints = tuple((f"n{k}", "i64") for k in range(len(sizes)))
    unit = named_unit(
        "row" if any(isinstance(s, Reduce) for s in kernel.body) else "loop",
        text,
        pointers + ints,
        aligned=tuple(name for name, _ in pointers),
        warps=variant.tile.warps,
        early=early,
    )
    return LaunchChoice(condition(when), unit, (grid(merged, variant), 1, 1))


def grid(kernel: Kernel, variant: KernelVariant) -> Dim:
    """The number of programs."""
    tile, beside = variant.tile, variant.beside
    rows: Dim = (
        ceil_div(product(kernel.outer), tile.rows)
        if beside is None
        else ceil_div(kernel.outer[beside], tile.rows)
        * product([d for k, d in enumerate(kernel.outer) if k != beside])
    )
    return rows * ceil_div(kernel.inner, tile.columns) if variant.tiled else rows
