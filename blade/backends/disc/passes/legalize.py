# SPDX-License-Identifier: Apache-2.0
"""Legalization: passes that leave only forms that later stages generate code for.

Each takes a graph and returns a new one; pipeline.py lists their order.
"""

from collections.abc import Callable

import torch

from blade.backends.disc.ir.constant_parts import parts_of
from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Value,
    contiguous_strides,
    numel,
)
from blade.backends.disc.ir.loop import body_of
from blade.backends.disc.ir.rewrite import rewrite_values
from blade.backends.disc.ir.views import reshape_strides, same, view_of

QUANTIZED = ("int8_linear", "int8_conv", "weight_only_linear")
"""Products with constant quantized weights: operands 1 to 3 are packed when the engine loads."""

NARROW_SOURCES = (torch.bfloat16, torch.float32)
"""Dtypes of results of bfloat16 products, and of constants that are packed for them."""

_KERNEL = {"conv": 1, "conv_weight_gradient": 2}
"""Positions of the weights of convolutions."""

aten = torch.ops.aten
READ_AS_DENSE = frozenset(
    {
        aten._weight_norm_interface.default,
        aten._weight_norm_interface_backward.default,
        aten._thnn_fused_lstm_cell.default,
        aten._thnn_fused_gru_cell.default,
        aten._thnn_fused_gru_cell_backward.default,
    }
)
"""Kernels of ATen that take operands for row-major: autograd, which alone calls them, makes them so."""

Packed = Callable[[Value], range]
"""Product -> positions of its packed operands, which are constants."""


def rows(graph: Graph) -> Graph:
    """Make every `reduce` reduce exactly the last axis of its operand."""

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.op != "reduce":
            return None
        x, axes = args[0], v.attrs["axes"]
        rank = len(x.shape)
        if axes == (rank - 1,):
            return None
        rest = [k for k in range(rank) if k not in axes]
        x = b.permute(x, [*rest, *axes])
        row = numel([v.args[0].shape[k] for k in axes])
        x = b.reshape(x, (*(v.args[0].shape[k] for k in rest), row))
        return b.reshape(b.reduce(v.attrs["kind"], x, [len(rest)]), v.shape)

    return rewrite_values(graph, step)


def bias_to_consumers(graph: Graph, packed: Packed | None = None) -> Graph:
    """Add a bias outside the GEMM if only fusible ops read the sum."""
    constants = packed or packed_operands
    users = graph.users()
    returned = {v.id for v in graph.outputs}

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.op != "linear" or len(args) < 3 or v.id in returned or constants(v):
            return None
        if not users[v.id] or not all(u.is_pointwise for u in users[v.id]):
            return None
        product = b.make("linear", args[:2], v.shape, v.dtype)
        return b.pointwise("add", product, b.broadcast(args[2], v.shape))

    return rewrite_values(graph, step)


def addressable(graph: Graph, packed: Packed | None = None, transposed: bool = False) -> Graph:
    """Give every value that is read through memory strides, by a copy before each layout without any.

    ``transposed``: products read transposed matrices as they lie.
    """
    constants = packed or packed_operands
    inside = absorbed(graph, constants)

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.id in inside:
            return None
        return _copy_before_layouts(b, v, args, constants(v), transposed)

    return rewrite_values(graph, step)


