# SPDX-License-Identifier: Apache-2.0
"""Passes over the IR that leave only forms the later stages have code for.

Each takes a graph and returns a new one; passes.py has the order they run in.
"""

from collections.abc import Callable

import torch

from blade.backends.disc.constants import parts_of
from blade.backends.disc.ir import Builder, Graph, Value, contiguous_strides, numel
from blade.backends.disc.rebuild import rebuild
from blade.backends.disc.views import reshape_strides, same, view_of

QUANTIZED = ("int8_linear", "int8_conv", "weight_only_linear")
"""Products with constant weights of few bits: operands 1 to 3 are laid out once."""

Packed = Callable[[Value], range]
"""Which operands of a product are constants that are laid out for it once."""


def rows(graph: Graph) -> Graph:
    """Every `reduce` reduces exactly its operand's last axis."""

    def step(b: Builder, v: Value, args: list[Value]) -> Value | None:
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

    return rebuild(graph, step)


def bias_to_consumers(graph: Graph, packed: Packed | None = None) -> Graph:
    """A bias whose sum is only read by fusible ops is added there, not in the GEMM."""
    constants = packed or packed_operands
    users = graph.users()
    returned = {v.id for v in graph.outputs}

    def step(b: Builder, v: Value, args: list[Value]) -> Value | None:
        if v.op != "linear" or len(args) < 3 or v.id in returned or constants(v):
            return None
        if not users[v.id] or not all(u.is_pointwise for u in users[v.id]):
            return None
        product = b.make("linear", args[:2], v.shape, v.dtype)
        return b.pointwise("add", product, b.broadcast(args[2], v.shape))

    return rebuild(graph, step)


def addressable(graph: Graph, packed: Packed | None = None) -> Graph:
    """Whatever is read through memory has strides: a copy goes before every layout that has none."""
    constants = packed or packed_operands
    inside = absorbed(graph, constants)

    def step(b: Builder, v: Value, args: list[Value]) -> Value | None:
        return None if v.id in inside else _copy_before_layouts(b, v, args, constants(v))

    return rebuild(graph, step)


def _copy_before_layouts(b: Builder, v: Value, args: list[Value], constants: range) -> Value | None:
    """``constants``: which operands of a product nobody reads as they are."""
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
        elif not has_rows(args[0]):
            args[0] = copy(b, args[0])
        rows = constants.stop if v.op in QUANTIZED else len(args)
        args[rows:] = [_stored(b, a) for a in args[rows:]]
        return b.make(v.op, args, v.shape, v.dtype, **v.attrs)
    if v.op == "matmul":
        args = [_addressed(b, a) for a in args]
        args[:2] = [a if has_batch(a) else copy(b, a) for a in args[:2]]
        if v.dtype == torch.float32 and v.shape[-2] != 1 and not has_dense_rows(args[0]):
            args[0] = _copy_once(b, args[0])
        args[2:] = [_stored(b, a) for a in args[2:]]
        return b.make(v.op, args, v.shape, v.dtype)
    if v.op in ("conv", "spatial"):
        args = [_addressed(b, a) if _is_laid_out(a) else _stored(b, a) for a in args]
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
    if v.op in ("call", "concat", "group_moments"):
        args = [_addressed(b, a) for a in args]
        return b.make(v.op, args, v.shape, v.dtype, v.strides, **v.attrs)
    return None


def _scaled_operands(b: Builder, args: list[Value]) -> list[Value]:
    """Of a `scaled_linear`: a bias that is one number has no memory."""
    x, w, *rest = args
    x = _addressed(b, x)
    rest = [a if a.op == "fill" else _stored(b, a) for a in rest]
    return [x if has_rows(x) else copy(b, x), _addressed(b, w), *rest]


def copy(b: Builder, v: Value) -> Value:
    """The same elements in a buffer of their own, row-major."""
    return b.make("cast", [v], v.shape, v.dtype)


def _copy_once(b: Builder, v: Value) -> Value:
    """``copy``; of what is broadcast, only of what is repeated."""
    if v.op != "broadcast":
        return copy(b, v)
    return b.make("broadcast", [copy(b, v.args[0])], v.shape, v.dtype, **v.attrs)


def _addressed(b: Builder, v: Value) -> Value:
    return v if view_of(v) is not None else copy(b, v)


def _is_laid_out(v: Value) -> bool:
    """A constant as it is, or in the order that was chosen for it."""
    view = view_of(v)
    return v.op == "const" or (view is not None and view.base.op == "packed")


def _stored(b: Builder, v: Value) -> Value:
    """``v``, or a copy, with its elements adjacent and row-major."""
    view = view_of(v)
    if view is not None and same(v.shape, contiguous_strides(v.shape), view.strides):
        return v
    return copy(b, v)


def packed_operands(v: Value) -> range:
    """Which operands are constants that the generated GEMM has laid out, once."""
    if v.op in QUANTIZED:
        return range(1, 4)
    return range(1, len(v.args)) if is_packed(v) else range(0)


def is_packed(v: Value) -> bool:
    """Does ``v`` multiply by constants that can be laid out for the generated GEMM, once?"""
    if v.op in QUANTIZED:
        return True
    if v.op != "linear" or v.dtype not in (torch.float32, torch.float64):
        return False
    if any(a.dtype != v.dtype for a in v.args):
        return False
    return all(parts_of(a) is not None for a in v.args[1:])


def absorbed(graph: Graph, packed: Packed = packed_operands) -> set[int]:
    """Ids of the values that only packed products read: nothing computes these at run time."""
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
    """Can a GEMM read ``x`` as a matrix: rows at one distance, elements of a row adjacent?"""
    view = view_of(x)
    if view is None or not has_dense_rows(x):
        return False
    flat = (numel(x.shape[:-1]),)
    return reshape_strides(x.shape[:-1], view.strides[:-1], flat) is not None


def has_dense_rows(x: Value) -> bool:
    """Are the elements of each row of ``x`` adjacent?"""
    view = view_of(x)
    return view is not None and (x.shape[-1] == 1 or view.strides[-1] == 1)


def has_batch(x: Value) -> bool:
    """Do the leading axes of ``x`` collapse to one batch axis?"""
    view = view_of(x)
    if view is None:
        return False
    flat = (numel(x.shape[:-2]),)
    return reshape_strides(x.shape[:-2], view.strides[:-2], flat) is not None
