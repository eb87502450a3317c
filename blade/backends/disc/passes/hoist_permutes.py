# SPDX-License-Identifier: Apache-2.0
"""Hoists permutations that would need a copy above the op before them, which then writes in that order.

    %3 = add %1 %2                          %3 = permute %1      strided reads, no copy
    %4 = permute %3         becomes         %4 = permute %2
    %5 = conv %4 ...                        %5 = add %3 %4
                                            %6 = conv %5 ...

Applies only if every reader of the op wants the same order: otherwise the value would be written twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from blade.backends.disc.ir.graph import (
    LEAVES,
    Graph,
    IrBuilder,
    Rule,
    Shape,
    Value,
    contiguous_strides,
    live,
)
from blade.backends.disc.ir.views import same, view_of
from blade.backends.disc.passes.legalize import has_batch, has_rows, is_matrix

Perm = tuple[int, ...]


def inverse(perm: Sequence[int]) -> Perm:
    """The inverse permutation of ``perm``."""
    return tuple(perm.index(k) for k in range(len(perm)))


def hoist_permutes(
    graph: Graph, rules: Mapping[str, Sequence[Rule]], transposed: bool = False
) -> Graph:
    """Rebuild ``graph`` through ``rules``, with each op computed in the order that its readers want.

    ``transposed``: products read transposed matrices as they lie.
    """
    orders = _orders(graph, transposed)
    if not orders:
        return graph
    b = IrBuilder(rules)
    new: dict[int, Value] = {}
    for v in live(graph):
        args = [new[a.id] for a in v.args]
        if v.id in orders:
            new[v.id] = _ordered(b, v, args, orders[v.id])
        else:
            new[v.id] = b.make(v.op, args, v.shape, v.dtype, v.strides, **v.attrs)
    made = replace(
        graph,
        values=b.values,
        outputs=tuple(new[v.id] for v in graph.outputs),
        inputs=tuple(new[v.id] for v in graph.inputs),
    )
    made.values = live(made)
    return made


def _ordered(b: IrBuilder, v: Value, args: Sequence[Value], perm: Perm) -> Value:
    """``v`` as a permutation of the same op, computed in the order ``perm``."""
    attrs = dict(v.attrs)
    if v.op == "concat":
        attrs["axis"] = perm.index(attrs["axis"])
    operands = [b.permute(a, perm) for a in args]
    made = b.make(v.op, operands, [v.shape[k] for k in perm], v.dtype, **attrs)
    return b.permute(made, inverse(perm))


def _orders(graph: Graph, transposed: bool) -> dict[int, Perm]:
    """Value id -> the one permutation that all its readers want, if it is not the identity."""
    wanted: dict[int, set[Perm]] = {v.id: set() for v in graph.values}
    copied = {a.id for v in graph.values for a in v.args if _copies(v, a, transposed)}
    for v, strides in zip(graph.outputs, graph.output_strides, strict=True):
        copied |= {v.id} if _is_restrided(v, contiguous_strides(v.shape), strides) else set()
        if v.op != "permute":
            wanted[v.id].add(_identity(v))
    orders: dict[int, Perm] = {}
    for v in reversed(graph.values):
        order = _agreed(v, wanted[v.id])
        if order is not None:
            orders[v.id] = order
        for a in v.args:
            if v.op == "permute" and v.id in copied:
                wanted[a.id].add(v.attrs["perm"])
            else:
                wanted[a.id].add(order or _identity(a))
    return orders


def _agreed(v: Value, wanted: set[Perm]) -> Perm | None:
    """The only order in ``wanted`` if computing ``v`` in it costs nothing more; else ``None``."""
    if not (v.is_pointwise or v.op == "concat") or len(wanted) != 1:
        return None
    (perm,) = wanted
    if perm == _identity(v):
        return None
    crossed = sum(1 for _ in _crossed(v, perm))
    return perm if crossed <= 1 or v.op == "concat" else None


def _crossed(v: Value, perm: Perm) -> Iterator[Value]:
    """Operands that would be read against their memory order; two such reads cost more than a copy."""
    for a in v.args:
        if a.op in LEAVES or a.op == "broadcast":
            continue
        if a.op != "permute" or a.attrs["perm"] != inverse(perm):
            yield a


def _identity(v: Value) -> Perm:
    return tuple(range(len(v.shape)))


def _copies(user: Value, operand: Value, transposed: bool) -> bool:
    """Whether ``user`` would have ``operand``, a permutation, copied before reading it."""
    if operand.op != "permute":
        return False
    if user.op in ("conv", "int8_conv", "conv_weight_gradient", "spatial"):
        return True
    if user.op == "linear":
        return operand is user.args[0] and not is_matrix(operand, transposed)
    if user.op in ("int8_linear", "weight_only_linear", "scaled_linear"):
        return operand is user.args[0] and not has_rows(operand)
    if user.op == "matmul":
        return not has_batch(operand)
    return user.op == "reshape" and view_of(user) is None


def _is_restrided(v: Value, contiguous: Shape, strides: Shape) -> bool:
    """Whether ``v``, a permuted output, must be returned in row-major order."""
    return v.op == "permute" and same(v.shape, contiguous, strides)
