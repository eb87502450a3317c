# SPDX-License-Identifier: Apache-2.0
"""The statements of a kernel as Triton code over one tile.

A value has the shape that its indices need: a scalar, [rows, 1], [1, columns] or [rows, columns]; a tile of
one row has only scalars and [columns]. In a tile of several pieces, a value with columns exists once per
piece (``v3_0``, ``v3_1``, ..). Offsets of rows have 64 bits, offsets within a row 32.
"""

from collections.abc import Iterator, Sequence

import torch

from blade.backends.disc.gpu.emit import pointwise, reduction
from blade.backends.disc.gpu.emit.fast_math import beside_one, hidden
from blade.backends.disc.gpu.emit.pairs import access_of, find_pairs
from blade.backends.disc.gpu.emit.tile_table import KernelTile
from blade.backends.disc.gpu.emit.tiling import TritonSizes
from blade.backends.disc.ir.iteration_space import number
from blade.backends.disc.ir.kernel import (
    Access,
    Accumulate,
    Compute,
    Const,
    Dim,
    Gather,
    Index,
    Kernel,
    Load,
    Reduce,
    Size,
    Stmt,
    Store,
)
from blade.core.dtypes import HALVES

_INT32 = 1 << 31


class TritonBody:
    """Lines of code, and the names that they define.

    ``vectors``: the outer dimensions along which a tile's rows run; the others are scalars. Names used here:
    ``i0``, ``i1``, .. outer indices; ``c`` columns, counted from ``c0``; ``rm`` and ``cm`` masks.
    """

    def __init__(
        self, kernel: Kernel, tile: KernelTile, sizes: TritonSizes, vectors: frozenset[int]
    ) -> None:
        self.kernel, self.tile, self.sizes, self.vectors = kernel, tile, sizes, vectors
        self.head: list[str] = []  # lines before all others
        self.lines: list[str] = []
        self.indent = 0
        self.row_mask = False
        self.piece = 0  # the current piece of the tile
        self.masked: set[int] = set()  # pieces with missing columns
        self.tiled = False  # columns begin at c0
        self.walked = False  # columns are counted in 64 bits, in a loop
        self.merged = False  # a row's index over all outer dimensions is ``r``
        self.beside = False  # memory is contiguous along the rows of a tile, not along its columns
        self.hidden = hidden(kernel)  # computed like halves
        self.beside_one = beside_one(kernel)
        self.named: list[dict[int, str]] = [{} for _ in range(tile.pieces)]
        self.rows: dict[int, bool] = {}  # value -> does it differ between the rows of a tile?
        self.columns: dict[int, bool] = {}
        self.least: set[int] = set()  # values that are -inf in missing columns
        self.exact: set[int] = set()  # halves whose registers hold exactly their value in memory
        self.bases: dict[str, str] = {}
        self.checked: set[tuple[int, int, Dim]] = set()  # (piece, index, bound) of assertions
        self.pairs = find_pairs(kernel) if tile.pieces == 1 else {}

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    @property
    def values(self) -> dict[int, str]:
        """The names of the statements' values in this piece."""
        return self.named[self.piece]

    @property
    def column_mask(self) -> bool:
        return self.piece in self.masked

    def of_piece(self, name: str) -> str:
        return name if self.tile.pieces == 1 else f"{name}_{self.piece}"

    def define(self, i: int, text: str) -> None:
        """Define the value of statement ``i``."""
        name = self.of_piece(f"v{i}") if self.columns[i] else f"v{i}"
        for values in [self.values] if self.columns[i] else self.named:
            values[i] = name
        self.line(f"{name} = {text}")

    def everywhere(self, i: int) -> None:
        """Emit statement ``i`` in every piece that it concerns."""
        stmt = self.kernel.body[i]
        self.statement(i)
        if self.is_per_column(i, stmt):
            for _ in self.others():
                self.statement(i)

    def is_per_column(self, i: int, stmt: Stmt) -> bool:
        if isinstance(stmt, Accumulate):
            return True
        return number(stmt.access.strides[-1]) != 0 if isinstance(stmt, Store) else self.columns[i]

    def others(self) -> Iterator[int]:
        """Every piece but the first, which is the current piece before and after."""
        for piece in range(1, self.tile.pieces):
            self.piece = piece
            yield piece
        self.piece = 0

    def statement(self, i: int) -> None:
        """Emit a statement of any kind but ``Reduce``."""
        stmt = self.kernel.body[i]
        if i in self.pairs and not self.walked and not self.beside:
            self.pair(i, *self.pairs[i])
        elif isinstance(stmt, Load):
            self.load(i, stmt.access, stmt.dtype)
        elif isinstance(stmt, Gather):
            self.gather(i, stmt)
        elif isinstance(stmt, Accumulate):
            self.accumulate(stmt)
        elif isinstance(stmt, Store):
            self.store(stmt)
        elif isinstance(stmt, Compute):
            self.compute(i, stmt)
        elif isinstance(stmt, Index):
            self.index(i, stmt)
        else:
            assert isinstance(stmt, (Const, Size)), stmt
            self.rows[i] = self.columns[i] = False
            self.define(i, self.scalar(stmt))

    def scalar(self, stmt: Const | Size) -> str:
        if isinstance(stmt, Const):
            return pointwise.constant(stmt.value, stmt.dtype)
        value = number(stmt.value)
        if value is not None:
            kind = (
                bool if stmt.dtype == torch.bool else float if stmt.dtype.is_floating_point else int
            )
            return pointwise.constant(kind(value), stmt.dtype)
        return self.number(self.sizes.text(stmt.value), stmt.dtype)

    def number(self, text: str, dtype: torch.dtype) -> str:
        """An integer as a value; halves are rounded only when they are stored."""
        dtype = torch.float32 if dtype in HALVES else dtype
        return pointwise.cast(text, torch.int64, dtype, True)

    def index(self, i: int, stmt: Index) -> None:
        inner = stmt.dim == len(self.kernel.outer)
        self.rows[i], self.columns[i] = stmt.dim in self.vectors, inner
        c = self.of_piece("c")
        name = f"i{stmt.dim}" if not inner else f"(c0 + {c})" if self.tiled else f"{c}.to(tl.int64)"
        self.define(i, self.number(name, stmt.dtype))

    def compute(self, i: int, stmt: Compute) -> None:
        self.rows[i] = any(self.rows[a] for a in stmt.args)
        self.columns[i] = any(self.columns[a] for a in stmt.args)
        source = self.dtype(stmt.args[-1])
        args = [self.values[a] for a in stmt.args]
        if stmt.op == "cast":
            self.exact.add(i)
            exact = stmt.args[0] in self.exact
            self.define(i, pointwise.cast(args[0], source, stmt.dtype, exact))
            return
        form = torch.float16 if i in self.hidden else source
        if stmt.op == "div" and form in HALVES and self.is_of_row(stmt):
            self.define(i, pointwise.divided_by_row(*args))
        else:
            absolute = stmt.op == "erf" and form in HALVES and i in self.beside_one
            self.define(i, pointwise.compute("erf_absolute" if absolute else stmt.op, args, form))

    def is_of_row(self, stmt: Compute) -> bool:
        """Is the last operand one value for all columns of the others?"""
        return self.columns[stmt.args[0]] and not self.columns[stmt.args[-1]]

    def dtype(self, i: int) -> torch.dtype:
        stmt = self.kernel.body[i]
        assert not isinstance(stmt, Store), stmt
        return stmt.dtype

    # --- memory ---

    def load(
        self,
        i: int,
        access: Access,
        dtype: torch.dtype,
        rows: bool = False,
        columns: bool = False,
        place: str | None = None,
    ) -> None:
        """``place``: an offset in elements, which may differ by ``rows`` and ``columns``."""
        rows, columns = rows or self.differs(access), columns or number(access.strides[-1]) != 0
        pointer = self.pointer(access) + (f" + {place}" if place else "")
        mask = self.mask(rows, columns)
        if columns and not rows and self.tile.rows > 1 and not self.beside:
            # a load of [1, columns] would have another layout and go through shared memory; the rows' loads
            # are equal and become one if nothing is masked
            pointer = f"tl.broadcast_to({pointer}, [{self.tile.rows}, {self.tile.columns}])"
            rows = True
        self.rows[i], self.columns[i] = rows, columns
        self.exact.add(i)
        self.define(i, _in_register(f"tl.load({pointer}{mask})", dtype))

    def pair(self, i: int, even: int, odd: int) -> None:
        """Load both at the first of the two statements, or store both at the last; ``i`` is either."""
        stmt = self.kernel.body[i]
        if isinstance(stmt, Load) and i == min(even, odd):
            self.load_pair(even, odd, stmt.dtype)
        elif isinstance(stmt, Store) and i == max(even, odd):
            self.store_pair(even, odd)

    def load_pair(self, even: int, odd: int, dtype: torch.dtype) -> None:
        access = access_of(self.kernel, even)
        rows, pointer = self.differs(access), self.pair_pointer(access)
        shape = self.pair_shape()
        if not rows and self.tile.rows > 1:
            rows, pointer = True, f"tl.broadcast_to({pointer}, {shape})"
        text = _in_register(f"tl.load({pointer}{self.pair_mask(rows)})", dtype)
        for i in (even, odd):
            self.rows[i], self.columns[i] = rows, True
            self.exact.add(i)
            self.values[i] = f"v{i}"
        self.line(f"v{even}, v{odd} = tl.split(tl.reshape({text}, {self.pair_shape(True)}))")

    def store_pair(self, even: int, odd: int) -> None:
        """Both rows, or each alone if a value is the same for all of its rows or columns."""
        stmts = [self.kernel.body[i] for i in (even, odd)]
        stores = [stmt for stmt in stmts if isinstance(stmt, Store)]
        access, several = stores[0].access, self.tile.rows > 1
        is_whole = all(
            self.columns[s.value] and (self.rows[s.value] or not several) for s in stores
        )
        if not is_whole or (several and not self.differs(access)):
            for stmt in stores:
                self.store(stmt)
            return
        dtype = self.kernel.args[access.arg].dtype
        values = ", ".join(_in_memory(self.values[s.value], dtype) for s in stores)
        both = f"tl.reshape(tl.join({values}), {self.pair_shape()})"
        self.line(f"tl.store({self.pair_pointer(access)}, {both}{self.pair_mask(several)})")

    def pair_shape(self, parted: bool = False) -> str:
        """The shape of a tile of pairs: [rows, 2 * columns], ``parted``: [rows, columns, 2]."""
        columns = f"{self.tile.columns}, 2" if parted else f"{2 * self.tile.columns}"
        return f"[{self.tile.rows}, {columns}]" if self.tile.rows > 1 else f"[{columns}]"

    def pair_pointer(self, access: Access) -> str:
        shape = "[None, :]" if self.tile.rows > 1 else ""
        line = f"cc = tl.arange(0, {2 * self.tile.columns}){shape}"
        if line not in self.head:
            self.head.append(line)
        return f"{self.row_pointer(access)} + cc"

    def pair_mask(self, rows: bool) -> str:
        names = ["rm"] * (rows and self.row_mask)
        if self.column_mask:
            inner = self.sizes.text(self.kernel.inner)
            left = f"({inner} - c0)" if self.tiled else inner
            names.append(f"(cc < {left} * 2)")
        return f", mask={' & '.join(names)}" if names else ""

    def gather(self, i: int, stmt: Gather) -> None:
        rows, columns = self.rows[stmt.index], self.columns[stmt.index]
        if stmt.bound is not None:
            self.check(stmt.index, stmt.bound)
        place = self.place(stmt.index, stmt.stride)
        self.load(i, stmt.access, stmt.dtype, rows, columns, place)

    def check(self, index: int, bound: Dim) -> None:
        """Assert that value ``index`` is from 0 to below ``bound``."""
        if (self.piece, index, bound) in self.checked:
            return
        self.checked.add((self.piece, index, bound))
        name = self.values[index]
        inside = f"({name} >= 0) & ({name} < {self.sizes.text(bound)})"
        mask = self.mask(self.rows[index], self.columns[index])
        self.line(f'tl.device_assert({inside}, "index out of bounds"{mask})')

    def place(self, index: int, stride: Dim) -> str:
        """The offset of element ``index``, in elements."""
        step = self.sizes.text(stride)
        return f"{self.values[index]}.to(tl.int64)" + (f" * {step}" if step != "1" else "")

    def accumulate(self, stmt: Accumulate) -> None:
        """Every point once, also where pointers or values are equal along rows or columns."""
        self.check(stmt.index, stmt.bound)
        rows, columns = self.tile.rows, self.tile.columns
        shape = f"[{columns}]" if rows == 1 else f"[{rows}, {columns}]"
        place = self.place(stmt.index, stmt.stride)
        pointer = f"tl.broadcast_to({self.pointer(stmt.access)} + {place}, {shape})"
        if stmt.kind == "put":
            value = _in_memory(self.values[stmt.value], self.kernel.args[stmt.access.arg].dtype)
            value = f"tl.broadcast_to({value}, {shape})"
            self.line(f"tl.store({pointer}, {value}{self.mask(True, True)})")
            return
        value = f"tl.zeros({shape}, tl.float32) + {self.values[stmt.value]}"
        if stmt.kind == "max":  # by their bits NaNs without a sign are the largest numbers
            self.line(f"x = {value}")
            value = "tl.where(x == x, x, float('nan'))"
        name = {"sum": "add", "max": "max"}[stmt.kind]
        self.line(f'tl.atomic_{name}({pointer}, {value}{self.mask(True, True)}, sem="relaxed")')

    def store(self, stmt: Store) -> None:
        access = stmt.access
        value = _in_memory(self.values[stmt.value], self.kernel.args[access.arg].dtype)
        # an axis of size 1 has no stride, but the value may be a tile of which masks leave one element
        rows, columns = self.differs(access), number(access.strides[-1]) != 0
        pointer = self.pointer(access)
        if not rows and self.rows[stmt.value] and self.tile.rows > 1:
            rows, pointer = True, f"{pointer} + i{min(self.vectors, default=0)} * 0"
        if not columns and self.columns[stmt.value] and number(self.kernel.inner) == 1:
            columns, pointer = True, f"{pointer} + {self.of_piece('c')} * 0"
        self.line(f"tl.store({pointer}, {value}{self.mask(rows, columns)})")

    def differs(self, access: Access) -> bool:
        return any(number(access.strides[k]) != 0 for k in self.vectors)

    def mask(self, rows: bool, columns: bool) -> str:
        names = ["rm"] * (rows and self.row_mask) + [self.of_piece("cm")] * (
            columns and self.column_mask
        )
        return f", mask={' & '.join(names)}" if names else ""

    def pointer(self, access: Access) -> str:
        """The elements' addresses: row addresses, named and shared, plus columns."""
        base, step = self.row_pointer(access), access.strides[-1]
        return base if number(step) == 0 else f"{base} + {self.column(step)}"

    def row_pointer(self, access: Access) -> str:
        outer = access.strides[:-1]
        terms = [
            self.times(f"i{k}", self.sizes.text(s)) for k, s in enumerate(outer) if number(s) != 0
        ]
        if self.evenly_apart(outer):
            terms = [self.times("r", self.sizes.text(outer[-1]))]
        step = access.strides[-1]
        if number(access.offset) != 0:
            terms.append(self.sizes.text(access.offset))
        if number(step) != 0 and self.tiled:
            terms.append(self.times("c0", self.sizes.text(step)))
        return self.base(" + ".join([f"p{access.arg}", *filter(None, terms)]))

    def evenly_apart(self, strides: Sequence[Dim]) -> bool:
        """Are all rows equally far apart, so that the merged row index suffices?"""
        outer = self.kernel.outer
        return (
            len(outer) > 1
            and self.merged
            and number(strides[-1]) != 0
            and all(strides[k - 1] == strides[k] * outer[k] for k in range(1, len(outer)))
        )

    def column(self, step: Dim) -> str:
        c, constant = self.of_piece("c"), number(step)
        if constant == 1:
            return c
        columns = self.tile.columns * self.tile.pieces
        near = not self.walked and constant is not None and abs(constant) * columns < _INT32
        return f"{c} * {constant}" if near else f"{c}.to(tl.int64) * {self.sizes.text(step)}"

    def times(self, index: str, stride: str) -> str:
        return index if stride == "1" else f"{index} * {stride}"

    def base(self, text: str) -> str:
        if " " not in text:
            return text
        if text not in self.bases:
            self.bases[text] = f"a{len(self.bases)}"
            self.head.append(f"{self.bases[text]} = {text}")
        return self.bases[text]

    # --- reductions ---

    def reduced(self, i: int, stmt: Reduce) -> str:
        """A tile's contribution to reduction ``i``, with identities in missing columns."""
        x = reduction.prepare(stmt, self.values[stmt.arg], self.dtype(stmt.arg))
        masked, columns = self.column_mask, self.columns[stmt.arg]
        if (columns and not masked) or reduction.vanishing(self.kernel, stmt) in self.least:
            return x
        there = self.of_piece("cm") if masked else f"{self.of_piece('c')} >= 0"
        x = f"tl.where({there}, {x}, {reduction.identity(stmt)})"
        if stmt.kind == "max" and stmt.dtype.is_floating_point and columns and self.tile.pieces > 1:
            # a sum of exponentials then needs no masks; with one piece, threads reduce before they mask
            self.least.add(stmt.arg)
            self.values[stmt.arg] = self.of_piece(f"x{stmt.arg}")
            self.line(f"{self.values[stmt.arg]} = {x}")
            x = self.values[stmt.arg]
        return x

    def joined(self, i: int, stmt: Reduce) -> str:
        """The contributions of all pieces, combined column by column."""
        if self.tile.pieces == 1:
            return self.reduced(i, stmt)
        self.line(f"t{i} = {self.reduced(i, stmt)}")
        for _ in self.others():
            self.line(f"t{i} = {reduction.join(stmt, f't{i}', self.reduced(i, stmt))}")
        self.piece = 0
        return f"t{i}"

    def finish(self, i: int, stmt: Reduce, x: str) -> None:
        """Finish reduction ``i`` from the columns of ``x``."""
        self.rows[i], self.columns[i] = self.rows[stmt.arg], False
        self.define(i, reduction.across(stmt, x, self.tile.rows))

    def stmt(self, i: int) -> Stmt:
        return self.kernel.body[i]


def _in_register(loaded: str, dtype: torch.dtype) -> str:
    """``loaded``, of ``dtype`` in memory, as it is computed with."""
    return f"{loaded}.to(tl.float32)" if dtype in HALVES else loaded


def _in_memory(value: str, dtype: torch.dtype) -> str:
    return f"{value}.to({pointwise.memory_type(dtype)})" if dtype in HALVES else value
