# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers: torch's own ops where these compute the same, else a loop over time."""

from __future__ import annotations

from blade.importers.onnx.emit.emitter import Emitter, number_text
from blade.importers.onnx.emit.table import NodeView, row
from blade.importers.onnx.emit.values import TensorValue, Value

_ORDER = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}
"""Where torch's blocks of gates are in ONNX: iofc for ifgo, zrh for rzn."""
_DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
_ALPHAS = {
    "LeakyRelu": 0.01,
    "ThresholdedRelu": 1.0,
    "HardSigmoid": 0.2,
    "Elu": 1.0,
    "Affine": 1.0,
    "ScaledTanh": 1.0,
}
_BETAS = {"HardSigmoid": 0.5, "ScaledTanh": 1.0}


@row("LSTM", "GRU", "RNN")
def recurrent(
    e: Emitter,
    node: NodeView,
    x: Value,
    w: Value,
    r: Value,
    b: Value | None = None,
    lengths: Value | None = None,
    h: Value | None = None,
    c: Value | None = None,
    peephole: Value | None = None,
) -> tuple[TensorValue, ...]:
    layer = _Layer(e, node, x, w, r, b, h, c)
    names = [one.decode() for one in node.attributes.get("activations", [])] or layer.defaults
    is_relu = node.op == "RNN" and set(names) == {"Relu"}
    special = lengths is not None or peephole is not None or node.float("clip", 0.0) > 0
    special |= bool(node.int("input_forget", 0)) or not (names == layer.defaults or is_relu)
    special |= node.op == "GRU" and not node.int("linear_before_reset", 0)
    if special:
        made = layer.by_steps(names, lengths, peephole)
    else:
        made = layer.by_op("rnn_relu" if is_relu else layer.name)
    return layer.results(*made)


