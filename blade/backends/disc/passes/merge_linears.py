# SPDX-License-Identifier: Apache-2.0
"""Horizontal merging: products of one operand with several constant weights become one product.

    %q = linear %x %wq %bq               %w = concat %wq %wk %wv
    %k = linear %x %wk %bk        ->     %b = concat %bq %bk %bv
    %v = linear %x %wv %bv               %y = linear %x %w %b;  q, k, v are slices of %y's last axis

The concatenation costs no instruction: the weights are packed side by side when the engine loads, and
remain the fallback's tensors in the file. Only adjacent products (no other library op between them) are
merged, so that no result waits long for its readers, and only if every reader takes the slice as a strided
view. On GPUs, where launches are expensive, products of an operand that all layers read (a time step, a
text, an encoder's states) are merged even if they are not adjacent.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import sympy
import torch

from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Shape,
    Value,
    contiguous_strides,
    live,
    plain,
)
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.views import (
    StridedView,
    reshape_strides,
    view_of,
    viewed,
)
from blade.backends.disc.passes.legalize import (
    QUANTIZED,
    has_dense_rows,
    has_rows,
    is_packed,
)

FAR = 4  # fewest products of one operand that are merged across other library ops
_OF_FEW_BITS = (*QUANTIZED, "scaled_linear")
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def merge_linears(
    graph: Graph, known: Callable[[Value], bool] = is_packed, far: bool = False
) -> Graph:
    """``graph`` with adjacent products of one operand merged if their weights are ``known``.

    ``far``: merge products that are not adjacent too if at least ``FAR`` share an operand.
    """
    merged = {v.id: run for run in _runs(graph, known, far) for v in run}
    b = IrBuilder()
    new: dict[int, Value] = {}
    for v in live(graph):
        if v.id in new:
            continue
        run = merged.get(v.id)
        if run is None:
            args = [new[a.id] for a in v.args]
            new[v.id] = b.make(v.op, args, v.shape, v.dtype, v.strides, **v.attrs)
        else:
            new.update(_merge(b, run, new))
    outs = tuple(new[v.id] for v in graph.outputs)
    ins = tuple(new[v.id] for v in graph.inputs)
    rebuilt = replace(graph, values=b.values, outputs=outs, inputs=ins)
    rebuilt.values = live(rebuilt)
    return rebuilt


def _merge(b: IrBuilder, run: Sequence[Value], new: dict[int, Value]) -> dict[int, Value]:
    """One product for ``run``, whose other operands are constants; returns value id -> its slice."""
    first, columns = run[0], _columns(run)
    operands = [new[first.args[0].id]]
    for parts in _side_by_side(b, run, new):
        shape = (columns, *parts[0].shape[1:])
        if first.op == "scaled_linear" and all(p.op == "fill" for p in parts):  # without biases
            operands.append(b.fill(0, shape, parts[0].dtype))
        else:
            operands.append(b.make("concat", parts, shape, parts[0].dtype, axis=0))
    operands += [new[a.id] for a in first.args[4:]]
    whole = b.make(first.op, operands, (*first.shape[:-1], columns), first.dtype, **first.attrs)
    slices: dict[int, Value] = {}
    start: Dim = 0
    for v in run:
        slices[v.id] = b.slice(whole, len(v.shape) - 1, start, 1, v.shape[-1])
        start = start + v.shape[-1]
    return slices


def _side_by_side(
    b: IrBuilder, run: Sequence[Value], new: dict[int, Value]
) -> Iterator[list[Value]]:
    """Per operand, the constants of all products."""
    if run[0].op in _OF_FEW_BITS:
        yield from ([_constant(b, v.args[k], new) for v in run] for k in range(1, 4))
        return
    yield [_constant(b, v.args[1], new) for v in run]
    for dtype in _of_biases(run):  # one at most
        yield [_bias(b, v, new, dtype) for v in run]


def _shared(v: Value) -> tuple[object, ...]:
    """Properties that products must have in common to be merged."""
    rows = v.args[4:] if v.op in _OF_FEW_BITS else ()
    groups = v.args[2].shape[1:] if v.op in _OF_FEW_BITS else ()
    return (v.op, v.dtype, v.args[1].dtype, repr(v.attrs), groups, v.args[0], *rows)


def _fits(run: Sequence[Value], v: Value) -> bool:
    """Whether ``v`` is merged with ``run`` if their readers allow it."""
    return _shared(run[0]) == _shared(v) and len(_of_biases([*run, v])) <= 1


def _of_biases(run: Sequence[Value]) -> frozenset[torch.dtype]:
    return frozenset(v.args[2].dtype for v in run if len(v.args) == 3)


def _bias(b: IrBuilder, v: Value, new: dict[int, Value], dtype: torch.dtype) -> Value:
    return _constant(b, v.args[2], new) if len(v.args) == 3 else b.fill(0, v.shape[-1:], dtype)


def _constant(b: IrBuilder, v: Value, new: dict[int, Value]) -> Value:
    """``v``, a view of a constant, in the new graph; created if it comes later in the old one."""
    if v.id not in new:
        args = [_constant(b, a, new) for a in v.args]
        new[v.id] = b.make(v.op, args, v.shape, v.dtype, v.strides, **v.attrs)
    return new[v.id]


def _columns(run: Sequence[Value]) -> Dim:
    return plain(sum(v.shape[-1] for v in run))


def _runs(graph: Graph, known: Callable[[Value], bool], far: bool) -> list[list[Value]]:
    """Runs of at least two products to merge, in order."""
    users = graph.users()
    returned = {v.id for v in graph.outputs}
    runs: list[list[Value]] = [[]]
    for v in live(graph):
        if v.op in ("linear", *_OF_FEW_BITS, "matmul", "conv", "attention", "call"):
            if not known(v) or v.op == "int8_conv":
                runs.append([])
            elif runs[-1] and _fits(runs[-1], v):
                runs[-1].append(v)
            else:
                runs.append([v])
    runs = _joined(runs) if far else runs
    kept = [[v for v in run if _may_be_a_slice(v, run, users, returned)] for run in runs]
    return [run for run in kept if len(run) > 1]


def _joined(runs: Sequence[list[Value]]) -> list[list[Value]]:
    """Runs that share an operand as one run if they have at least ``FAR`` products together."""
    alike: dict[tuple[object, ...], list[list[Value]]] = {}
    for run in filter(None, runs):
        alike.setdefault((*_shared(run[0]), _of_biases(run)), []).append(run)
    joined: list[list[Value]] = []
    for same in alike.values():
        whole = [v for run in same for v in run]
        joined += [whole] if len(whole) >= FAR else same
    return joined


def _may_be_a_slice(
    v: Value, run: Sequence[Value], users: dict[int, list[Value]], returned: set[int]
) -> bool:
    """Whether all readers of ``v`` accept rows as far apart as the merged product's, without a copy."""
    strides = contiguous_strides((*v.shape[:-1], _columns(run)))
    return _is_readable(v, StridedView(v, strides), users, returned)


