# SPDX-License-Identifier: Apache-2.0
"""torch's higher-order operators as ``prim::If`` and ``prim::Loop``, or inlined.

``cond`` becomes an If, ``while_loop`` a Loop with a condition, ``scan`` and ``map`` a Loop over the first
axis, whose results are collected in lists and stacked. A change of the gradient mode is its subgraph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from blade.capture.exported.functionalized import (
    write_functionalized,
    write_functionalized_bases,
)
from blade.capture.exported.numbers import value_of
from blade.core.reason import Code
from blade.errors import Refused
from blade.graph.torchscript.writer import BOOL, INT, TENSOR, ScriptWriter, Values

Run = Callable[[fx.GraphModule, Sequence[Any]], Any]
"""Writes the nodes of a subgraph for these inputs; returns what it returns."""

_LIST = torch._C.ListType(TENSOR)


def write_higher_order(
    writer: ScriptWriter, run: Run, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """The results of the operator ``torch.ops.higher_order.<name>``.

    Raises ``Refused`` for an operator that TorchScript cannot express.
    """
    if name in _FUNCTIONALIZED:
        return _FUNCTIONALIZED[name](writer, args[0], kwargs)
    if name == "wrap_with_set_grad_enabled":
        _, body, *operands = args
        return run(body, operands)
    if name not in _WRITERS:
        what = f"The higher-order operator {name!r} has no form in TorchScript."
        raise Refused(Code.EXPORT_FAILED, what)
    return _WRITERS[name](writer, run, *args, **kwargs)


_FUNCTIONALIZED = {
    "auto_functionalized": write_functionalized,
    "auto_functionalized_v2": write_functionalized_bases,
}


def _cond(
    writer: ScriptWriter,
    run: Run,
    condition: Any,
    then: fx.GraphModule,
    other: fx.GraphModule,
    operands: Sequence[Any] = (),
) -> list[Any]:
    if not isinstance(condition, torch._C.Value):
        return _list(run(then if condition else other, operands))
    return list(
        writer.branch(
            _as_bool(writer, condition),
            lambda: _values(writer, run(then, operands)),
            lambda: _values(writer, run(other, operands)),
        )
    )


def _while_loop(
    writer: ScriptWriter,
    run: Run,
    condition: fx.GraphModule,
    body: fx.GraphModule,
    carried: Sequence[Any],
    additional: Sequence[Any] = (),
) -> list[Any]:
    def goes_on(values: Sequence[Any]) -> torch._C.Value:
        [found] = _list(run(condition, [*values, *additional]))
        return _as_bool(writer, found)

    def trip(_: torch._C.Value, values: Values) -> tuple[torch._C.Value, Values]:
        new = _values(writer, run(body, [*values, *additional]))
        return goes_on(new), new

    start = _values(writer, carried)
    return list(writer.loop(None, goes_on(start), start, trip))


def _scan(
    writer: ScriptWriter,
    run: Run,
    body: fx.GraphModule,
    init: Sequence[Any],
    xs: Sequence[Any],
    additional: Sequence[Any] = (),
) -> list[Any]:
    def step(carried: Values, slices: Values) -> tuple[Values, Values]:
        made = _values(writer, run(body, [*carried, *slices, *additional]))
        return made[: len(init)], made[len(init) :]

    returned = next(node for node in body.graph.nodes if node.op == "output").args[0]
    return _over_first_axis(writer, step, _values(writer, init), xs, len(returned) - len(init))


def _map(
    writer: ScriptWriter,
    run: Run,
    body: fx.GraphModule,
    xs: Sequence[Any],
    additional: Sequence[Any] = (),
) -> list[Any]:
    def step(_: Values, slices: Values) -> tuple[Values, Values]:
        return [], _values(writer, run(body, [*slices, *additional]))

    returned = next(node for node in body.graph.nodes if node.op == "output").args[0]
    return _over_first_axis(writer, step, [], xs, len(returned))


def _over_first_axis(
    writer: ScriptWriter,
    step: Callable[[Values, Values], tuple[Values, Values]],
    init: Values,
    xs: Sequence[torch._C.Value],
    count: int,
) -> list[Any]:
    """The carried values and ``count`` stacked results."""
    zero = writer.constant(0)
    lists = [writer.list_of([], TENSOR) for _ in range(count)]

    def trip(index: torch._C.Value, carried: Values) -> tuple[None, Values]:
        slices = [_call(writer, torch.ops.aten.select.int, [x, zero, index]) for x in xs]
        new, results = step(carried, slices)
        for collected, result in zip(lists, results, strict=True):
            writer.op("aten::append", [collected, result], _LIST)
        return None, new

    trips = writer.op("aten::size", [xs[0], zero], INT)
    last = writer.loop(trips, None, init, trip)
    return [*last, *(_call(writer, torch.ops.aten.stack.default, [one, zero]) for one in lists)]


def _as_bool(writer: ScriptWriter, value: Any) -> torch._C.Value:
    value = value_of(writer, value)
    return value if value.type().kind() == "BoolType" else writer.op("aten::Bool", [value], BOOL)


def _call(writer: ScriptWriter, overload: torch._ops.OpOverload, values: Values) -> torch._C.Value:
    made = writer.call(overload, values)
    assert isinstance(made, torch._C.Value), (overload, made)
    return made


def _list(returned: Any) -> list[Any]:
    return list(returned) if isinstance(returned, (list, tuple)) else [returned]


def _values(writer: ScriptWriter, returned: Any) -> Values:
    return [value_of(writer, one) for one in _list(returned)]


_WRITERS: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "map_impl": _map,
}
