# SPDX-License-Identifier: Apache-2.0
"""Rows of `lstm`, `gru` and `rnn`: a loop over time per layer and direction.

    loop over time:        gates = linear(x[t], w, b) + linear(h, u, c)
                           h = tanh(gates)                                collected: the output

The product with x is one for all times (``hoist_products``). The way back reads x from its end, and its
iterations put their results in place from the last one to the first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.graph import IrBuilder, Value
from blade.backends.disc.ir.late_sizes import late_symbols
from blade.backends.disc.ir.loop import LoopBody, body_graph, make_loop

aten = torch.ops.aten

Gates = list[Value]
Step = Callable[[IrBuilder, Gates, Gates, list[Value]], list[Value]]
"""The new state of what x and h contribute to each gate, and the state; the first of a state is h."""


@lowers(aten.lstm.input)
def lstm(lo: Lowering, x: Value, hx: Sequence[Value], *given: Any) -> list[Value]:
    return _network(lo, x, hx, 4, _lstm, *given)


@lowers(aten.gru.input)
def gru(lo: Lowering, x: Value, hx: Value, *given: Any) -> list[Value]:
    return _network(lo, x, [hx], 3, _gru, *given)


@lowers(aten.rnn_tanh.input)
def rnn_tanh(lo: Lowering, x: Value, hx: Value, *given: Any) -> list[Value]:
    return _network(lo, x, [hx], 1, _tanh, *given)


@lowers(aten.rnn_relu.input)
def rnn_relu(lo: Lowering, x: Value, hx: Value, *given: Any) -> list[Value]:
    return _network(lo, x, [hx], 1, _relu, *given)


def _lstm(b: IrBuilder, x: Gates, h: Gates, state: list[Value]) -> list[Value]:
    i, f, g, o = (b.pointwise("add", *both) for both in zip(x, h, strict=True))
    new = b.pointwise("mul", b.pointwise("sigmoid", i), b.pointwise("tanh", g))
    cell = b.pointwise("fma", b.pointwise("sigmoid", f), state[1], new)
    return [b.pointwise("mul", b.pointwise("sigmoid", o), b.pointwise("tanh", cell)), cell]


def _gru(b: IrBuilder, x: Gates, h: Gates, state: list[Value]) -> list[Value]:
    reset, keep = (
        b.pointwise("sigmoid", b.pointwise("add", *both)) for both in zip(x[:2], h[:2], strict=True)
    )
    new = b.pointwise("tanh", b.pointwise("fma", reset, h[2], x[2]))
    return [b.pointwise("fma", b.pointwise("sub", state[0], new), keep, new)]


def _tanh(b: IrBuilder, x: Gates, h: Gates, state: list[Value]) -> list[Value]:
    return [b.pointwise("tanh", b.pointwise("add", x[0], h[0]))]


def _relu(b: IrBuilder, x: Gates, h: Gates, state: list[Value]) -> list[Value]:
    total = b.pointwise("add", x[0], h[0])
    return [b.pointwise("maximum", total, b.fill(0, total.shape, total.dtype))]


@dataclass(frozen=True)
class _Weights:
    """Of one layer and direction. ``project``: that of a projected LSTM."""

    x: list[Value]
    h: list[Value]
    project: list[Value]


def _network(
    lo: Lowering,
    x: Value,
    hx: Sequence[Value],
    gates: int,
    step: Step,
    params: Sequence[Value],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> list[Value]:
    if x.dtype not in lo.forms.recurrences or (train and dropout) or late_symbols(x.shape):
        raise lo.otherwise()
    time = 1 if batch_first else 0
    lo.at_least(x.shape[time], 1, "times of a recurrent layer")
    ways = 2 if bidirectional else 1
    ends: list[list[Value]] = []
    cells = _weights(params, 4 if has_biases else 2, num_layers * ways)
    for layer in range(num_layers):
        both = []
        for way in range(ways):
            begin = [_row(lo.b, h, layer * ways + way) for h in hx]
            *state, output = _layer(lo.b, x, time, begin, next(cells), gates, step, way == 1)
            both.append(output)
            ends.append(state)
        x, time = _joined(lo.b, both, 2), 0
    if batch_first:
        x = lo.b.permute(x, (1, 0, 2))
    states = zip(*ends, strict=True)
    lasts = [[lo.b.reshape(s, (1, *s.shape)) for s in several] for several in states]
    return [x, *(_joined(lo.b, several, 0) for several in lasts)]


def _weights(params: Sequence[Value], each: int, count: int) -> Iterator[_Weights]:
    own = len(params) // count  # one more if projected
    for k in range(count):
        part = list(params[k * own : (k + 1) * own])
        yield _Weights(part[0:each:2], part[1:each:2], part[each:])


def _layer(
    b: IrBuilder,
    x: Value,
    time: int,
    begin: list[Value],
    weights: _Weights,
    gates: int,
    step: Step,
    backwards: bool,
) -> list[Value]:
    """The last state, and the hidden states at all times, [time, batch, units]."""
    body = _Body(b, [*begin, x])
    inner, (*state, all_x) = body.b, body.values
    length = x.shape[time]
    at = length - 1 - body.index if backwards else body.index
    here = inner.slice(all_x, time, at, 1, 1)
    rows = inner.reshape(here, tuple(d for k, d in enumerate(x.shape) if k != time))
    x_gates = _split(inner, body.product(rows, weights.x), gates)
    h_gates = _split(inner, body.product(state[0], weights.h), gates)
    new = step(inner, x_gates, h_gates, state)
    if weights.project:
        new[0] = body.product(new[0], weights.project)
    return body.loop(new, length, backwards)


class _Body:
    """A loop's body in the making. ``values``: its inputs that stand for ``given``, of which the state is a part."""

    def __init__(self, outer: IrBuilder, given: list[Value]) -> None:
        self.outer, self.given = outer, given
        self.b = outer.nested()
        # Loops of one graph differ, and so do their indices.
        self.index = sympy.Symbol(f"time{len(outer.values)}", integer=True, nonnegative=True)
        self.values = [self._input(k, value) for k, value in enumerate(given)]

    def product(self, rows: Value, weights: list[Value]) -> Value:
        weight, *bias = (self._read(w) for w in weights)
        shape = (*rows.shape[:-1], weight.shape[0])
        return self.b.make("linear", (rows, weight, *bias), shape, rows.dtype)

    def loop(self, state: list[Value], count: Any, backwards: bool) -> list[Value]:
        """The last state, and the first of the states of all iterations."""
        graph = body_graph(self.b, self.values, (*state, state[0]))
        body = LoopBody(graph, self.index, len(state), backwards)
        shapes = [*(s.shape for s in state), (count, *state[0].shape)]
        results = [(shape, state[0].dtype) for shape in shapes]
        return make_loop(self.outer, self.given, body, count, results)

    def _read(self, value: Value) -> Value:
        """A weight: the same constant, or an input that every iteration reads."""
        if value.op == "const":
            attrs = dict(value.attrs)
            return self.b.make("const", (), value.shape, value.dtype, value.strides, **attrs)
        found = next((k for k, known in enumerate(self.given) if known is value), None)
        if found is None:
            found = len(self.given)
            self.given.append(value)
            self.values.append(self._input(found, value))
        return self.values[found]

    def _input(self, index: int, like: Value) -> Value:
        return self.b.make("input", (), like.shape, like.dtype, index=index)


def _row(b: IrBuilder, value: Value, index: int) -> Value:
    return b.reshape(b.slice(value, 0, index, 1, 1), value.shape[1:])


def _split(b: IrBuilder, value: Value, parts: int) -> list[Value]:
    units = value.shape[-1] // parts
    return [b.slice(value, len(value.shape) - 1, k * units, 1, units) for k in range(parts)]


def _joined(b: IrBuilder, parts: list[Value], axis: int) -> Value:
    total = sum(p.shape[axis] for p in parts)
    shape = tuple(total if k == axis else d for k, d in enumerate(parts[0].shape))
    return b.make("concat", parts, shape, parts[0].dtype, axis=axis)
