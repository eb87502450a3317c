# SPDX-License-Identifier: Apache-2.0
"""What the drivers of convolutions share whose micro-kernels multiply units of 32 bits (int8_conv.py, bf16_conv.py).

text = driver_text(name, kernels, driver, target, element_bytes)
with units_of_blocks(f, p, size, make_table, units) as (unit, r0, rows): ...
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from blade.backends.disc.cpu.conv import pixel_pointers
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirRoutine
from blade.backends.disc.cpu.gemm.driver import MicroKernels
from blade.backends.disc.target.cpu import CpuTarget


def driver_text(
    name: str,
    kernels: MicroKernels,
    driver: Callable[[MicroKernels, MlirRoutine], MlirRoutine],
    target: CpuTarget,
    element_bytes: int,
) -> str:
    """MLIR of a ``driver``, its micro-kernels, and what makes its table of pointers."""
    rows = f"{name}_rows"
    made = driver(kernels, pixel_pointers.signature(rows))
    table = pixel_pointers.narrow_pixel_pointers_text(rows, target, element_bytes)
    return "\n".join([*(k.text() for k in kernels.functions), table, made.text(False)]) + "\n"


@contextmanager
def units_of_blocks(
    f: MlirRoutine,
    p: Mapping[str, SsaValue],
    size: Mapping[str, SsaValue],
    make_table: MlirRoutine,
    units: SsaValue,
) -> Iterator[tuple[SsaValue, SsaValue, SsaValue]]:
    """Loop over the ``units`` of each block of rows between ``begin`` and ``end``: a unit, the block's first row, and
    its rows. The block's table of pointers is made before."""
    with f.range(f.over(f["begin"], units), f.above(f["end"], units)) as block:
        r0 = f.product(block, size["block"])
        rows = f.minus(f.least(f.sum(r0, size["block"]), size["m"]), r0)
        known = {n: p[n] for n in ("x", "zeros", "scratch")}
        f.run(make_table, **known, ints=f["ints"], first=r0, count=rows)
        base = f.product(block, units)
        low = f.most(f.minus(f["begin"], base), 0)
        high = f.least(f.minus(f["end"], base), units)
        with f.range(low, high) as unit:
            yield unit, r0, rows


def tile_at(
    f: MlirRoutine,
    p: Mapping[str, SsaValue],
    elements: Mapping[str, str],
    given: Mapping[str, SsaValue],
    table: SsaValue,
    corner: SsaValue,
    distance: SsaValue,
    row: SsaValue,
) -> dict[str, SsaValue]:
    """A tile's arguments. ``elements``: pointers that are laid out as the result, with their element types;
    ``corner``: the panel's first element in it; ``row`` counts from there."""
    at = f.sum(corner, f.product(row, distance))
    moved = {name: f.at(p[name], at, element) for name, element in elements.items()}
    return {**given, **moved, "table": f.at(table, row, POINTER)}