class _Layer:
    """The parts of a recurrent layer as texts: x [time, batch, in], states [directions, batch, hidden]."""

    def __init__(
        self,
        e: Emitter,
        node: NodeView,
        x: Value,
        w: Value,
        r: Value,
        b: Value | None,
        h: Value | None,
        c: Value | None,
    ) -> None:
        self.e, self.node = e, node
        self.name = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn_tanh"}[node.op]
        self.way = node.text("direction", "forward")
        self.count = 2 if self.way == "bidirectional" else 1
        self.defaults = _DEFAULTS[node.op] * self.count
        self.is_batch_first = bool(node.int("layout", 0))
        self.dtype, self.sizes = e.dtype(x), e.sizes(x)
        text = e.tensor(x)
        self.x = e.let(f"{text}.transpose(0, 1)", name="x").text if self.is_batch_first else text
        self.w, self.r = e.tensor(w), e.tensor(r)
        hidden = node.attributes.get("hidden_size")
        self.hidden = e.size(r, 2) if hidden is None else int(hidden)
        gates = len(_ORDER[node.op])
        self.b = (
            e.tensor(b)
            if b is not None
            else self._zeros(f"[{self.count}, 2 * {gates} * {self.hidden}]")
        )
        self.h, self.c = self._state(h), self._state(c)

    def _zeros(self, sizes: str) -> str:
        made = f"torch.zeros({sizes}, dtype={self.dtype}, device={self.x}.device)"
        return self.e.let(made, name="zeros").text

    def _state(self, given: Value | None) -> str:
        if given is None:
            return self._zeros(f"[{self.count}, {self.x}.size(1), {self.hidden}]")
        text = self.e.tensor(given)
        if self.is_batch_first:
            return self.e.let(f"{text}.transpose(0, 1).contiguous()", name="state").text
        return text

    def by_op(self, name: str) -> tuple[str, str, str]:
        """torch's op; it has no single backward direction, so that time is turned."""
        e, order = self.e, _ORDER[self.node.op]
        weights = []
        for k in range(self.count):
            half = len(order)
            bias = e.let(f"torch.chunk({self.b}[{k}], 2)[0]", name="bias").text
            state_bias = e.let(f"torch.chunk({self.b}[{k}], 2)[1]", name="bias").text
            for text in (f"{self.w}[{k}]", f"{self.r}[{k}]", bias, state_bias):
                moved = text if half == 1 else f"run.reordered({text}, {order})"
                weights.append(e.let(moved, name="weight").text)
        x = self.x if self.way != "reverse" else e.let(f"{self.x}.flip([0])", name="x").text
        options = f"[{', '.join(weights)}], True, 1, 0.0, False, {self.count == 2}, False"
        y, h, c = e.name("y"), e.name("h"), self.c
        if name == "lstm":
            c = e.name("c")
            e.line(f"{y}, {h}, {c} = torch.lstm({x}, [{self.h}, {self.c}], {options})")
        else:
            e.line(f"{y}, {h} = torch.{name}({x}, {self.h}, {options})")
        if self.way == "reverse":
            y = e.let(f"{y}.flip([0])", name="y").text
        shape = f"[{self.x}.size(0), {self.x}.size(1), {self.count}, {self.hidden}]"
        return e.let(f"{y}.reshape({shape}).transpose(1, 2)", name="y").text, h, c

    def by_steps(
        self, names: list[str], lengths: Value | None, peephole: Value | None
    ) -> tuple[str, str, str]:
        """A loop over time, for each direction."""
        e, node = self.e, self.node
        peep = (
            e.tensor(peephole)
            if peephole is not None
            else self._zeros(f"[{self.count}, 3 * {self.hidden}]")
        )
        ends = "None" if lengths is None else e.tensor(lengths)
        each = len(names) // self.count
        alphas, betas = (
            list(node.floats("activation_alpha") or []),
            list(node.floats("activation_beta") or []),
        )
        limit = number_text(node.float("clip", 0.0))
        found: list[tuple[str, str, str]] = []
        for k in range(self.count):
            own = names[k * each : (k + 1) * each]
            a = [
                alphas.pop(0) if one in _ALPHAS and alphas else _ALPHAS.get(one, 0.0) for one in own
            ]
            b = [betas.pop(0) if one in _BETAS and betas else _BETAS.get(one, 0.0) for one in own]
            parts = ", ".join(
                f"{one}[{k}]" for one in (self.w, self.r, self.b, self.h, self.c, peep)
            )
            back = self.way == "reverse" or k == 1
            result = e.name("y"), e.name("h"), e.name("c")
            e.line(
                f'{", ".join(result)} = run.recurrent("{node.op}", {self.x}, {parts}, {ends}, {back}, '
                f"{own}, {a}, {b}, {limit}, {bool(node.int('linear_before_reset', 0))}, "
                f"{bool(node.int('input_forget', 0))})"
            )
            found.append(result)
        ys, hs, cs = (", ".join(column) for column in zip(*found))
        y = e.let(f"torch.stack([{ys}], 1)", name="y").text
        return y, e.let(f"torch.stack([{hs}])").text, e.let(f"torch.stack([{cs}])").text

    def results(self, y: str, h: str, c: str) -> tuple[TensorValue, ...]:
        size = self.hidden if isinstance(self.hidden, int) else None
        time, batch = (self.sizes or (None, None))[:2]
        if self.is_batch_first:
            time, batch = batch, time
            y, h, c = f"{y}.permute([2, 0, 1, 3])", f"{h}.transpose(0, 1)", f"{c}.transpose(0, 1)"
            dims = ((batch, time, self.count, size), (batch, self.count, size))
        else:
            dims = ((time, self.count, batch, size), (self.count, batch, size))  # type: ignore[assignment]
        made = (
            TensorValue(y, self.dtype, dims[0]),
            TensorValue(h, self.dtype, dims[1]),
            TensorValue(c, self.dtype, dims[1]),
        )
        return made[: len(self.node.outputs)]
