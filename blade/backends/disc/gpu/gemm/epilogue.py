# SPDX-License-Identifier: Apache-2.0
"""The pointwise epilogue of a product, as lines of the product's kernel.

    %3 = linear %x %w               v0 = acc
    %4 = add %3 %bias       ->      v1 = tl.load(a0 + c)
    %5 = tanh %4                    v2 = v0 + v1 ..; tl.store(a1 + c, v3)

An epilogue is a kernel over the rows and columns of the product. Its load of the product is the
accumulator, in f32 and unrounded. Every pointwise group that reads the product only at its own point can be
an epilogue.
"""

from dataclasses import dataclass

import torch

from blade.backends.disc.fusion.build_kernels import build_kernel
from blade.backends.disc.fusion.fuse import Fused, FusionGroup
from blade.backends.disc.gpu.emit import tile_table as shapes
from blade.backends.disc.gpu.emit.statements import TritonBody
from blade.backends.disc.gpu.emit.tiling import TritonSizes
from blade.backends.disc.ir.graph import Value, contiguous_strides, numel
from blade.backends.disc.ir.kernel import (
    Access,
    Arg,
    Compute,
    Gather,
    Kernel,
    Load,
    Stmt,
    Store,
)
from blade.backends.disc.ir.kernel_powers import constant_powers
from blade.backends.disc.ir.views import equal, same, view_of


@dataclass(frozen=True)
class GemmEpilogue:
    """``kernel`` over ``buffers``; buffer number ``product`` is the product itself and is not read."""

    kernel: Kernel
    buffers: tuple[Value, ...]
    product: int

    @property
    def operands(self) -> tuple[Value, ...]:
        """The values whose memory the lines touch."""
        return tuple(b for k, b in enumerate(self.buffers) if k != self.product)

    @property
    def pointers(self) -> tuple[str, ...]:
        """The operands' names in the text."""
        return tuple(f"p{k}" for k in range(len(self.buffers)) if k != self.product)


def plain_epilogue(value: Value) -> GemmEpilogue:
    """The epilogue of a product alone: the bias of a ``linear``, if it has one, and the store."""
    rows, columns = numel(value.shape[:-1]), value.shape[-1]
    strides = (columns, 1)
    args, buffers = [Arg(value.dtype, False)], [value]
    body: list[Stmt] = [Load(Access(0, strides), value.dtype)]
    if value.op == "linear" and len(value.args) == 3:
        bias = value.args[2]
        view = view_of(bias)
        assert view is not None, bias
        args.append(Arg(bias.dtype, False))
        buffers.append(view.base)
        body.append(Load(Access(1, (0, *view.strides), view.offset), bias.dtype))
        body.append(Compute("add", (0, 1), value.dtype))
    args.append(Arg(value.dtype, True))
    buffers.append(value)
    body.append(Store(Access(len(args) - 1, strides), len(body) - 1))
    return GemmEpilogue(Kernel((rows,), columns, tuple(args), tuple(body)), tuple(buffers), 0)


def group_epilogue(group: FusionGroup, product: Value, fused: Fused) -> GemmEpilogue | None:
    """``group`` as the epilogue of ``product``; ``None`` if it reads the product at other points."""
    if (
        group.row
        or group.is_scattered
        or not group.shape
        or (product.op == "linear" and len(product.args) != 2)
    ):
        return None
    built = build_kernel(
        FusionGroup(group.shape, group.members, True), fused
    )  # the last axis is not merged
    kernel = built.kernel
    if product not in built.buffers or not equal(kernel.inner, product.shape[-1]):
        return None
    if not equal(numel(kernel.outer), numel(product.shape[:-1])):
        return None
    position, space = built.buffers.index(product), (*kernel.outer, kernel.inner)
    for stmt in kernel.body:
        if isinstance(stmt, (Load, Store, Gather)) and stmt.access.arg == position:
            own = same(space, stmt.access.strides, contiguous_strides(space))
            if not isinstance(stmt, Load) or not own or stmt.access.offset != 0:
                return None
    return GemmEpilogue(kernel, built.buffers, position)


def epilogue_text(
    epilogue: GemmEpilogue, rows: int, columns: int, even: bool, indent: int, given: str = "acc"
) -> str:
    """The lines for blocks of ``rows`` x ``columns``; ``even``: blocks have no columns past the end.

    They read ``given`` (the product), ``rows``, ``height``, ``columns``, ``N``, ``block_n`` and the
    parameters.
    """
    kernel, sizes = constant_powers(epilogue.kernel), TritonSizes(epilogue.kernel.sizes())
    body = _EpilogueBody(
        kernel, epilogue.product, given, sizes, shapes.KernelTile(rows, columns, 4)
    )
    body.row_mask, body.masked, body.tiled = True, set() if even else {0}, True
    for i in range(len(kernel.body)):
        body.statement(i)
    lines = [*_indices(kernel, sizes), *body.head, *body.lines]
    return "".join(f"{' ' * indent}{line}\n" for line in lines)


class _EpilogueBody(TritonBody):
    """A body whose load of the product is the register ``given``."""

    def __init__(
        self, kernel: Kernel, product: int, given: str, sizes: TritonSizes, tile: shapes.KernelTile
    ) -> None:
        super().__init__(kernel, tile, sizes, frozenset(range(len(kernel.outer))))
        self.product, self.given = product, given

    def load(
        self,
        i: int,
        access: Access,
        dtype: torch.dtype,
        rows: bool = False,
        columns: bool = False,
        place: str | None = None,
    ) -> None:
        if access.arg == self.product:
            self.rows[i] = self.columns[i] = True
            self.define(i, self.given)
        else:
            super().load(i, access, dtype, rows, columns, place)


def _indices(kernel: Kernel, sizes: TritonSizes) -> list[str]:
    """The index along each outer dimension, [rows, 1], the columns, and masks."""
    outer = kernel.outer
    lines = [
        "c = tl.arange(0, BLOCK_N)[None, :]",
        "c0 = (block_n * BLOCK_N).to(tl.int64)",
        "rm = rows[:, None] < height",
        "cm = columns[None, :] < N",
        "over = rows[:, None]",
    ]
    for k in reversed(range(1, len(outer))):
        lines.append(f"size = tl.cast({sizes.text(outer[k])}, tl.int32)")
        lines.append(f"i{k} = (over % size).to(tl.int64)")
        lines.append("over = over // size")
    return [*lines, "i0 = over.to(tl.int64)"]
