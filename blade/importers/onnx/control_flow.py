# SPDX-License-Identifier: Apache-2.0
"""``If``, ``Loop`` and ``Scan`` as TorchScript's ``if``, ``for`` and ``while``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import torch

from blade.importers.onnx.emit.emitter import Emitter
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.table import NodeView, Row, row
from blade.importers.onnx.emit.types import read_type
from blade.importers.onnx.emit.values import (
    ConstantValue,
    HostValue,
    Number,
    OptionalValue,
    SequenceValue,
    Sizes,
    TensorValue,
    Value,
    annotation,
)
from blade.importers.onnx.import_graph import Env, GraphImporter


def _with_importer(function: Row) -> Row:
    """Rows that write subgraphs take the importer and the names that a subgraph sees."""
    function.takes_importer = True  # type: ignore[attr-defined]
    return function


@row("If")
@_with_importer
def write_if(
    e: Emitter, node: NodeView, importer: GraphImporter, env: Env, condition: Value
) -> tuple[Value, ...]:
    known = e.known(condition)
    if known is not None:
        taken = "then_branch" if bool(known.reshape(())) else "else_branch"
        return tuple(importer.subgraph(node.graph(taken), env))
    text = e.bool(condition)
    branches: list[tuple[list[str], list[Value]]] = []
    for name in ("then_branch", "else_branch"):
        with e.captured() as lines:
            results = importer.subgraph(node.graph(name), env)
            results = [_as_variable(e, one) for one in results]
        branches.append((lines, results))
    (then_lines, then), (else_lines, other) = branches
    merged = [_merged(e, a, b, name) for a, b, name in zip(then, other, node.outputs, strict=True)]
    for value in merged:
        if isinstance(value, OptionalValue):
            e.line(f"{value.text}: {annotation(value)} = None")
    for head, lines, results in (
        (f"if {text}:", then_lines, then),
        ("else:", else_lines, other),
    ):
        indent = e.indentation + "    "
        ends = [f"{indent}{_text(m)} = {_text(r)}" for m, r in zip(merged, results)]
        e.insert(head, [*lines, *ends])
    return tuple(merged)


def _as_variable(e: Emitter, value: Value) -> Value:
    """``value`` as something that has a text here: constants and host values become tensors."""
    if isinstance(value, (HostValue, ConstantValue)):
        return TensorValue(e.tensor(value), value.dtype, value.array.shape)
    return value


def _text(value: Value) -> str:
    assert not isinstance(value, (HostValue, ConstantValue))
    return value.text


def _merged(e: Emitter, a: Value, b: Value, name: str) -> Value:
    """The variable that holds ``a`` after one branch, and ``b`` after the other."""
    text = e.name(name or "unused")
    kinds = {type(a), type(b)}
    if kinds == {TensorValue}:
        assert isinstance(a, TensorValue) and isinstance(b, TensorValue)
        return TensorValue(text, a.dtype or b.dtype, common(a.dims, b.dims))
    if kinds == {SequenceValue}:
        assert isinstance(a, SequenceValue) and isinstance(b, SequenceValue)
        return SequenceValue(text, a.dtype or b.dtype, common(a.dims, b.dims))
    inner = next((one for one in (a, b) if not isinstance(one, OptionalValue)), None)
    if inner is None:
        assert isinstance(a, OptionalValue)
        inner = a.inner
    assert isinstance(inner, (TensorValue, SequenceValue))
    return OptionalValue(text, inner)


def common(a: Sizes | None, b: Sizes | None) -> Sizes | None:
    """What holds for both."""
    if a is None or b is None or len(a) != len(b):
        return None
    return tuple(x if x == y else None for x, y in zip(a, b))


@row("Loop")
@_with_importer
def write_loop(
    e: Emitter,
    node: NodeView,
    importer: GraphImporter,
    env: Env,
    trips: Value | None = None,
    condition: Value | None = None,
    *initial: Value,
) -> tuple[Value, ...]:
    body = node.graph("body")
    carried = len(initial)
    names = [e.name(one.name) for one in body.input[2:]]
    for name, value in zip(names, initial):
        e.line(f"{name}: {annotation(value)} = {_text(_as_variable(e, value))}")
    start = [_inside(one, name) for one, name in zip(initial, names)]
    lists = [e.assign("[]", "List[Tensor]", one.name) for one in body.output[1 + carried :]]
    count, keep = e.name("iteration"), e.name("keep")
    is_for = trips is not None and _never_stops(body, condition, e)
    limit = e.int(trips) if trips is not None else ""
    if not is_for:
        e.line(f"{count} = 0")
        e.line(f"{keep} = {'True' if condition is None else e.bool(condition)}")
    lines, ends = _body(e, importer, env, body, start, lists, (count, keep, is_for))
    while ends != [one.dims if isinstance(one, TensorValue) else None for one in start]:
        start = [_unranked(one, end) for one, end in zip(start, ends)]
        lines, ends = _body(e, importer, env, body, start, lists, (count, keep, is_for))
    if is_for:
        e.insert(f"for {count} in range({limit}):", lines)
    else:
        bound = f" and {count} < {limit}" if trips is not None else ""
        e.insert(f"while {keep}{bound}:", lines)
    scanned = [
        _stacked(e, name, one, node.outputs[carried + k])
        for k, (name, one) in enumerate(zip(lists, body.output[1 + carried :]))
    ]
    return (*start, *scanned)


def _never_stops(body: Any, condition: Value | None, e: Emitter) -> bool:
    """Whether the loop's condition holds whatever the body computes."""
    if condition is not None:
        known = e.known(condition)
        if known is None or not bool(known.reshape(())):
            return False
    returned = body.output[0].name
    if returned == body.input[1].name:
        return True
    for node in body.node:
        if returned in node.output:
            if node.op_type == "Identity":
                return bool(node.input[0] == body.input[1].name)
            if node.op_type == "Constant":
                return any(bool(np.all(_array(one))) for one in node.attribute)
    return any(one.name == returned and bool(np.all(_array(one))) for one in body.initializer)


