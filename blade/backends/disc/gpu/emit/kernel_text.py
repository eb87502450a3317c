# SPDX-License-Identifier: Apache-2.0
"""A kernel and its tiling -> the text of its Triton function, ``kernel``."""

from dataclasses import dataclass

import sympy

from blade.backends.disc.gpu.emit import device_functions, reduction
from blade.backends.disc.gpu.emit.statements import TritonBody
from blade.backends.disc.gpu.emit.tile_table import KernelTile
from blade.backends.disc.gpu.emit.tiling import Alignment, TritonSizes, product
from blade.backends.disc.ir.iteration_space import number
from blade.backends.disc.ir.kernel import (
    Access,
    Dim,
    Kernel,
    Load,
    Reduce,
    Store,
)
from blade.backends.disc.ir.kernel_schedule import live, schedule_kernel

_EARLY_ELEMENTS = 32  # per thread: more early loads do not fit the registers
_IMPORTS = "import triton\nimport triton.language as tl\n"
_LIBDEVICE = "from triton.language.extra.cuda import libdevice\n"
_LET_GO = "gdc_launch_dependents()"
_EARLY = "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait\n"


@dataclass(frozen=True)
class KernelVariant:
    """One way to compute a kernel.

    ``tiled``: a program computes some of a row's columns, for kernels without reductions. ``walked``: a
    program walks its rows in pieces. Neither: whole rows at once. ``beside``: the outer dimension along
    which a tile's rows run; ``None``: all of them. ``guarded``: only the last program uses masks.
    """

    tile: KernelTile
    tiled: bool = False
    walked: bool = False
    beside: int | None = None
    even: Alignment | None = None
    guarded: bool = False


def kernel_text(
    kernel: Kernel, known: tuple[sympy.Expr, ...], variant: KernelVariant, early: bool = False
) -> str:
    """The module; ``known``: the expressions of the function's parameters ``n0``, ``n1``, ..

    ``early``: programmatic dependent launch; the kernel may start while the previous launch still runs, and
    lets the next one start early. Memory is touched only after the wait, so only the start of a launch
    overlaps, which for few rows is most of its time. With whole rows, the next launch starts after the
    loads are issued; before that, its programs would occupy the multiprocessors.
    """
    writer = _KernelWriter(kernel, TritonSizes(known), variant)
    writer.lets_go = early and writer.has_whole_rows
    writer.run()
    parameters = [f"p{k}" for k in range(len(kernel.args))] + [f"n{k}" for k in range(len(known))]
    head = [*writer.head, *writer.body.head]
    if early:
        first = [] if writer.has_whole_rows else [_LET_GO]
        head = [*first, *head, "gdc_wait()"]
    body = "\n".join(f"    {line}" for line in (*head, *writer.body.lines))
    functions = device_functions.sources(device_functions.called(body))
    imports = _IMPORTS + _EARLY * early + _LIBDEVICE * ("libdevice." in body + functions)
    return f"{imports}\n\n{functions}@triton.jit\ndef kernel({', '.join(parameters)}):\n{body}\n"


