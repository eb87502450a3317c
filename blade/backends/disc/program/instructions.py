# SPDX-License-Identifier: Apache-2.0
"""The instructions of a program, in order: kernels, launches, library code, and ATen ops."""

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch

from blade.backends.disc.fusion.fuse import Fused
from blade.backends.disc.ir.graph import Value
from blade.backends.disc.ir.kernel import Dim


@dataclass(frozen=True)
class KernelCall:
    """Run native code ``name`` on the buffers of ``buffers``, with ``ints`` as its sizes.

    ``over``: pairs (read, written); the second may use the bytes of the first (buffer_reuse.py).
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
    """One run of a packing kernel on a constant, with ``ints`` as its sizes."""

    constant: int
    extent: int
    ints: tuple[int, ...]


@dataclass(frozen=True)
class PackedBuffer:
    """A buffer computed once per loaded engine from constants (FORMAT.md, `packs`).

    It starts as ``numel`` zeros; native code ``kernel`` runs on it once per fill.
    """

    kernel: str
    dtype: torch.dtype
    numel: int
    fills: tuple[Fill, ...]


@dataclass(frozen=True, eq=False)
class ScratchBuffer:
    """Arena memory shared by exactly those calls and launches that hold this object."""

    dtype: torch.dtype
    numel: Dim


@dataclass(frozen=True)
class NativeCall:
    """Run generated library code (cpu/library_kernels.py): a pointer per operand, ``ints`` as its sizes.

    A value's pointer is to its first element, at any offset; its strides are among ``ints``.
    ``over``: positions (read, written) of operands; the second may use the bytes of the first.
    """

    name: str
    extent: Dim
    cost: Dim
    scratch: Dim
    operands: tuple[Value | PackedBuffer | ScratchBuffer, ...]
    ints: tuple[Dim, ...]
    over: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, eq=False)
class Counters:
    """``numel`` int32 of the arena: zero at the start of the program, and reset to zero by their user."""

    numel: int


Operand = Value | PackedBuffer | ScratchBuffer | Counters


@dataclass(frozen=True)
class Launch:
    """Launch the GPU function ``name`` over ``grid`` blocks: a pointer per operand, then ``ints``.

    A value's pointer is to its first element, at any offset. ``over`` as in ``NativeCall``. ``when``: run
    only if this relation between sizes holds; ``None``: always. ``filled``: positions of operands, whole
    buffers, and the number that fills them before the launch.
    """

    name: str
    grid: tuple[Dim, Dim, Dim]
    operands: tuple[Operand, ...]
    ints: tuple[Dim, ...]
    over: tuple[tuple[int, int], ...] = ()
    when: sympy.Basic | None = None
    filled: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class LibraryCall:
    """The ATen op of ``value``, run if ``when`` holds; a launch covers the other sizes."""

    value: Value
    when: sympy.Basic


@dataclass(frozen=True)
class AttentionCall:
    """ATen's ``kernel`` (attention_calls.py) for ``value``, an ``attention``; ``when`` as in ``Launch``."""

    value: Value
    kernel: str
    when: sympy.Basic | None = None


@dataclass(frozen=True)
class LoopCall:
    """``steps``, the instructions of ``body``, as often as the ``loop`` ``value`` says."""

    value: Value
    body: Fused
    steps: Sequence["Instruction"]


Instruction = KernelCall | NativeCall | Launch | LibraryCall | AttentionCall | LoopCall | Value
