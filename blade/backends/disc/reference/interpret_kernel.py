# SPDX-License-Identifier: Apache-2.0
"""The reference semantics of the kernel IR in plain torch ops; all generated code must agree with it.

    interpret(kernel, [x_flat, out_flat], {"s0": 4})      # writes out_flat

Each value is a tensor over the whole iteration space; bf16 and f16 are computed in f32 (see kernel.py).
"""

from collections.abc import Mapping, Sequence

import sympy
import torch

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
    Store,
)
from blade.core.dtypes import HALVES

Tensor = torch.Tensor

_DIRECT = (
    "neg abs sign exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal sin cos tan tanh sinh cosh "
    "asin acos atan erf erfc sigmoid floor ceil round trunc logical_not bitwise_not isnan isinf "
    "add sub mul div remainder fmod pow maximum minimum atan2 copysign eq ne lt le gt ge logical_and "
    "logical_or logical_xor bitwise_and bitwise_or bitwise_xor where"
).split()


def interpret(kernel: Kernel, buffers: Sequence[Tensor], sizes: Mapping[str, int]) -> None:
    """Run ``kernel`` over flat ``buffers``, one per ``Arg``; ``sizes`` maps each symbol's name to
    its value.
    """
    _KernelRun(kernel, buffers, sizes).run()


