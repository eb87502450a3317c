# SPDX-License-Identifier: Apache-2.0
"""What a program runs, in order: kernels, launches, library code of ours, and ATen's ops."""

from dataclasses import dataclass

import sympy
import torch

from blade.backends.disc.ir import Value
from blade.backends.disc.kernel import Dim


@dataclass(frozen=True)
class KernelCall:
    """Run native code ``name`` on the buffers of ``buffers``, with ``ints`` as its sizes.

    ``over``: pairs (read, written) of which the second may lie in the bytes of the first (inplace.py).
    """

    name: str
    extent: Dim
    cost: Dim
    scratch: Dim
    buffers: tuple[Value, ...]
    ints: tuple[sympy.Expr, ...]
    over: tuple[tuple[Value, Value], ...] = ()


@dataclass(frozen=True)
class Fill:
    """One run of a packing kernel: what it writes of the given constant, ``ints`` as its sizes."""

    constant: int
    extent: int
    ints: tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """A buffer computed once per loaded engine from constants (FORMAT.md, `packs`).

    It starts as ``numel`` zeros; native code ``kernel`` runs on it once per fill.
    """

    kernel: str
    dtype: torch.dtype
    numel: int
    fills: tuple[Fill, ...]


@dataclass(frozen=True, eq=False)
class Scratch:
    """Memory of the arena that only the calls and launches holding this very object use."""

    dtype: torch.dtype
    numel: Dim


@dataclass(frozen=True)
class NativeCall:
    """Run library code we generate (cpu/native.py): a pointer per operand, ``ints`` as its sizes.

    A value's pointer is to its first element, wherever that lies; its strides go into ``ints``.
    ``over``: positions (read, written) of operands of which the second may lie in the bytes of the first.
    """

    name: str
    extent: Dim
    cost: Dim
    scratch: Dim
    operands: tuple[Value | Packed | Scratch, ...]
    ints: tuple[Dim, ...]
    over: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, eq=False)
class Counters:
    """``numel`` int32 of the arena: zero when the program begins, and left zero by whoever counts."""

    numel: int


Operand = Value | Packed | Scratch | Counters


@dataclass(frozen=True)
class Launch:
    """Launch the GPU function ``name`` over ``grid`` blocks: a pointer per operand, then ``ints``.

    A value's pointer is to its first element, wherever that lies. ``over`` as in a ``NativeCall``.
    ``when``: the relation between sizes without which it does not run; ``None``: it always does.
    """

    name: str
    grid: tuple[Dim, Dim, Dim]
    operands: tuple[Operand, ...]
    ints: tuple[Dim, ...]
    over: tuple[tuple[int, int], ...] = ()
    when: sympy.Basic | None = None


@dataclass(frozen=True)
class LibraryCall:
    """ATen's op for ``value``, where ``when`` holds: a launch serves the other sizes."""

    value: Value
    when: sympy.Basic


@dataclass(frozen=True)
class AttentionCall:
    """ATen's ``kernel`` (sdpa.py) for ``value``, an ``attention``; ``when``: as of a ``Launch``."""

    value: Value
    kernel: str
    when: sympy.Basic | None = None


Step = KernelCall | NativeCall | Launch | LibraryCall | AttentionCall | Value
