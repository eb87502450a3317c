# SPDX-License-Identifier: Apache-2.0
"""Normalizations."""

from __future__ import annotations

import torch

from blade.core.dtypes import HALVES
from blade.importers.onnx.emit.emitter import Emitter, number_text
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.table import MICROSOFT, NodeView, row
from blade.importers.onnx.emit.values import TensorValue, Value


@row("LayerNormalization")
def layer_normalization(
    e: Emitter, node: NodeView, x: Value, scale: Value, bias: Value | None = None
) -> tuple[TensorValue, ...]:
    axis, eps = e.axis(x, node.int("axis", -1)), number_text(node.float("epsilon", 1e-5))
    sizes = [e.size(x, k) for k in range(axis, e.rank(x))]
    text, dtype = e.tensor(x), e.dtype(x)
    if node.wants(1) or node.wants(2):
        return _with_moments(e, node, x, scale, bias, axis)
    fits = [e.dims(one) == (e.dims(x) or ())[axis:] for one in (scale, bias) if one is not None]
    if all(fits):
        shift = "None" if bias is None else e.tensor(bias)
        made = f"torch.layer_norm({text}, {e.ints(sizes)}, {e.tensor(scale)}, {shift}, {eps})"
    else:
        made = f"torch.layer_norm({text}, {e.ints(sizes)}, None, None, {eps}) * {e.tensor(scale)}"
        made += "" if bias is None else f" + {e.tensor(bias)}"
    return (TensorValue(made, dtype, e.sizes(x)),)


def _with_moments(
    e: Emitter, node: NodeView, x: Value, scale: Value, bias: Value | None, axis: int
) -> tuple[TensorValue, ...]:
    """The mean and the inverse deviation are outputs, too, in float32."""
    axes = e.ints(list(range(axis, e.rank(x))))
    dtype = e.dtype(x)
    wide = e.let(f"{e.tensor(x)}.to(torch.float32)" if dtype in HALVES else e.tensor(x)).text
    mean = e.let(f"torch.mean({wide}, {axes}, True)", name="mean").text
    centred = e.let(f"{wide} - {mean}", name="centred").text
    eps = number_text(node.float("epsilon", 1e-5))
    variance = f"torch.mean({centred} * {centred}, {axes}, True)"
    inverse = e.let(f"torch.rsqrt({variance} + {eps})", name="inverse").text
    made = f"({centred} * {inverse}).to({dtype}) * {e.tensor(scale)}"
    made += "" if bias is None else f" + {e.tensor(bias)}"
    kind = torch.float32 if dtype in HALVES else dtype
    moments = (TensorValue(mean, kind), TensorValue(inverse, kind))
    return (TensorValue(made, dtype, e.sizes(x)), *moments[: len(node.outputs) - 1])


@row("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(
    e: Emitter,
    node: NodeView,
    x: Value,
    skip: Value,
    gamma: Value,
    beta: Value | None = None,
    bias: Value | None = None,
) -> tuple[TensorValue | None, ...]:
    if node.wants(1) or node.wants(2):
        raise NotImported("Its moments are outputs.")
    text = f"{e.tensor(x)} + {e.tensor(skip)}" + ("" if bias is None else f" + {e.tensor(bias)}")
    total = e.let(text, e.dtype(x), e.sizes(x), "total")
    shift = "None" if beta is None else e.tensor(beta)
    sizes, eps = e.ints([e.size(x, -1)]), number_text(node.float("epsilon", 1e-12))
    made = f"torch.layer_norm({total.text}, {sizes}, {e.tensor(gamma)}, {shift}, {eps})"
    results = (TensorValue(made, e.dtype(x), e.sizes(x)), None, None, total)
    return results[: len(node.outputs)]


@row("SimplifiedLayerNormalization")
def simplified_layer_normalization(
    e: Emitter, node: NodeView, x: Value, scale: Value
) -> TensorValue:
    made: TensorValue = rms_normalization(e, node, x, scale)
    return made


@row("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified(
    e: Emitter, node: NodeView, x: Value, skip: Value, gamma: Value, bias: Value | None = None
) -> tuple[TensorValue | None, ...]:
    if node.wants(1) or node.wants(2):
        raise NotImported("Its moments are outputs.")
    text = f"{e.tensor(x)} + {e.tensor(skip)}" + ("" if bias is None else f" + {e.tensor(bias)}")
    total = e.let(text, e.dtype(x), e.sizes(x), "total")
    results = (rms_normalization(e, node, total, gamma), None, None, total)
    return results[: len(node.outputs)]


@row("RMSNormalization")
def rms_normalization(e: Emitter, node: NodeView, x: Value, scale: Value) -> TensorValue:
    axis, dtype = e.axis(x, node.int("axis", -1)), e.dtype(x)
    axes = e.ints(list(range(axis, e.rank(x))))
    eps = number_text(node.float("epsilon", 1e-5))
    wide = e.let(f"{e.tensor(x)}.to(torch.float32)").text if dtype in HALVES else e.tensor(x)
    inverse = f"torch.rsqrt(torch.mean({wide} * {wide}, {axes}, True) + {eps})"
    made = f"{wide} * {inverse}"
    made = f"({made}).to({dtype})" if dtype in HALVES else made
    return TensorValue(f"{made} * {e.tensor(scale)}", dtype, e.sizes(x))