def _copy_before_layouts(
    b: IrBuilder,
    v: Value,
    args: list[Value],
    constants: range,
    transposed: bool,
) -> Value | None:
    """``constants``: positions of a product's packed operands."""
    if v.is_layout:
        inner = args[0] if view_of(args[0]) is not None else copy(b, args[0])
        made = b.make(v.op, [inner], v.shape, v.dtype, **v.attrs)
        if view_of(made) is not None:
            return made
        return b.make(v.op, [copy(b, inner)], v.shape, v.dtype, **v.attrs)
    if v.op == "scaled_linear":
        return b.make(v.op, _scaled_operands(b, args), v.shape, v.dtype, **v.attrs)
    if v.op in ("linear", *QUANTIZED):
        args = [a if k in constants else _addressed(b, a) for k, a in enumerate(args)]
        if v.op == "int8_conv":
            args[0] = _stored(b, args[0])
        elif not is_matrix(args[0], transposed and v.op == "linear"):
            args[0] = copy(b, args[0])
        rows = constants.stop if v.op in QUANTIZED else len(args)
        args[rows:] = [_stored(b, a) for a in args[rows:]]
        return b.make(v.op, args, v.shape, v.dtype, **v.attrs)
    if v.op == "matmul":
        args = [_addressed(b, a) for a in args]
        args[:2] = [a if has_batch(a) else copy(b, a) for a in args[:2]]
        dense = has_dense_rows(args[0]) or (transposed and has_dense_columns(args[0]))
        if v.dtype in NARROW_SOURCES and v.shape[-2] != 1 and not dense:
            args[0] = _copy_once(b, args[0])
        args[2:] = [_stored(b, a) for a in args[2:]]
        return b.make(v.op, args, v.shape, v.dtype)
    if v.op in ("conv", "conv_weight_gradient", "spatial"):
        kernel = _KERNEL.get(v.op) if transposed else None  # read in either order
        args = [
            a
            if k in constants
            else _addressed(b, a)
            if _is_laid_out(a) or k == kernel
            else _stored(b, a)
            for k, a in enumerate(args)
        ]
        return b.make(v.op, args, v.shape, v.dtype, **v.attrs)
    if v.op == "attention":
        args = [_addressed(b, a) for a in args]
        args[:3] = [a if has_dense_rows(a) else copy(b, a) for a in args[:3]]
        return b.make(v.op, args, v.shape, v.dtype, **v.attrs)
    if v.op in ("flash_attention", "flash_attention_gradient"):
        args = [_addressed(b, a) for a in args]
        rows = 3 if v.op == "flash_attention" else 4
        args[:rows] = [a if has_dense_rows(a) else copy(b, a) for a in args[:rows]]
        if v.op == "flash_attention_gradient":
            args[4:6] = [_stored(b, a) for a in args[4:6]]
        return b.make(v.op, args, v.shape, v.dtype, **v.attrs)
    if v.op == "gather":
        return b.make(v.op, [_addressed(b, args[0]), *args[1:]], v.shape, v.dtype, **v.attrs)
    if v.op == "loop":
        args = [
            _initial(b, v, k, a) if k < body_of(v).carried else _stored(b, a)
            for k, a in enumerate(args)
        ]
        return b.make(v.op, args, v.shape, v.dtype, **v.attrs)
    if v.op == "call" and v.attrs["target"] in READ_AS_DENSE:
        return b.make(v.op, [_stored(b, a) for a in args], v.shape, v.dtype, v.strides, **v.attrs)
    if v.op in ("call", "read", "concat", "written", "group_moments"):
        args = [_addressed(b, a) for a in args]
        return b.make(v.op, args, v.shape, v.dtype, v.strides, **v.attrs)
    return None


def _scaled_operands(b: IrBuilder, args: list[Value]) -> list[Value]:
    """Operands of a `scaled_linear`, stored where needed; a bias that is one number needs no memory."""
    x, w, *rest = args
    x = _addressed(b, x)
    rest = [a if a.op == "fill" else _stored(b, a) for a in rest]
    return [x if has_rows(x) else copy(b, x), _addressed(b, w), *rest]


def _initial(b: IrBuilder, loop: Value, index: int, v: Value) -> Value:
    """A copy of ``v`` for this loop alone, which writes over it."""
    return b.make("cast", [v], v.shape, v.dtype, state=(loop.id, index))


def copy(b: IrBuilder, v: Value) -> Value:
    """The same elements in a new row-major buffer."""
    return b.make("cast", [v], v.shape, v.dtype)