class _KernelRun:
    def __init__(self, kernel: Kernel, buffers: Sequence[Tensor], sizes: Mapping[str, int]) -> None:
        self.kernel, self.buffers, self.sizes = kernel, buffers, sizes
        self.shape = tuple(self.size(d) for d in (*kernel.outer, kernel.inner))
        self.values: dict[int, Tensor] = {}

    def run(self) -> None:
        """Run all statements; stores happen last, so loads see the original buffers."""
        stores = []
        for i, stmt in enumerate(self.kernel.body):
            if isinstance(stmt, Store):
                stores.append(stmt)
            else:
                self.values[i] = self.evaluate(stmt)
        for stmt in stores:
            if isinstance(stmt, Accumulate):
                self.accumulate(stmt)
            else:
                self.store(stmt)

    def size(self, dim: Dim) -> int:
        if isinstance(dim, int):
            return dim
        values = {s: self.sizes[str(s)] for s in dim.free_symbols}
        return int(sympy.sympify(dim).subs(values))

    def evaluate(self, stmt: Load | Gather | Const | Size | Index | Compute | Reduce) -> Tensor:
        work = working(stmt.dtype)
        if isinstance(stmt, Load):
            return self.view(stmt.access).to(work, copy=True)
        if isinstance(stmt, Gather):
            return self.gather(stmt).to(work)
        if isinstance(stmt, Const):
            return torch.full(self.shape, stmt.value, dtype=work)
        if isinstance(stmt, Size):
            return torch.full(self.shape, self.size(stmt.value), dtype=torch.int64).to(work)
        if isinstance(stmt, Index):
            column = [1] * len(self.shape)
            column[stmt.dim] = -1
            return torch.arange(self.shape[stmt.dim]).view(column).expand(self.shape).to(work)
        if isinstance(stmt, Reduce):
            row = reduce(stmt.kind, self.values[stmt.arg].to(work))
            return row.unsqueeze(-1).expand(self.shape)
        args = [self.values[a] for a in stmt.args]
        if stmt.op == "cast":
            return self.cast(stmt, args[0]).to(work)
        return pointwise(stmt.op, args).to(work)

    def cast(self, stmt: Compute, x: Tensor) -> Tensor:
        """Convert ``x``; 16-bit values are rounded first."""
        source = self.kernel.body[stmt.args[0]]
        assert not isinstance(source, Store), source
        return (x if source.dtype == stmt.dtype else x.to(source.dtype)).to(stmt.dtype)

    def view(self, access: Access) -> Tensor:
        """The elements of a buffer at every point of the space."""
        buffer = self.buffers[access.arg]
        strides = [self.size(s) for s in access.strides]
        if 0 in self.shape:
            return buffer.new_empty(self.shape)
        offset = buffer.storage_offset() + self.size(access.offset)
        return torch.as_strided(buffer, self.shape, strides, offset)

    def gather(self, stmt: Gather) -> Tensor:
        return self.buffers[stmt.access.arg].reshape(-1)[self.places(stmt)]

    def places(self, stmt: Gather | Accumulate) -> Tensor:
        """The element of the buffer at every point of the space."""
        place = self.values[stmt.index].long()
        place = place * self.size(stmt.stride) + self.size(stmt.access.offset)
        for k, stride in enumerate(stmt.access.strides):
            column = [1] * len(self.shape)
            column[k] = -1
            place = place + torch.arange(self.shape[k]).view(column) * self.size(stride)
        return place

    def accumulate(self, stmt: Accumulate) -> None:
        buffer = self.buffers[stmt.access.arg]
        places, values = self.places(stmt), self.values[stmt.value].expand(self.shape)
        if stmt.kind == "put":
            buffer.view(-1)[places.flatten()] = values.flatten().to(buffer.dtype)
            return
        kind = {"sum": "sum", "max": "amax"}[stmt.kind]
        buffer.view(-1).scatter_reduce_(0, places.flatten(), values.flatten(), kind)

    def store(self, stmt: Store) -> None:
        if 0 in self.shape[:-1]:
            return
        value = self.values[stmt.value].to(self.buffers[stmt.access.arg].dtype)
        if self.size(stmt.access.strides[-1]) == 0 and self.shape[-1] != 1:
            strides = [self.size(s) for s in stmt.access.strides[:-1]]
            buffer = self.buffers[stmt.access.arg]
            offset = buffer.storage_offset() + self.size(stmt.access.offset)
            row = torch.as_strided(buffer, self.shape[:-1], strides, offset)
            row.copy_(self.row(stmt.value).to(row.dtype))
        elif self.shape[-1] > 0:
            self.view(stmt.access).copy_(value)

    def row(self, i: int) -> Tensor:
        """A row value, one element per row, defined for empty rows too."""
        if self.shape[-1] > 0:
            return self.values[i][..., 0]
        stmt = self.kernel.body[i]
        assert not isinstance(stmt, Store), stmt
        work = working(stmt.dtype)
        if isinstance(stmt, Reduce):
            return reduce(stmt.kind, self.values[stmt.arg].to(work))
        if isinstance(stmt, Compute):
            args = [self.row(a) for a in stmt.args]
            cast = stmt.op == "cast"
            return (self.cast(stmt, args[0]) if cast else pointwise(stmt.op, args)).to(work)
        one = _KernelRun(self.kernel, self.buffers, self.sizes)
        one.shape = (*self.shape[:-1], 1)
        return one.evaluate(stmt)[..., 0]


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are computed."""
    return torch.float32 if dtype in HALVES else dtype


def pointwise(op: str, args: Sequence[Tensor]) -> Tensor:
    """An op of ``POINTWISE`` other than ``cast``."""
    if op in _DIRECT:
        result: Tensor = getattr(torch, op)(*args)
        return result
    if op in ("div_floor", "div_trunc"):
        return torch.div(args[0], args[1], rounding_mode=op.removeprefix("div_"))
    if op in ("lshift", "rshift"):
        shift = torch.bitwise_left_shift if op == "lshift" else torch.bitwise_right_shift
        return shift(args[0], args[1])
    assert op == "fma", op
    return torch.addcmul(args[2], args[0], args[1])


def reduce(kind: str, x: Tensor) -> Tensor:
    """Reduce the last dimension; an empty row gives the identity."""
    if kind in ("sum", "prod"):
        result: Tensor = getattr(torch, kind)(x, -1, dtype=x.dtype)
        return result
    if kind in ("any", "all"):
        boolean: Tensor = getattr(torch, kind)(x, -1)
        return boolean
    if x.shape[-1] > 0:
        extreme: Tensor = getattr(torch, "a" + kind)(x, -1)
        return extreme
    if x.dtype == torch.bool:
        return x.new_full(x.shape[:-1], kind == "min")
    low, high = (-torch.inf, torch.inf) if x.is_floating_point() else _bounds(x.dtype)
    return x.new_full(x.shape[:-1], low if kind == "max" else high)


def _bounds(dtype: torch.dtype) -> tuple[float, float]:
    info = torch.iinfo(dtype)
    return info.min, info.max