@row("BatchNormalization")
def batch_normalization(
    e: Emitter, node: NodeView, x: Value, scale: Value, bias: Value, mean: Value, variance: Value
) -> tuple[TensorValue, ...]:
    eps, dtype = number_text(node.float("epsilon", 1e-5)), e.dtype(x)
    text = e.tensor(x)
    if node.int("training_mode", 0):
        return _batch_statistics(e, node, x, (scale, bias, mean, variance))
    given = ", ".join(e.tensor(one) for one in (scale, bias, mean, variance))
    made = f"torch.batch_norm({text}, {given}, False, 0.0, {eps}, False)"
    return (TensorValue(made, dtype, e.sizes(x)),)


def _batch_statistics(
    e: Emitter, node: NodeView, x: Value, given: tuple[Value, ...]
) -> tuple[TensorValue, ...]:
    """In training mode the batch's own moments are used, and the running ones are outputs."""
    rank = e.rank(x)
    axes = e.ints([k for k in range(rank) if k != 1])
    text, momentum = e.tensor(x), node.float("momentum", 0.9)
    scale, bias, mean, variance = (e.tensor(one) for one in given)
    own = e.let(f"torch.mean({text}, {axes})", name="mean").text
    spread = e.let(f"torch.var({text}, {axes}, unbiased=False)", name="variance").text
    eps = number_text(node.float("epsilon", 1e-5))
    made = f"torch.batch_norm({text}, {scale}, {bias}, {own}, {spread}, False, 0.0, {eps}, False)"
    old, new = number_text(momentum), number_text(1 - momentum)
    results = (
        TensorValue(made, e.dtype(x), e.sizes(x)),
        TensorValue(f"{mean} * {old} + {own} * {new}", e.dtype(given[2]), e.dims(given[2])),
        TensorValue(f"{variance} * {old} + {spread} * {new}", e.dtype(given[3]), e.dims(given[3])),
    )
    return results[: len(node.outputs)]


@row("InstanceNormalization")
def instance_normalization(
    e: Emitter, node: NodeView, x: Value, scale: Value, bias: Value
) -> TensorValue:
    eps = number_text(node.float("epsilon", 1e-5))
    given = f"{e.tensor(x)}, {e.tensor(scale)}, {e.tensor(bias)}"
    made = f"torch.instance_norm({given}, None, None, True, 0.0, {eps}, False)"
    return TensorValue(made, e.dtype(x), e.sizes(x))


@row("GroupNormalization")
def group_normalization(
    e: Emitter, node: NodeView, x: Value, scale: Value, bias: Value
) -> TensorValue:
    """Scale and bias are per group before opset 21, per channel since."""
    groups, eps = node.int("num_groups", 1), number_text(node.float("epsilon", 1e-5))
    if node.version >= 21:
        weight, shift = e.tensor(scale), e.tensor(bias)
    else:
        each = f"{e.size(x, 1)} // {groups}"
        weight = f"{e.tensor(scale)}.repeat_interleave({each})"
        shift = f"{e.tensor(bias)}.repeat_interleave({each})"
    made = f"torch.group_norm({e.tensor(x)}, {groups}, {weight}, {shift}, {eps}, False)"
    return TensorValue(made, e.dtype(x), e.sizes(x))


@row("LpNormalization")
def lp_normalization(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    axis, p = node.int("axis", -1), node.int("p", 2)
    text = e.tensor(x)
    size = f"torch.sum(torch.abs({text}), [{axis}], True)"
    if p == 2:
        size = f"torch.sqrt(torch.sum({text} * {text}, [{axis}], True))"
    length = e.let(size, name="length").text
    made = f"torch.where({length} == 0, torch.zeros_like({text}), {text} / {length})"
    return TensorValue(made, e.dtype(x), e.sizes(x))


@row("MeanVarianceNormalization")
def mean_variance_normalization(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    axes, text = e.ints(node.ints("axes") or [0, 2, 3]), e.tensor(x)
    centred = e.let(f"{text} - torch.mean({text}, {axes}, True)", name="centred").text
    made = f"{centred} / (torch.sqrt(torch.mean({centred} * {centred}, {axes}, True)) + 1e-9)"
    return TensorValue(made, e.dtype(x), e.sizes(x))


@row("LRN")
def lrn(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    """The window of an even size reaches further back than forth in torch, and further forth in ONNX."""
    size = node.int("size", 1)
    alpha, beta = node.float("alpha", 1e-4) / size, number_text(node.float("beta", 0.75))
    text, bias = e.tensor(x), number_text(node.float("bias", 1.0))
    before, after = (size - 1) // 2, size // 2
    made = f"run.local_response({text}, {before}, {after}, {number_text(alpha)}, {beta}, {bias})"
    return TensorValue(made, e.dtype(x), e.sizes(x))
