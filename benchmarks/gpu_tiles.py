# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of generated GPU kernels, measured: what blade/backends/disc/gpu/emit/tile_table.py should say.

    python benchmarks/gpu_tiles.py [--kernels chain,layer_norm] [--json FILE]

Each kernel at an inference shape and at one of 64 MB and more, with every tile; microseconds in a CUDA graph and,
where more than the cache is moved, the share of a device copy's speed. Needs a GPU and Triton.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from blade.backends.disc.gpu.compile.cubin import compile_unit
from blade.backends.disc.gpu.compile.triton_unit import LaunchChoice
from blade.backends.disc.gpu.emit import kernel as emit
from blade.backends.disc.gpu.emit.kernel_text import KernelVariant
from blade.backends.disc.gpu.emit.tile_table import KernelTile
from blade.backends.disc.ir.iteration_space import coalesce
from blade.backends.disc.ir.kernel import (
    Access,
    Arg,
    Compute,
    Const,
    Kernel,
    Load,
    Reduce,
    Size,
    Stmt,
    Store,
)
from blade.backends.disc.ir.kernel_powers import constant_powers
from blade.backends.disc.target.gpu import GpuTarget, target_of

HALF, FLOAT = torch.float16, torch.float32
COPIES_BYTES = 256 << 20  # buffers in turn, so that the cache holds none of them


def chain(rows: int, columns: int, dtype: torch.dtype) -> Kernel:
    """gelu(x * y + 1)"""
    body: tuple[Stmt, ...] = (
        Load(Access(0, (1,)), dtype),
        Load(Access(1, (1,)), dtype),
        Const(1.0, dtype),
        Compute("fma", (0, 1, 2), dtype),
        Const(0.7071067811865476, dtype),
        Compute("mul", (3, 4), dtype),
        Compute("erf", (5,), dtype),
        Compute("add", (6, 2), dtype),
        Compute("mul", (7, 3), dtype),
        Store(Access(2, (1,)), 8),
    )
    return Kernel((), rows * columns, _args([dtype] * 2, dtype), body)


def bias_gelu(rows: int, columns: int, dtype: torch.dtype) -> Kernel:
    body: tuple[Stmt, ...] = (
        Load(Access(0, (columns, 1)), dtype),
        Load(Access(1, (0, 1)), dtype),
        Compute("add", (0, 1), dtype),
        Const(0.7071067811865476, dtype),
        Compute("mul", (2, 3), dtype),
        Compute("erf", (4,), dtype),
        Const(1.0, dtype),
        Compute("add", (5, 6), dtype),
        Compute("mul", (7, 2), dtype),
        Store(Access(2, (columns, 1)), 8),
    )
    return Kernel((rows,), columns, _args([dtype] * 2, dtype), body)


def layer_norm(rows: int, columns: int, dtype: torch.dtype) -> Kernel:
    """Of x + bias + residual, as BERT has it: in float32, rounded at the end."""
    at = (columns, 1)
    body: list[Stmt] = [
        Load(Access(0, at), dtype),
        Load(Access(1, at), dtype),
        Load(Access(2, (0, 1)), dtype),
        Compute("add", (0, 1), dtype),
        Compute("add", (3, 2), dtype),
        Compute("cast", (4,), FLOAT),
        Size(columns, FLOAT),
        Reduce("sum", 5, FLOAT),
        Compute("div", (7, 6), FLOAT),
        Compute("sub", (5, 8), FLOAT),
        Compute("mul", (9, 9), FLOAT),
        Reduce("sum", 10, FLOAT),
        Compute("div", (11, 6), FLOAT),
        Const(1e-5, FLOAT),
        Compute("add", (12, 13), FLOAT),
        Compute("rsqrt", (14,), FLOAT),
        Compute("mul", (9, 15), FLOAT),
        Load(Access(3, (0, 1)), dtype),
        Load(Access(4, (0, 1)), dtype),
        Compute("cast", (17,), FLOAT),
        Compute("cast", (18,), FLOAT),
        Compute("fma", (16, 19, 20), FLOAT),
        Compute("cast", (21,), dtype),
        Store(Access(5, at), 22),
    ]
    return Kernel((rows,), columns, _args([dtype] * 5, dtype), tuple(body))


