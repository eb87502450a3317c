# SPDX-License-Identifier: Apache-2.0
"""Layers of quantized checkpoints in a model's copy become plain ATen ops on the same integers and scales, on CPU.

    reasons = read_quantized_layers(own)        # GPTQ, AWQ, torchao: see checkpoint_formats.py

The weight stays in integers in the captured graph. Freezing evaluates whatever reads constants alone; the
conversion to the dtype of the activation is one op that does not.
"""

import torch
from torch import nn
from torch.nn import functional

from blade.capture.checkpoint_formats import (
    QuantizedWeight,
    is_of_torchao,
    is_packed,
    weight_of,
)
from blade.core.dtypes import HALVES
from blade.core.reason import Code, Reason, Stage

ROWS = 2  # of the activations at which the layer is compared
TOLERANCES = {
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}  # of the output's norm


class QuantizedLinear(nn.Module):
    """``x`` times a weight in integers, which is dequantized in each call."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        groups = weight.scales.shape[1]
        self.register_buffer("values", weight.values.unflatten(1, (groups, -1)))
        self.register_buffer("scales", weight.scales.unsqueeze(-1))
        self.register_buffer("zeros", None if weight.zeros is None else weight.zeros.unsqueeze(-1))
        self.register_buffer("order", weight.order)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.training = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide, zeros, order, bias = self.values.type_as(x), self.zeros, self.order, self.bias
        if zeros is not None:
            wide = wide - zeros.type_as(x)
        weight = (wide * self.scales.type_as(x)).flatten(1)
        if order is not None:
            x = x.index_select(-1, order)
        if bias is not None:
            bias = bias.type_as(x)
        return functional.linear(x, weight, bias)


def read_quantized_layers(model: nn.Module) -> list[Reason]:
    """Replace the layers of ``model`` whose weights are quantized, in place; the reasons of those that stay.

    A layer is replaced only if the new one answers like it, or if it cannot answer on this device.
    """
    if isinstance(model, torch.jit.ScriptModule):
        return []
    reasons: list[Reason] = []
    made: dict[int, nn.Module] = {}
    for name, layer in model.named_modules():
        if name and is_packed(layer) and _is_on_cpu(layer):
            found = _read(layer)
            if isinstance(found, str):
                detail = f"{name}, a {_kind(layer)}: {found}. It stays as it is, and is not multiplied in integers."
                reasons.append(Reason(Stage.CAPTURE, Code.UNSUPPORTED_OP, None, name, detail))
            else:
                made[id(layer)] = found
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in made:
                setattr(parent, name, made[id(child)])
    narrow = {p.dtype for p in model.parameters() if p.dtype in HALVES}
    if made and narrow:
        detail = (
            f"{len(made)} layers have weights in integers, which are multiplied as such in float32 only; beside "
            f"activations of {' or '.join(sorted(map(str, narrow)))} they are dequantized in each call. model.float() "
            "keeps the integers."
        )
        subject = type(model).__name__
        reasons.append(Reason(Stage.CAPTURE, Code.UNSUPPORTED_DTYPE, None, subject, detail))
    return reasons


def _read(layer: nn.Module) -> QuantizedLinear | str:
    """The layer in place of ``layer``, or why there is none."""
    found = weight_of(layer)
    if found is None:
        return "its layout is not known"
    new = QuantizedLinear(found, getattr(layer, "bias", None))
    return _difference(layer, new, found) or new


def _difference(layer: nn.Module, new: nn.Module, weight: QuantizedWeight) -> str | None:
    """Where ``new`` is not ``layer``, at random activations; ``None`` if it is, or ``layer`` cannot tell."""
    inputs = weight.values.shape[1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, inputs, generator=generator).to(weight.values.device, weight.dtype)
    with torch.no_grad():
        try:
            expected = layer(x)
        except (
            AttributeError,
            ImportError,
            NotImplementedError,
            RuntimeError,
            TypeError,
            ValueError,
        ):
            return None
        found = new(x)
    if expected.shape != found.shape:
        return f"it answers with the shape {tuple(expected.shape)}"
    error = (expected - found).float().norm() / expected.float().norm().clamp(min=1e-30)
    if float(error) > TOLERANCES.get(weight.dtype, 0.0):
        return f"it is not the product with its dequantized weight (relative difference {float(error):.2g})"
    return None


def _is_on_cpu(layer: nn.Module) -> bool:
    """On a GPU, the library's own kernels stay."""
    return all(t.device.type == "cpu" for t in (*layer.parameters(), *layer.buffers()))


def _kind(layer: nn.Module) -> str:
    weight = getattr(layer, "weight", None)
    if is_of_torchao(weight):
        return f"{type(layer).__name__} with a {type(weight).__name__}"
    return type(layer).__name__
