# SPDX-License-Identifier: Apache-2.0
"""Fourier transforms, windows and filter banks."""

from __future__ import annotations

from blade.importers.onnx.emit.dtypes import torch_dtype
from blade.importers.onnx.emit.emitter import Emitter
from blade.importers.onnx.emit.table import NodeView, row
from blade.importers.onnx.emit.values import TensorValue, Value


@row("DFT")
def dft(
    e: Emitter, node: NodeView, x: Value, length: Value | None = None, axis: Value | None = None
) -> TensorValue:
    """Complex numbers are a last axis of 2, real ones a last axis of 1."""
    along = str(node.int("axis", 1)) if node.version < 20 else "-2" if axis is None else e.int(axis)
    count = "None" if length is None else e.int(length)
    inverse, half = bool(node.int("inverse", 0)), bool(node.int("onesided", 0))
    made = f"run.dft({e.tensor(x)}, {count}, {along}, {inverse}, {half})"
    return TensorValue(made, e.dtype(x), (None,) * e.rank(x))


@row("STFT")
def stft(
    e: Emitter,
    node: NodeView,
    x: Value,
    step: Value,
    window: Value | None = None,
    length: Value | None = None,
) -> TensorValue:
    shape = "None" if window is None else e.tensor(window)
    count = "None" if length is None else e.int(length)
    half = bool(node.int("onesided", 1))
    made = f"run.stft({e.tensor(x)}, {e.int(step)}, {shape}, {count}, {half})"
    return TensorValue(made, e.dtype(x), (None,) * 4)


_WINDOWS = {
    "HannWindow": (0.5, 0.5, 0.0),
    "HammingWindow": (25 / 46, 21 / 46, 0.0),
    "BlackmanWindow": (0.42, 0.5, 0.08),
}


@row(*_WINDOWS)
def window(e: Emitter, node: NodeView, size: Value) -> TensorValue:
    dtype = torch_dtype(node.int("output_datatype", 1))
    a, b, c = _WINDOWS[node.op]
    periodic = bool(node.int("periodic", 1))
    device = f", {e.anchor}.device" if e.anchor else ', torch.device("cpu")'
    made = f"run.window({e.int(size)}, {a}, {b}, {c}, {periodic}{device}).to({dtype})"
    return TensorValue(made, dtype, (None,))


@row("MelWeightMatrix")
def mel_weight_matrix(
    e: Emitter, node: NodeView, bins: Value, length: Value, rate: Value, low: Value, high: Value
) -> TensorValue:
    dtype = torch_dtype(node.int("output_datatype", 1))
    given = f"{e.int(bins)}, {e.int(length)}, {e.int(rate)}, {e.float(low)}, {e.float(high)}"
    moved = f".to({e.anchor}.device)" if e.anchor else ""
    return TensorValue(f"run.mel_weights({given}){moved}.to({dtype})", dtype, (None, None))
