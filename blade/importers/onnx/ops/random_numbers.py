# SPDX-License-Identifier: Apache-2.0
"""Random numbers, of torch's own generator: seeds of the model are not used."""

from __future__ import annotations

import torch

from blade.importers.onnx.emit.dtypes import torch_dtype
from blade.importers.onnx.emit.emitter import Emitter, number_text
from blade.importers.onnx.emit.table import NodeView, row
from blade.importers.onnx.emit.values import TensorValue, Value


def _dtype(e: Emitter, node: NodeView, like: Value | None) -> torch.dtype:
    named = node.int("dtype", 0)
    return torch_dtype(named) if named else torch.float32 if like is None else e.dtype(like)


@row("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike")
def random_numbers(e: Emitter, node: NodeView, like: Value | None = None) -> TensorValue:
    dtype = _dtype(e, node, like)
    name = "randn" if "Normal" in node.op else "rand"
    if like is None:
        sizes = node.ints("shape") or []
        device = f", device={e.anchor}.device" if e.anchor else ""
        text, dims = f"torch.{name}({sizes}, dtype={dtype}{device})", tuple(sizes)
        known: tuple[int, ...] | None = dims
    else:
        text = f"torch.{name}_like({e.tensor(like)}, dtype={dtype})"
        return TensorValue(_scaled(node, text), dtype, e.sizes(like))
    return TensorValue(_scaled(node, text), dtype, known)


def _scaled(node: NodeView, text: str) -> str:
    if "Normal" in node.op:
        factor, shift = node.float("scale", 1.0), node.float("mean", 0.0)
    else:
        low, high = node.float("low", 0.0), node.float("high", 1.0)
        factor, shift = high - low, low
    return f"{text} * {number_text(factor)} + {number_text(shift)}"


@row("Bernoulli")
def bernoulli(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    dtype = _dtype(e, node, x)
    return TensorValue(f"torch.bernoulli({e.tensor(x)}).to({dtype})", dtype, e.sizes(x))


@row("Multinomial")
def multinomial(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    named = node.int("dtype", 6)
    count = node.int("sample_size", 1)
    text = f"torch.multinomial(torch.softmax({e.tensor(x)}, -1), {count}, True)"
    return TensorValue(f"{text}.to({torch_dtype(named)})", torch_dtype(named), (None, count))
