# SPDX-License-Identifier: Apache-2.0
"""Loops that carry values."""

from collections.abc import Callable

from blade.backends.disc.cpu.code import Code, Value

Body = Callable[[Value, list[Value]], list[Value]]


def carry(
    code: Code, low: Value, high: Value, step: Value, values: list[Value], body: Body
) -> list[Value]:
    """``scf.for`` over [low, high); ``body(at, values)`` gives the values after one step."""
    at = Value(code.fresh(), "i64", 1)
    head = f"scf.for {at.name} = {low.name} to {high.name} step {step.name}"
    if not values:
        code.open(head + " : i64")
        body(at, [])
        code.close()
        return []
    carried = [Value(code.fresh(), v.element, v.lanes) for v in values]
    pairs = ", ".join(f"{c.name} = {v.name}" for c, v in zip(carried, values))
    types = ", ".join(v.type for v in values)
    name = code.fresh()
    code.open(f"{name}:{len(values)} = {head} iter_args({pairs}) -> ({types}) : i64")
    after = body(at, carried)
    code.line(f"scf.yield {', '.join(v.name for v in after)} : {types}")
    code.close()
    return [Value(f"{name}#{k}", v.element, v.lanes) for k, v in enumerate(values)]
