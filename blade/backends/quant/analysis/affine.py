# SPDX-License-Identifier: Apache-2.0
"""Affine quantization: ranges to scales, weights to ints, and activations to ints and back.

    weight = quantize_weight(w)                          # int8, symmetric, a scale per output channel
    affine = affine_of(low, high, symmetric=False)       # uint8 for one activation tensor
    affine.round_trip(x)                                 # x quantized and dequantized

``q = clamp(round(x / scale) + zero_point, low, high)`` and ``x ~ (q - zero_point) * scale``, as in the ops of
``torch.ops.quantized_decomposed``.
"""

from dataclasses import dataclass

import torch

EPSILON = 1e-12  # smallest scale, for a range or row of zeros
TOKEN_EPSILON = 1e-5  # smallest range of a token, in choose_qparams_per_token


@dataclass(frozen=True)
class Affine:
    """The representation of one tensor: ``dtype`` with ``low <= q <= high``."""

    scale: float
    zero_point: int
    low: int
    high: int
    dtype: torch.dtype

    def quantize(self, x: torch.Tensor) -> torch.Tensor:
        q = torch.round(x * (1.0 / self.scale)) + self.zero_point
        return q.clamp(self.low, self.high).to(self.dtype)

    def round_trip(self, x: torch.Tensor) -> torch.Tensor:
        return (self.quantize(x).to(torch.float32) - self.zero_point) * self.scale


@dataclass(frozen=True)
class Weight:
    """A quantized weight: ``values`` [out, ...] of int8, or float8 for GPUs, with ``scales``.

    ``scales`` [out], or [out, groups] with ``group`` inputs each. ``bits``: bits used per value, 8 or 4
    (still one value per byte).
    """

    values: torch.Tensor
    scales: torch.Tensor
    bits: int = 8
    group: int = 0

    @property
    def high(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    def dequantize(self) -> torch.Tensor:
        """float32, in the shape of the weight."""
        if not self.group:
            return self.values.float() * _column(self.scales, self.values.dim())
        grouped = self.values.view(len(self.values), -1, self.group) * self.scales.unsqueeze(-1)
        return grouped.view(self.values.shape)


def affine_of(low: float, high: float, symmetric: bool) -> Affine:
    """uint8 over the range of ``low``, ``high`` and 0; if ``symmetric``, int8 with equal bounds around 0."""
    low, high = min(low, 0.0), max(high, 0.0)
    if symmetric:
        return Affine(max(-low, high, EPSILON * 127) / 127, 0, -127, 127, torch.int8)
    scale = max(high - low, EPSILON * 255) / 255
    return Affine(scale, min(255, max(0, round(-low / scale))), 0, 255, torch.uint8)


def quantize_weight(weight: torch.Tensor, bits: int = 8, group: int = 0) -> Weight:
    """Quantize symmetrically, with a scale per output channel (axis 0), or per ``group`` inputs of each."""
    high = 2 ** (bits - 1) - 1
    rows = weight.detach().float().reshape(len(weight), -1)
    if group:
        rows = rows.view(len(weight), -1, group)
    scales = (rows.abs().amax(-1) / high).clamp(min=EPSILON)
    values = torch.round(rows / scales.unsqueeze(-1)).clamp(-high, high).to(torch.int8)
    return Weight(values.view(weight.shape).contiguous(), scales.contiguous(), bits, group)


def group_of(inputs: int, wanted: int) -> int:
    """The largest group size from 16 to ``wanted`` that divides ``inputs``.

    0 if there is none: then use a scale per channel.
    """
    return next((g for g in range(min(wanted, inputs), 15, -1) if inputs % g == 0), 0)


def token_round_trip(x: torch.Tensor, symmetric: bool) -> torch.Tensor:
    """``x`` after ``choose_qparams_per_token`` (or ``_asymmetric``), quantize and dequantize."""
    if symmetric:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=TOKEN_EPSILON) / 127
        return torch.round(x * (1.0 / scale)).clamp(-128, 127) * scale
    low, high = torch.aminmax(x, dim=-1, keepdim=True)
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).eps)
    shift = torch.where(low / scale + high / scale - 1 > 0, -128 - low / scale, 127 - high / scale)
    zero = shift.clamp(-128, 127).round()
    q = torch.round(x * (1.0 / scale) + zero).clamp(-128, 127)
    return (q - zero) * scale


def _column(scales: torch.Tensor, rank: int) -> torch.Tensor:
    return scales.view(-1, *[1] * (rank - 1))