def _array(proto: Any) -> Any:
    tensor = proto.t if isinstance(proto, onnx.AttributeProto) else proto
    return onnx.numpy_helper.to_array(tensor)


def _body(
    e: Emitter,
    importer: GraphImporter,
    env: Env,
    body: Any,
    carried: Sequence[Value],
    lists: Sequence[str],
    names: tuple[str, str, bool],
) -> tuple[list[str], list[Sizes | None]]:
    """The lines of the body, and the sizes of what it carries on."""
    count, keep, is_for = names
    iteration = HostValue(np.array(Number(count, "int", True), dtype=object), torch.int64)
    going = HostValue(np.array(True, dtype=object), torch.bool)
    with e.captured() as lines:
        results = importer.subgraph(body, env, [iteration, going, *carried])
        until, *rest = [_as_variable(e, one) for one in results]
        after = rest[: len(carried)]
        new = [e.name("next") for _ in after]
        for name, value in zip(new, after):
            e.line(f"{name} = {_text(value)}")
        for name, value in zip(lists, rest[len(carried) :]):
            e.line(f"{name}.append({e.tensor(value)})")
        for old, name in zip(carried, new):
            e.line(f"{_text(old)} = {name}")
        if not is_for:
            e.line(f"{keep} = {e.bool(until)}")
            e.line(f"{count} += 1")
    ends = [
        common(one.dims, value.dims)
        if isinstance(one, TensorValue) and isinstance(value, TensorValue)
        else None
        for one, value in zip(carried, after)
    ]
    return lines, ends


def _inside(value: Value, name: str) -> Value:
    """What a carried value is in the body."""
    if isinstance(value, (HostValue, ConstantValue)):
        return TensorValue(name, value.dtype, value.array.shape)
    if isinstance(value, OptionalValue):
        return OptionalValue(name, value.inner)
    kind = type(value)
    return kind(name, value.dtype, value.dims)


def _unranked(value: Value, dims: Sizes | None) -> Value:
    """A carried tensor whose sizes change from one iteration to the next."""
    if not isinstance(value, TensorValue):
        return value
    return TensorValue(value.text, value.dtype, dims)


def _stacked(e: Emitter, name: str, output: Any, wanted: str) -> Value:
    """The scan output: its iterations along a new first axis."""
    found = read_type(output.type)
    dims = None if found.dims is None else (None, *found.dims)
    if found.dtype is None:
        return e.let(f"torch.stack({name})", None, dims, wanted)
    inner = [d or 0 for d in found.dims or ()]
    device = f", device={e.anchor}.device" if e.anchor else ""
    empty = f"torch.zeros({[0, *inner]}, dtype={found.dtype}{device})"
    text = f"torch.stack({name}) if len({name}) > 0 else {empty}"
    return e.let(text, found.dtype, dims, wanted)


@row("Scan")
@_with_importer
def write_scan(
    e: Emitter, node: NodeView, importer: GraphImporter, env: Env, *inputs: Value
) -> tuple[Value, ...]:
    body = node.graph("body")
    scanned = node.int("num_scan_inputs", 1)
    count = len(inputs) - scanned
    if node.version < 9:
        raise NotImported("Scan of opset 8 has a batch axis.")
    initial, sequences = inputs[:count], inputs[count:]
    axes = node.ints("scan_input_axes") or [0] * scanned
    backwards = node.ints("scan_input_directions") or [0] * scanned
    results = len(body.output) - count
    out_axes = node.ints("scan_output_axes") or [0] * results
    out_backwards = node.ints("scan_output_directions") or [0] * results
    names = [e.name(one.name) for one in body.input[:count]]
    for name, value in zip(names, initial):
        e.line(f"{name} = {e.tensor(value)}")
    start = [_inside(one, name) for one, name in zip(initial, names)]
    lists = [e.assign("[]", "List[Tensor]", one.name) for one in body.output[count:]]
    length = e.size(sequences[0], axes[0])
    step = e.name("step")
    with e.captured() as lines:
        items = []
        for value, axis, back in zip(sequences, axes, backwards):
            at = f"{length} - 1 - {step}" if back else step
            dims = e.dims(value)
            rest = (
                None
                if dims is None
                else tuple(d for k, d in enumerate(dims) if k != axis % len(dims))
            )
            items.append(e.let(f"{e.tensor(value)}.select({axis}, {at})", e.dtype(value), rest))
        made = [_as_variable(e, one) for one in importer.subgraph(body, env, [*start, *items])]
        new = [e.name("next") for _ in start]
        for name, value in zip(new, made):
            e.line(f"{name} = {_text(value)}")
        for name, value in zip(lists, made[count:]):
            e.line(f"{name}.append({e.tensor(value)})")
        for old, name in zip(names, new):
            e.line(f"{old} = {name}")
    e.insert(f"for {step} in range({length}):", lines)
    stacked = []
    for k, name in enumerate(lists):
        found = read_type(body.output[count + k].type)
        text = f"torch.stack({name}, {out_axes[k]})"
        dims = None if found.dims is None else (None,) * (len(found.dims) + 1)
        if out_backwards[k]:
            text += f".flip([{out_axes[k]}])"
        stacked.append(e.let(text, found.dtype, dims, node.outputs[count + k]))
    return (*start, *stacked)