class _KernelWriter:
    def __init__(self, kernel: Kernel, sizes: TritonSizes, variant: KernelVariant) -> None:
        self.kernel, self.sizes, self.variant, self.tile = kernel, sizes, variant, variant.tile
        self.head: list[str] = []
        self.lets_go = False  # start the next launch after the loads
        reduces = any(isinstance(s, Reduce) for s in kernel.body)
        self.has_whole_rows = reduces and not variant.walked
        length = number(kernel.inner)
        self.one_piece = length is not None and length <= variant.tile.columns
        beside = variant.beside
        along = range(len(kernel.outer)) if beside is None else [beside]
        vectors = frozenset(along if self.tile.rows > 1 else ())
        self.body = TritonBody(kernel, self.tile, sizes, vectors)
        self.body.beside = beside is not None

    def run(self) -> None:
        self.note_multiples()
        self.rows()
        body = self.body
        body.tiled, body.walked = self.variant.tiled and not self.one_piece, self.variant.walked
        if body.walked:
            self.walk()
            return
        self.columns()
        if self.variant.guarded:
            self.guarded()
        else:
            self.at_once()

    def note_multiples(self) -> None:
        """Tell the compiler which sizes are multiples, so that accesses become vectors."""
        even, inner = self.variant.even, self.kernel.inner
        multiples = {inner: self.kernel.multiple} if isinstance(inner, sympy.Expr) else {}
        for expression in (*(even.open or ()), *even.known) if even else ():
            multiples[expression] = max(multiples.get(expression, 1), even.elements)  # type: ignore[union-attr]
        for expression, multiple in multiples.items():
            line = self.sizes.annotate(expression, multiple)
            self.head += [line] if line else []

    # --- position of a program ---

    def rows(self) -> None:
        """``i0``, ``i1``, ..: the outer indices of the program's rows."""
        kernel, beside = self.kernel, self.variant.beside
        self.head.append("t = tl.program_id(0).to(tl.int64)")
        if self.variant.tiled and not self.one_piece:
            self.split_columns()
        if not kernel.outer:
            return
        if beside is None:
            count = product(kernel.outer)
            self.body.merged = True
            text = self.sizes.product(kernel.outer)
            self.vector("r", "t", count, text)
            self.split("r", list(range(len(kernel.outer))), text)
            return
        others = [k for k in range(len(kernel.outer)) if k != beside]
        tile = "t"
        if others:
            tiles = self.pieces("row_tiles", kernel.outer[beside], self.tile.rows)
            self.head += [f"u = {_quotient('t', tiles)}", f"b = t - u * {tiles}"]
            tile = "b"
        self.vector(f"i{beside}", tile, kernel.outer[beside], self.sizes.text(kernel.outer[beside]))
        self.split("u", others)

    def vector(self, name: str, tile: str, count: Dim, text: str) -> None:
        """The index of a tile's rows, and their mask; ``text`` is the text of ``count``."""
        if self.tile.rows == 1:
            self.head.append(f"{name} = {tile}")
            return
        self.head.append(
            f"{name} = {tile} * {self.tile.rows} + tl.arange(0, {self.tile.rows})[:, None]"
        )
        whole = number(count)
        if whole is None or whole % self.tile.rows:
            self.head.append(f"rm = {name} < {text}")
            self.body.row_mask = True

    def split(self, index: str, dims: list[int], count: str = "0") -> None:
        """Split a merged index, below ``count``, into the indices of ``dims``."""
        for k in reversed(dims[1:]):
            size = self.sizes.text(self.kernel.outer[k])
            self.head += [
                f"q{k} = {_quotient(index, size, count)}",
                f"i{k} = {index} - q{k} * {size}",
            ]
            index = f"q{k}"
        if dims and index != f"i{dims[0]}":
            self.head.append(f"i{dims[0]} = {index}")

    def split_columns(self) -> None:
        """``c0``: the program's first column."""
        columns = self.tile.columns
        if not self.kernel.outer:
            self.head.append(f"c0 = t * {columns}")
            return
        pieces = self.pieces("column_tiles", self.kernel.inner, columns)
        self.head += [
            f"w = {_quotient('t', pieces)}",
            f"c0 = (t - w * {pieces}) * {columns}",
            "t = w",
        ]

    def pieces(self, name: str, dim: Dim, size: int) -> str:
        """The number of pieces of ``size`` in ``dim``."""
        constant = number(dim)
        if constant is not None:
            return str(-(-constant // size))
        self.head.append(f"{name} = ({self.sizes.text(dim)} + {size - 1}) // {size}")
        return name

    def columns(self) -> None:
        body, tile = self.body, self.tile
        shape = "" if tile.rows == 1 else "[None, :]"
        length = number(self.kernel.inner)
        for piece in range(tile.pieces):
            body.piece, first = piece, piece * tile.columns
            c = body.of_piece("c")
            self.head.append(
                f"{c} = tl.arange(0, {tile.columns}){shape}" + f" + {first}" * (first > 0)
            )
            inside = length is not None and (
                length >= first + tile.columns
                if tile.pieces > 1
                else length > 0 and length % tile.columns == 0
            )
            if not inside and not self.variant.guarded:
                body.masked.add(piece)
                index = f"c0 + {c}" if body.tiled else c
                inner = self.sizes.text(self.kernel.inner)
                self.head.append(f"{body.of_piece('cm')} = {index} < {inner}")
        body.piece = 0

    # --- computation ---

    def at_once(self) -> None:
        """Every statement once, over the whole tile."""
        body = self.body
        body.checked.clear()
        alive = sorted(live(self.kernel.body), key=self.order)
        for i in alive:
            stmt = body.stmt(i)
            if self.lets_go and not isinstance(stmt, Load):
                body.line(_LET_GO)
                self.lets_go = False
            if isinstance(stmt, Reduce):
                body.finish(i, stmt, body.joined(i, stmt))
                continue
            if isinstance(stmt, Store):
                self.wait_before(stmt)
            body.everywhere(i)

    def order(self, i: int) -> tuple[int, int]:
        """Sort key: loads first, so that reductions do not wait, unless loads would fill the registers."""
        stmt, tile = self.body.stmt(i), self.tile
        few = tile.elements <= _EARLY_ELEMENTS * 32 * tile.warps
        return (2 if isinstance(stmt, Store) else 0 if few and isinstance(stmt, Load) else 1), i

    def guarded(self) -> None:
        """Whole tiles without masks, which would prevent vector accesses; the last tile with masks."""
        body, inner = self.body, self.sizes.text(self.kernel.inner)
        body.line(f"if c0 + {self.tile.columns} <= {inner}:")
        body.indent += 1
        self.at_once()
        body.indent -= 1
        body.line("else:")
        body.indent += 1
        body.line(f"cm = c0 + c < {inner}")
        body.masked = {0}
        self.at_once()
        body.indent -= 1

    def walk(self) -> None:
        """Pass by pass; accumulators are tiles whose columns are reduced after each pass."""
        body, steps = self.body, schedule_kernel(self.kernel, scratch=False)
        for step in steps.passes:
            for i in step.uniforms:
                body.statement(i)
            reductions = [(i, s) for i in step.reductions if isinstance(s := body.stmt(i), Reduce)]
            for i, stmt in reductions:
                kind = reduction.working_type(stmt)
                shape = (
                    f"[{self.tile.columns}]"
                    if self.tile.rows == 1
                    else f"[{self.tile.rows}, {self.tile.columns}]"
                )
                body.line(f"t{i} = tl.zeros({shape}, {kind}) + {reduction.identity(stmt)}")
            self.loop()
            for i in step.points:
                body.statement(i)
            for i, stmt in reductions:
                body.line(f"t{i} = {reduction.join(stmt, f't{i}', body.reduced(i, stmt))}")
            for i in step.stores:
                body.statement(i)
            body.indent -= 1
            for i, stmt in reductions:
                body.finish(i, stmt, f"t{i}")
                body.rows[i] = bool(body.vectors)
        for i in (*steps.finals, *steps.row_stores):
            last = body.stmt(i)
            if isinstance(last, Store):
                self.wait_before(last)
            body.statement(i)

    def loop(self) -> None:
        """``c``: the columns of the next piece."""
        body, columns, inner = self.body, self.tile.columns, self.sizes.text(self.kernel.inner)
        shape = "" if self.tile.rows == 1 else "[None, :]"
        body.line(f"for c0 in range(0, {inner}, {columns}):")
        body.indent += 1
        body.line(f"c = c0 + tl.arange(0, {columns}){shape}")
        length = number(self.kernel.inner)
        body.masked = {0} if length is None or length % columns else set()
        if body.column_mask:
            body.line(f"cm = c < {inner}")

    def wait_before(self, store: Store) -> None:
        """A barrier: the stored row value may overwrite one that slower warps of the program still load."""
        if number(store.access.strides[-1]) == 0 and any(
            isinstance(s, Load) and _same(s.access, store.access) for s in self.kernel.body
        ):
            self.body.line("tl.debug_barrier()")


def _same(a: Access, b: Access) -> bool:
    return a.strides == b.strides and a.offset == b.offset


def _quotient(index: str, size: str, count: str = "0") -> str:
    """``index // size``; both are below ``count`` (0: below 2**31, like the number of programs)."""
    by = "divide_by" if size.isdigit() else "divide"
    return f"{by}({index}, {size}, {count})"
