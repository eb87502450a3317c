# SPDX-License-Identifier: Apache-2.0
"""The ops `conv` and `conv_weight_gradient` of the IR: operands by name, and their meaning as ATen ops.

    conv x w bias? residual? {stride, padding, dilation, groups, activation, transposed, trailing?}

``x`` is [N, *spatial, C] with 1 to 3 spatial axes, ``w`` [O, C/groups, *kernel] in torch's layout, the
result [N, *out, O]: channels are the last axis of input and result. ``bias`` is [O]; ``residual`` has the
result's shape. result = activation(convolution + bias + residual).

``trailing``: the padding at the end of each axis, while ``padding`` is that at its beginning; what is less than 0
is cut off. ``x`` may have more channels than ``w``, which it skips. Code is generated for such convolutions: no op of
ATen is one.

``transposed``: the gradient of such a convolution with respect to its input, with ``w``
[C, O/groups, *kernel]. Several result sizes are possible; the value's shape says which one is meant.

    conv_weight_gradient grad x w {stride, padding, dilation, groups, transposed, output_padding}

``grad`` is the gradient of a convolution of ``x``, both as above; of ``w`` only the sizes are read. The result has
channels last, too: [O, *kernel, C/groups], and [C, *kernel, O/groups] if ``transposed``.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.nn.functional as F

from blade.backends.disc.ir.graph import Value, plain
from blade.backends.disc.ir.kernel import Dim

CLAMPS: Mapping[str, tuple[int, int | None]] = {"relu": (0, None), "relu6": (0, 6)}
"""Values of ``activation`` besides ``None`` -> the range that results are clamped to."""

WIDEST = 11  # taps along w that a depthwise kernel holds in registers


@dataclass(frozen=True)
class ConvOperands:
    """The operands of one `conv`: ``bias`` has one axis, ``residual`` as many as the result."""

    x: Value
    weight: Value
    bias: Value | None
    residual: Value | None


def operands(value: Value) -> ConvOperands:
    """The operands of the `conv` ``value``, by name."""
    x, weight, *rest = value.args
    bias = next((a for a in rest if len(a.shape) == 1), None)
    return ConvOperands(x, weight, bias, next((a for a in rest if len(a.shape) > 1), None))


def is_depthwise(value: Value) -> bool:
    """Whether the `conv` ``value`` computes every channel by itself, as generated code does along the channels."""
    return bool(operands(value).weight.shape[-1] <= WIDEST) and has_own_channels(value)


def has_own_channels(value: Value) -> bool:
    """Whether each channel of the `conv` ``value`` is computed from one channel of its own."""
    groups = value.attrs["groups"]
    return bool(groups > 1 and operands(value).x.shape[-1] == value.shape[-1] == groups)


def adjacent_taps(value: Value) -> int:
    """How many taps along the last axis are always inside and adjacent in memory: all, or each by itself."""
    a = value.attrs
    inside = a["padding"][-1] <= 0 and not pads_at_end(value)
    adjacent = inside and a["dilation"][-1] == 1 and a["groups"] == 1
    return int(operands(value).weight.shape[-1]) if adjacent else 1


def pads_at_end(value: Value) -> bool:
    """Whether the `conv` ``value`` pads the end of its last axis, whatever it does at the beginning."""
    return bool(value.attrs.get("trailing", (0,))[-1] > 0)


def to_channels_first(rank: int) -> tuple[int, ...]:
    """The permutation of [N, *spatial, C] to [N, C, *spatial]."""
    return (0, rank - 1, *range(1, rank - 1))


def to_channels_last(rank: int) -> tuple[int, ...]:
    """The permutation of [N, C, *spatial] to [N, *spatial, C]."""
    return (0, *range(2, rank), 1)


def output_padding(value: Value, shape: Sequence[Dim], x: Sequence[Dim]) -> list[Dim]:
    """torch's ``output_padding`` per spatial axis of a transposed convolution from ``x`` to ``shape``."""
    a, kernel = value.attrs, operands(value).weight.shape[2:]
    found = []
    for k, (size, given) in enumerate(zip(shape[1:-1], x[1:-1], strict=True)):
        reach = a["dilation"][k] * (int(kernel[k]) - 1) + 1
        least = (sympy.sympify(given) - 1) * a["stride"][k] - 2 * a["padding"][k] + reach
        found.append(plain(sympy.sympify(size) - least))
    return found


def reference(value: Value, tensors: Sequence[Any], shape: Sequence[int]) -> torch.Tensor:
    """``value`` at ``shape``, computed by torch from its operands."""
    named = dict(zip((a.id for a in value.args), tensors, strict=True))
    given, a, rank = operands(value), value.attrs, len(value.shape)
    x, weight = (named[t.id].to(value.dtype) for t in (given.x, given.weight))
    bias = None if given.bias is None else named[given.bias.id].to(value.dtype)
    padding = a["padding"]
    if not a["transposed"]:
        x = x[..., : weight.shape[1] * a["groups"]]
    if "trailing" in a:
        ends = reversed([*zip(padding, a["trailing"], strict=True)])
        x, padding = F.pad(x, (0, 0, *itertools.chain(*ends))), [0] * (rank - 2)
    y: torch.Tensor = torch.ops.aten.convolution(
        x.permute(to_channels_first(rank)),
        weight,
        bias,
        a["stride"],
        padding,
        a["dilation"],
        a["transposed"],
        output_padding(value, shape, x.shape) if a["transposed"] else [0] * (rank - 2),
        a["groups"],
    ).permute(to_channels_last(rank))
    if given.residual is not None:
        y = y + named[given.residual.id]
    return y if a["activation"] is None else torch.clamp(y, *CLAMPS[a["activation"]])


def weight_gradient(value: Value, grad: Any, x: Any, weight: Any) -> torch.Tensor:
    """The `conv_weight_gradient` ``value``, computed by torch from its operands."""
    a, rank = value.attrs, len(value.shape)
    found = torch.ops.aten.convolution_backward(
        grad.permute(to_channels_first(rank)),
        x.permute(to_channels_first(rank)),
        weight,
        None,
        a["stride"],
        a["padding"],
        a["dilation"],
        a["transposed"],
        a["output_padding"],
        a["groups"],
        (False, True, False),
    )
    made: torch.Tensor = found[1].permute(to_channels_last(rank))
    return made
