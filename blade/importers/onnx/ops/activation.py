# SPDX-License-Identifier: Apache-2.0
"""Activations, and softmax with its relatives."""

from __future__ import annotations

from blade.importers.onnx.emit.emitter import Emitter, number_text
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.table import MICROSOFT, NodeView, row
from blade.importers.onnx.emit.values import TensorValue, Value


def _same(e: Emitter, x: Value, text: str) -> TensorValue:
    """A result of the type and sizes of ``x``."""
    return TensorValue(text, e.dtype(x), e.sizes(x))


@row("LeakyRelu")
def leaky_relu(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    slope = number_text(node.float("alpha", 0.01))
    return _same(e, x, f"torch.ops.aten.leaky_relu({e.tensor(x)}, {slope})")


@row("Elu")
def elu(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    alpha = number_text(node.float("alpha", 1.0))
    return _same(e, x, f"torch.ops.aten.elu({e.tensor(x)}, {alpha})")


@row("Selu")
def selu(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    alpha = number_text(node.float("alpha", 1.67326319217681884765625))
    gamma = number_text(node.float("gamma", 1.05070102214813232421875))
    return _same(e, x, f"torch.ops.aten.elu({e.tensor(x)}, {alpha}, {gamma})")


@row("Celu")
def celu(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    return _same(e, x, f"torch.celu({e.tensor(x)}, {number_text(node.float('alpha', 1.0))})")


@row("HardSigmoid")
def hard_sigmoid(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    alpha, beta = node.float("alpha", 0.2), node.float("beta", 0.5)
    text = f"{e.tensor(x)} * {number_text(alpha)} + {number_text(beta)}"
    return _same(e, x, f"torch.clamp({text}, min=0, max=1)")


@row("HardSwish")
def hard_swish(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    return _same(e, x, f"torch.ops.aten.hardswish({e.tensor(x)})")


@row("PRelu")
def prelu(e: Emitter, node: NodeView, x: Value, slope: Value) -> TensorValue:
    text, factor = e.tensor(x), e.tensor(slope)
    sizes, own = e.dims(x) or (), e.dims(slope) or ()
    if len(own) == 1 and len(sizes) > 2 and own[0] not in (1, sizes[-1]) and own[0] == sizes[1]:
        factor += f".reshape({[-1] + [1] * (len(sizes) - 2)})"  # of old models: per channel
    return _same(e, x, f"torch.where({text} < 0, {text} * {factor}, {text})")


@row("ThresholdedRelu")
def thresholded_relu(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    alpha = number_text(node.float("alpha", 1.0))
    return _same(e, x, f"torch.threshold({e.tensor(x)}, {alpha}, 0.0)")


@row("Shrink")
def shrink(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    lambd, bias = number_text(node.float("lambd", 0.5)), number_text(node.float("bias", 0.0))
    kind, text = e.dtype(x), e.tensor(x)
    inner = f"torch.where({text} > {lambd}, {text} - {bias}, torch.zeros_like({text}).to({kind}))"
    made = f"torch.where({text} < -{lambd}, {text} + {bias}, {inner})"
    return _same(e, x, made if kind.is_floating_point else f"{made}.to({kind})")


@row("Gelu")
def gelu(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    how = node.text("approximate", "none")
    return _same(e, x, f'torch.ops.aten.gelu({e.tensor(x)}, approximate="{how}")')


@row("Gelu", domain=MICROSOFT)
def microsoft_gelu(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    return _same(e, x, f"torch.ops.aten.gelu({e.tensor(x)})")


@row("BiasGelu", domain=MICROSOFT)
def bias_gelu(e: Emitter, node: NodeView, x: Value, bias: Value) -> TensorValue:
    return _same(e, x, f"torch.ops.aten.gelu({e.tensor(x)} + {e.tensor(bias)})")


@row("FastGelu", domain=MICROSOFT)
def fast_gelu(e: Emitter, node: NodeView, x: Value, bias: Value | None = None) -> TensorValue:
    text = e.tensor(x) if bias is None else f"{e.tensor(x)} + {e.tensor(bias)}"
    return _same(e, x, f'torch.ops.aten.gelu({text}, approximate="tanh")')


@row("QuickGelu", domain=MICROSOFT)
def quick_gelu(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    text, alpha = e.tensor(x), number_text(node.float("alpha", 1.702))
    return _same(e, x, f"{text} * torch.sigmoid({alpha} * {text})")


@row("Mish")
def mish(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    return _same(e, x, f"torch.ops.aten.mish({e.tensor(x)})")


@row("Swish")
def swish(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    text, alpha = e.tensor(x), node.float("alpha", 1.0)
    if alpha == 1.0:
        return _same(e, x, f"torch.ops.aten.silu({text})")
    return _same(e, x, f"{text} * torch.sigmoid({number_text(alpha)} * {text})")


@row("Softmax", "LogSoftmax")
def softmax(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    name = {"Softmax": "softmax", "LogSoftmax": "log_softmax"}[node.op]
    if node.version < 13:
        raise NotImported("Before opset 13 it flattens its input.")
    return _same(e, x, f"torch.{name}({e.tensor(x)}, {node.int('axis', -1)})")


@row("Hardmax")
def hardmax(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    text, axis = e.tensor(x), node.int("axis", -1)
    at = f"torch.argmax({text}, {axis}, True)"
    return _same(e, x, f"torch.zeros_like({text}).scatter({axis}, {at}, 1.0)")
