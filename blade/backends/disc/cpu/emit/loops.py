# SPDX-License-Identifier: Apache-2.0
"""Loops that carry values."""

from collections.abc import Callable

from blade.backends.disc.cpu.emit.mlir_builder import MlirBuilder, SsaValue

Body = Callable[[SsaValue, list[SsaValue]], list[SsaValue]]


def carry(
    code: MlirBuilder,
    low: SsaValue,
    high: SsaValue,
    step: SsaValue,
    values: list[SsaValue],
    body: Body,
) -> list[SsaValue]:
    """``scf.for`` over [low, high); ``body(at, values)`` returns the values after one step."""
    at = SsaValue(code.fresh(), "i64", 1)
    head = f"scf.for {at.name} = {low.name} to {high.name} step {step.name}"
    if not values:
        code.open(head + " : i64")
        body(at, [])
        code.close()
        return []
    carried = [SsaValue(code.fresh(), v.element, v.lanes) for v in values]
    pairs = ", ".join(f"{c.name} = {v.name}" for c, v in zip(carried, values))
    types = ", ".join(v.type for v in values)
    name = code.fresh()
    code.open(f"{name}:{len(values)} = {head} iter_args({pairs}) -> ({types}) : i64")
    after = body(at, carried)
    code.line(f"scf.yield {', '.join(v.name for v in after)} : {types}")
    code.close()
    return [SsaValue(f"{name}#{k}", v.element, v.lanes) for k, v in enumerate(values)]