def _is_readable(
    v: Value, view: StridedView, users: dict[int, list[Value]], returned: set[int]
) -> bool:
    if v.id in returned:
        return False
    for user in users[v.id]:
        if user.is_layout:
            inner = viewed(user, view)
            copied = view_of(user) is None  # a slice would be copied as well
            if not copied and (inner is None or not _is_readable(user, inner, users, returned)):
                return False
        elif not _reads(user, v, view.strides):
            return False
    return True


def _reads(user: Value, v: Value, strides: Shape) -> bool:
    """Whether ``user`` reads its operand ``v`` with ``strides`` as cheaply as with its own."""
    if user.op in ("linear", "int8_linear", "weight_only_linear", "scaled_linear"):
        if user.args[0] is not v:
            return False
        return not has_rows(v) or (strides[-1] == 1 and _merges(v.shape[:-1], strides[:-1]))
    if user.op == "matmul":
        before = view_of(v)
        copied = before is None or not _merges(v.shape[:-2], before.strides[:-2])
        return copied or _merges(v.shape[:-2], strides[:-2])
    if user.op == "attention":
        return strides[-1] == 1 or not has_dense_rows(v)
    if user.op == "call":
        return bool(user.attrs["target"] is _ATTENTION) and strides[-1] == 1
    return user.op in ("concat", "reduce") or user.is_pointwise


def _merges(shape: Shape, strides: Shape) -> bool:
    return reshape_strides(shape, strides, (plain(sympy.Mul(*shape)),)) is not None