def softmax(rows: int, columns: int, dtype: torch.dtype) -> Kernel:
    body: tuple[Stmt, ...] = (
        Load(Access(0, (columns, 1)), dtype),
        Compute("cast", (0,), FLOAT),
        Reduce("max", 1, FLOAT),
        Compute("sub", (1, 2), FLOAT),
        Compute("exp", (3,), FLOAT),
        Reduce("sum", 4, FLOAT),
        Compute("div", (4, 5), FLOAT),
        Compute("cast", (6,), dtype),
        Store(Access(1, (columns, 1)), 7),
    )
    return Kernel((rows,), columns, _args([dtype], dtype), body)


def column_sum(rows: int, columns: int, dtype: torch.dtype) -> Kernel:
    """Of ``rows`` rows: a bias's gradient."""
    body: tuple[Stmt, ...] = (
        Load(Access(0, (1, columns)), dtype),
        Compute("cast", (0,), FLOAT),
        Reduce("sum", 1, FLOAT),
        Compute("cast", (2,), dtype),
        Store(Access(1, (1, 0)), 3),
    )
    return Kernel((columns,), rows, _args([dtype], dtype), body)


def transpose(rows: int, columns: int, dtype: torch.dtype) -> Kernel:
    body: tuple[Stmt, ...] = (Load(Access(0, (1, rows)), dtype), Store(Access(1, (columns, 1)), 0))
    return Kernel((rows,), columns, _args([dtype], dtype), body)


def _args(read: list[torch.dtype], written: torch.dtype) -> tuple[Arg, ...]:
    return (*(Arg(d, False) for d in read), Arg(written, True))


@dataclass(frozen=True)
class Case:
    make: Callable[[int, int, torch.dtype], Kernel]
    shapes: tuple[tuple[int, int], ...]
    tiles: Callable[[int], Iterator[KernelTile]]


def flat(_: int) -> Iterator[KernelTile]:
    for columns, warps in itertools.product((256, 512, 1024, 2048, 4096), (2, 4, 8)):
        if 2 <= columns // (32 * warps) <= 32:
            yield KernelTile(1, columns, warps)


