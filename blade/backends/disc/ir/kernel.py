# SPDX-License-Identifier: Apache-2.0
"""The kernel IR: a fusion group as code generators (MLIR for CPU, Triton for GPU) take it.

A kernel runs over an iteration space of ``outer`` dimensions times one ``inner`` dimension. Its body is a
flat list of statements in SSA form over one point of that space; statement ``i`` defines value ``i``:

    outer [s0, s1]  inner 384
    %0 = load p0[s1*384*d0 + 384*d1 + d2] : f32
    %1 = load p1[d2] : f32
    %2 = add %0 %1 : f32
    %3 = reduce sum %2 : f32            # over inner: the same value at every point of the row
    %4 = mul %2 %3 : f32
    store p2[s1*384*d0 + 384*d1 + d2] %4

A loop kernel has no ``reduce``; a row kernel has at least one; a stitch kernel has several that depend on
each other. The body says what to compute; codegen decides in how many passes over the row.
Sizes and strides are ints or sympy expressions over the program's size symbols. The kernel IR is
independent of the target.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Union

import sympy
import torch

Dim = Union[int, sympy.Expr]
Sizes = Mapping[sympy.Symbol, int]  # values of the size symbols


@dataclass(frozen=True)
class Access:
    """An element of buffer ``arg`` at ``offset + sum(strides[k] * index[k])``, counted in elements.

    ``strides`` has one entry per dimension of the space: the outer ones, then inner. 0 means the
    dimension is broadcast. ``arg`` counts through ``Kernel.args``.
    """

    arg: int
    strides: tuple[Dim, ...]
    offset: Dim = 0


@dataclass(frozen=True)
class Load:
    access: Access
    dtype: torch.dtype


@dataclass(frozen=True)
class Gather:
    """The element at ``access``, moved by ``stride`` times value ``index`` (an integer).

    ``bound``: the kernel asserts 0 <= index < bound; ``None``: the index is known to be valid.
    """

    access: Access
    index: int
    stride: Dim
    dtype: torch.dtype
    bound: Dim | None = None


@dataclass(frozen=True)
class Const:
    value: Union[int, float, bool]
    dtype: torch.dtype


@dataclass(frozen=True)
class Size:
    """A size expression as a value, the same at every point."""

    value: Dim
    dtype: torch.dtype


@dataclass(frozen=True)
class Index:
    """The index along dimension ``dim`` of the space (the last is inner)."""

    dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Compute:
    """A pointwise op on earlier values (statement numbers); ``op`` is a name in ``POINTWISE``.

    Operands have one dtype, except: ``where`` (bool, T, T), ``cast`` (any -> dtype), comparisons
    (T, T -> bool). ``dtype`` is the result's.
    """

    op: str
    args: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Reduce:
    """``kind`` in ``REDUCTIONS`` over the inner dimension; an empty row gives the identity."""

    kind: str
    arg: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Store:
    """Write ``value`` to ``access``. With inner stride 0, ``value`` is a row value and written once
    per row.
    """

    access: Access
    value: int


@dataclass(frozen=True)
class Accumulate(Store):
    """Combine ``value`` with the element at ``access``, moved by ``stride`` times value ``index``, atomically.

    ``kind``: one of ``ACCUMULATIONS``, whose identity the buffer holds before the kernel runs, or "put": the element
    becomes one of the values that have its index. GPU only.
    ``bound``: the kernel asserts 0 <= index < bound.
    """

    index: int
    stride: Dim
    bound: Dim
    kind: str


Stmt = Union[Load, Gather, Const, Size, Index, Compute, Reduce, Store]
Accessing = (Load, Gather, Store)
"""Statements that access memory: they have an ``access``."""

# Ops mean what torch's ops of the same name mean (NaN propagates through max/min, int division is floor or
# trunc as named, shifts and pow on ints are exact). They compute in the operand dtype, except that bf16 and
# f16 values are loaded to f32, computed in f32, and rounded at the store and before a cast to another dtype.
POINTWISE: dict[str, int] = {
    # unary
    **dict.fromkeys(
        "neg abs sign exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal sin cos tan tanh sinh cosh asin acos "
        "atan erf erfc sigmoid floor ceil round trunc logical_not bitwise_not isnan isinf cast".split(),
        1,
    ),
    # binary
    **dict.fromkeys(
        "add sub mul div div_floor div_trunc remainder fmod pow maximum minimum atan2 copysign "
        "eq ne lt le gt ge logical_and logical_or logical_xor "
        "bitwise_and bitwise_or bitwise_xor lshift rshift".split(),
        2,
    ),
    # ternary: where(c, a, b); fma(a, b, c) = a * b + c
    "where": 3,
    "fma": 3,
}

ACCUMULATIONS = {"sum": 0.0, "max": float("-inf")}
"""Kinds of ``Accumulate``, and their identities."""

REDUCTIONS = ("sum", "prod", "max", "min", "any", "all")


@dataclass(frozen=True)
class Arg:
    """One pointer of the kernel: a buffer with its element type."""

    dtype: torch.dtype
    written: bool


@dataclass(frozen=True)
class Kernel:
    """A fusion group ready for codegen; kernels compare by content. ``inner`` is a multiple of
    ``multiple``.
    """

    outer: tuple[Dim, ...]
    inner: Dim
    args: tuple[Arg, ...]
    body: tuple[Stmt, ...]
    multiple: int = 1

    def sizes(self) -> tuple[sympy.Expr, ...]:
        """The symbolic expressions that the code needs at run time, in a fixed order.

        The caller passes their values as int64 in this order: the kernel's ``ints``.
        """
        seen: dict[sympy.Expr, None] = {}
        for dim in (*self.outer, self.inner):
            _note(dim, seen)
        for stmt in self.body:
            if isinstance(stmt, Accessing):
                for dim in (*stmt.access.strides, stmt.access.offset):
                    _note(dim, seen)
                if isinstance(stmt, (Gather, Accumulate)):
                    _note(stmt.stride, seen)
                    if stmt.bound is not None:
                        _note(stmt.bound, seen)
            elif isinstance(stmt, Size):
                _note(stmt.value, seen)
        return tuple(seen)


def _note(dim: Dim, seen: dict[sympy.Expr, None]) -> None:
    if isinstance(dim, sympy.Expr) and not dim.is_number:
        seen.setdefault(dim)


def evaluate(dim: Dim, sizes: Mapping[sympy.Basic, int]) -> int:
    """The value of a size expression at these sizes."""
    return dim if isinstance(dim, int) else int(dim.xreplace(dict(sizes)))


def extent_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements of memory from the first to the last of a tensor that has any."""
    return 1 + sum((d - 1) * s for d, s in zip(shape, strides, strict=True))