def _copy_once(b: IrBuilder, v: Value) -> Value:
    """``copy`` before a broadcast instead of after it."""
    if v.op != "broadcast":
        return copy(b, v)
    return b.make("broadcast", [copy(b, v.args[0])], v.shape, v.dtype, **v.attrs)


def _addressed(b: IrBuilder, v: Value) -> Value:
    return v if view_of(v) is not None else copy(b, v)


def _is_laid_out(v: Value) -> bool:
    """Whether ``v`` is a constant, or a packed one."""
    view = view_of(v)
    return v.op == "const" or (view is not None and view.base.op == "packed")


def _stored(b: IrBuilder, v: Value) -> Value:
    """``v`` if it is contiguous in row-major order, else a copy."""
    view = view_of(v)
    if view is not None and same(v.shape, contiguous_strides(v.shape), view.strides):
        return v
    return copy(b, v)


def packed_operands(v: Value) -> range:
    """Positions of the operands that a generated product packs once, as constants."""
    if v.op in QUANTIZED:
        return range(1, 4)
    if v.op == "conv":
        return range(1, 2) if has_joined_weights(v) else range(0)
    return range(1, len(v.args)) if is_packed(v) else range(0)


def has_joined_weights(v: Value) -> bool:
    """Whether the weights of the `conv` ``v`` are parts of constants, which only packing reads."""
    return v.args[1].op != "const" and parts_of(v.args[1]) is not None


def is_packed(v: Value) -> bool:
    """Whether ``v`` is a product with constants that the generated GEMM can pack once."""
    if v.op in QUANTIZED:
        return True
    if v.op != "linear" or not _has_packable_dtypes(v):
        return False
    return all(parts_of(a) is not None for a in v.args[1:])


def _has_packable_dtypes(v: Value) -> bool:
    """Equal floats of 32 or 64 bits; rows of bfloat16 times weights that are rounded to it when they are packed."""
    if v.args[0].dtype == torch.bfloat16:
        return all(a.dtype in NARROW_SOURCES for a in (v, *v.args[1:]))
    return v.dtype in (torch.float32, torch.float64) and all(a.dtype == v.dtype for a in v.args)


def absorbed(graph: Graph, packed: Packed = packed_operands) -> set[int]:
    """Ids of values that only packing reads; they are not computed at run time."""
    users, returned = graph.users(), {v.id for v in graph.outputs}
    return {
        v.id
        for v in graph.values
        if users[v.id]
        and v.id not in returned
        and all(_only_packs(u, v, packed(u)) for u in users[v.id])
    }


def _only_packs(user: Value, v: Value, constants: range) -> bool:
    return all(k in constants for k, a in enumerate(user.args) if a is v)


def has_rows(x: Value) -> bool:
    """Whether a GEMM can read ``x`` as a matrix: evenly spaced rows of adjacent elements."""
    view = view_of(x)
    if view is None or not has_dense_rows(x):
        return False
    flat = (numel(x.shape[:-1]),)
    return reshape_strides(x.shape[:-1], view.strides[:-1], flat) is not None


def is_matrix(x: Value, transposed: bool) -> bool:
    """Whether a GEMM can read ``x`` as it lies; ``transposed``: also as columns of adjacent elements."""
    return has_rows(x) or (transposed and len(x.shape) == 2 and has_dense_columns(x))


def has_dense_columns(x: Value) -> bool:
    """Whether the elements of each column of ``x`` are adjacent, in columns of their own."""
    view = view_of(x)
    return view is not None and view.strides[-2] == 1 and view.strides[-1] != 0


def has_dense_rows(x: Value) -> bool:
    """Whether the elements of each row of ``x`` are adjacent."""
    view = view_of(x)
    return view is not None and (x.shape[-1] == 1 or view.strides[-1] == 1)


def has_batch(x: Value) -> bool:
    """Whether the leading axes of ``x`` collapse to one batch axis."""
    view = view_of(x)
    if view is None:
        return False
    flat = (numel(x.shape[:-2]),)
    return reshape_strides(x.shape[:-2], view.strides[:-2], flat) is not None