def points(columns: int) -> Iterator[KernelTile]:
    for wide, elements, warps in itertools.product(
        (128, 256, 512, 1024), (512, 1024, 2048), (2, 4, 8)
    ):
        if wide <= elements and columns % wide == 0 and 2 <= elements // (32 * warps) <= 32:
            yield KernelTile(elements // wide, wide, warps)


def whole_rows(columns: int) -> Iterator[KernelTile]:
    power = 1 << (columns - 1).bit_length()
    for rows, warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16)):
        if 4 <= rows * power // (32 * warps) <= 64:
            yield KernelTile(rows, power, warps)
    for piece, warps, each in itertools.product((128, 256), (2, 4, 8), (1, 2)):
        pieces = -(-columns // piece)
        if 2 <= pieces <= 8:  # a warp has rows of its own
            yield KernelTile(warps * 256 // piece * each, piece, warps, pieces)


def sums(_: int) -> Iterator[KernelTile]:
    for rows, columns, warps in itertools.product((8, 16, 32, 64), (64, 128, 256, 512), (8, 16)):
        if 8 <= rows * columns // (32 * warps) <= 32:
            yield KernelTile(rows, columns, warps)


def squares(_: int) -> Iterator[KernelTile]:
    for rows, columns, warps in itertools.product((32, 64, 128), (32, 64, 128), (4, 8)):
        if 4 <= rows * columns // (32 * warps) <= 64:
            yield KernelTile(rows, columns, warps)


CASES: dict[str, Case] = {
    "chain": Case(chain, ((32, 768), (1024, 768), (65536, 768)), flat),
    "bias_gelu": Case(bias_gelu, ((32, 3072), (1024, 3072), (16384, 3072)), points),
    "layer_norm": Case(
        layer_norm, ((32, 768), (1024, 768), (65536, 768), (1024, 4096), (16384, 4096)), whole_rows
    ),
    "softmax": Case(
        softmax, ((384, 32), (1536, 128), (400000, 128), (100000, 384), (32768, 1024)), whole_rows
    ),
    "column_sum": Case(column_sum, ((128, 768), (1024, 768), (4096, 768), (4096, 3072)), sums),
    "transpose": Case(transpose, ((384, 768), (8192, 8192)), squares),
}


def variant(kernel: Kernel) -> KernelVariant:
    """The emitter's own for these sizes."""
    ((_, found),) = emit.variants(coalesce(constant_powers(kernel)))
    return found


def choice(kernel: Kernel, chosen: KernelVariant, tile: KernelTile) -> LaunchChoice:
    merged = coalesce(constant_powers(kernel))
    return emit.choice(kernel, merged, GpuTarget(), True, replace(chosen, tile=tile))


def tiles(name: str, columns: int, own: KernelVariant) -> list[KernelTile]:
    """The table's first."""
    return list(dict.fromkeys((own.tile, *CASES[name].tiles(columns))))


def label(tile: KernelTile) -> str:
    pieces = f"x{tile.pieces}" * (tile.pieces > 1)
    return f"{tile.rows}x{tile.columns}{pieces}w{tile.warps}"


def compile_all(names: list[str], dtypes: list[torch.dtype], arch: int) -> None:
    """Into Triton's cache, by all processors."""
    units = {}
    for name, dtype in itertools.product(names, dtypes):
        for rows, columns in CASES[name].shapes:
            kernel = CASES[name].make(rows, columns, dtype)
            own = variant(kernel)
            for tile in tiles(name, columns, own):
                unit = choice(kernel, own, tile).unit
                units[unit.name] = asdict(unit)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=context) as pool:
        list(pool.map(_compile, units.values(), itertools.repeat(arch), chunksize=4))


def _compile(fields: dict[str, Any], arch: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        compile_unit(SimpleNamespace(**fields), ("cuda", arch, 32), folder)


def buffers(kernel: Kernel) -> list[list[torch.Tensor]]:
    """Sets of buffers, enough of them to go around the cache."""
    dims = (*kernel.outer, kernel.inner)
    need = [1] * len(kernel.args)
    for stmt in kernel.body:
        if isinstance(stmt, (Load, Store)):
            last = sum((int(d) - 1) * int(s) for d, s in zip(dims, stmt.access.strides))
            need[stmt.access.arg] = max(need[stmt.access.arg], last + 1)
    size = sum(n * a.dtype.itemsize for n, a in zip(need, kernel.args))
    count = max(2, min(16, COPIES_BYTES // size))
    return [
        [torch.randn(n, device="cuda").to(a.dtype) for n, a in zip(need, kernel.args)]
        for _ in range(count)
    ]


def microseconds(
    call: Callable[[list[torch.Tensor]], object], sets: list[list[torch.Tensor]]
) -> float:
    """Of one call, in a graph of many; the best of several replays."""
    for one in sets:
        call(one)
    torch.cuda.synchronize()
    graph, repeats = torch.cuda.CUDAGraph(), max(1, 32 // len(sets))
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for one in sets:
                call(one)
    best = float("inf")
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return best * 1e3 / (repeats * len(sets))


def measure(name: str, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Any]:
    kernel = CASES[name].make(rows, columns, dtype)
    sets, own = buffers(kernel), variant(kernel)
    moved = sum(b.numel() * b.element_size() for b in sets[0])
    flat_copy = [[b.new_empty(moved // 2 // b.element_size())] * 2 for b in (s[0] for s in sets)]
    flat_copy = [[a, torch.empty_like(a)] for a, _ in flat_copy]
    copy = microseconds(lambda two: two[1].copy_(two[0]), flat_copy)
    results = {}
    for tile in tiles(name, columns, own):
        one = choice(kernel, own, tile)
        unit = SimpleNamespace(**asdict(one.unit))
        with tempfile.TemporaryDirectory() as folder:
            compiled = compile_unit(unit, target_of().triton, folder)
        run = compiled[tuple(map(int, one.grid))]
        results[label(tile)] = microseconds(
            lambda one, run=run: run(*one),
            sets,  # type: ignore[misc]
        )
    first = label(own.tile)
    best = sorted(results.items(), key=lambda r: r[1])[:4]
    text = "  ".join(f"{tile} {us:.2f}" for tile, us in best)
    print(
        f"{name} {rows}x{columns} {str(dtype).removeprefix('torch.')}: {moved / 2**20:.1f} MB, copy {copy:.2f} us, "
        f"table {first} {results[first]:.2f} us ({copy / results[first]:.2f} of copy); best {text}",
        flush=True,
    )
    return {"kernel": name, "shape": [rows, columns], "dtype": str(dtype), "copy": copy} | {
        "table": first,
        "us": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", default=",".join(CASES))
    parser.add_argument("--dtypes", default="float16,float32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names, dtypes = options.kernels.split(","), options.dtypes.split(",")
    compile_all(names, [getattr(torch, d) for d in dtypes], target_of().arch)
    found = []
    for name, dtype in itertools.product(names, dtypes):
        for rows, columns in CASES[name].shapes:
            found.append(measure(name, rows, columns, getattr(torch, dtype)))
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
