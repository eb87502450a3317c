# SPDX-License-Identifier: Apache-2.0
"""Layers of quantized checkpoints, read into one form: integers, scales, zero points.

    weight = weight_of(layer)       # None for layers that are not quantized
    weight.dequantize()             # [out, in] float32, the checkpoint's weight

GPTQ and AWQ layers are known by their buffers ``qweight``, ``qzeros`` and ``scales`` and by the shapes of these,
weights of torchao by the fields of their tensors. The libraries are not imported.

| layout | qweight int32 | bits of a word | zero points |
|---|---|---|---|
| GPTQ | [in * bits / 32, out] | row 32 / bits * i + k in the k-th bits of word i | stored less 1 in version 1 |
| AWQ | [in, out * 4 / 32] | columns 0 2 4 6 1 3 5 7 of eight | as they are |
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

WORD = 32  # bits
WIDTHS = (2, 4, 8)  # bits of a weight that divide a word
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of eight in each nibble


@dataclass(frozen=True)
class QuantizedWeight:
    """``values`` [out, in] int8 with ``scales`` and ``zeros`` [out, groups]; weight = (values - zeros) * scales.

    ``zeros`` is ``None`` if all are 0. ``order`` [in]: the input that each column of ``values`` reads, ``None`` if
    they are in order. ``dtype``: of the layer's scales.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    dtype: torch.dtype

    def dequantize(self) -> torch.Tensor:
        """The weight [out, in] in float32, its columns in the order of the inputs."""
        wide = self.values.unflatten(1, (self.scales.shape[1], -1)).float()
        if self.zeros is not None:
            wide = wide - self.zeros.float().unsqueeze(-1)
        made: torch.Tensor = (wide * self.scales.float().unsqueeze(-1)).flatten(1)
        return made if self.order is None else made[:, torch.argsort(self.order)]


def weight_of(layer: nn.Module) -> QuantizedWeight | None:
    """The quantized weight of ``layer``; ``None`` if it has none that is known here."""
    with torch.no_grad():
        if all(isinstance(getattr(layer, n, None), torch.Tensor) for n in _BUFFERS):
            return _of_buffers(layer)
        weight = getattr(layer, "weight", None)
        if isinstance(layer, nn.Linear) and is_of_torchao(weight):
            return _of_torchao(weight)
    return None


def is_of_torchao(value: Any) -> bool:
    """Whether ``value`` is a tensor of a class of torchao."""
    return type(value).__module__.startswith("torchao.")


def is_packed(layer: nn.Module) -> bool:
    """Whether ``layer`` has a quantized weight, in a known layout or not."""
    has_buffers = all(isinstance(getattr(layer, n, None), torch.Tensor) for n in _BUFFERS)
    return has_buffers or (isinstance(layer, nn.Linear) and is_of_torchao(layer.weight))


_BUFFERS = ("qweight", "qzeros", "scales")


def _of_buffers(layer: Any) -> QuantizedWeight | None:
    """GPTQ or AWQ, by the shape of ``qweight``."""
    bits = _number(layer, "bits", "w_bit")
    inputs = _number(layer, "in_features", "infeatures")
    outputs = _number(layer, "out_features", "outfeatures")
    known = bits in WIDTHS and layer.qweight.dtype == layer.qzeros.dtype == torch.int32
    if not known or not inputs or not outputs or layer.scales.dim() != 2:
        return None
    per, groups = WORD // bits, layer.scales.shape[0]
    size = _number(layer, "group_size")
    size = inputs if size in (-1, 0) else size
    if layer.scales.shape[1] != outputs or not size or groups != -(-inputs // size):
        return None
    if inputs % size or layer.qzeros.shape != (groups, outputs // per):
        return None
    if layer.qweight.shape == (inputs // per, outputs):
        return _gptq(layer, bits, size)
    if layer.qweight.shape == (inputs, outputs // per) and bits == 4:
        return _awq(layer)
    return None


def _gptq(layer: Any, bits: int, size: int) -> QuantizedWeight | None:
    values = unpacked(layer.qweight.T, bits)  # [out, in]
    zeros = unpacked(layer.qzeros, bits) + _gptq_offset(layer)  # [groups, out]
    groups = getattr(layer, "g_idx", None)
    order = None
    if isinstance(groups, torch.Tensor) and groups.numel():
        inputs = torch.arange(values.shape[1], device=values.device)
        if not torch.equal(groups.long(), inputs // size):
            order = torch.argsort(groups.long(), stable=True)
            if not torch.equal(groups.long()[order], inputs // size):
                return None  # groups of different sizes
            values = values[:, order]
    return _signed(values, layer.scales.T, zeros.T, bits, order)


def _gptq_offset(layer: Any) -> int:
    """1 where stored zero points are less by it: version 1 of the format, unless the layer says otherwise."""
    version = getattr(layer, "qzero_format", None)
    return 0 if callable(version) and version() == 2 else 1


def _awq(layer: Any) -> QuantizedWeight:
    places = torch.argsort(torch.tensor(AWQ_ORDER, device=layer.qweight.device))
    values, zeros = (
        unpacked(one, 4).unflatten(1, (-1, 8))[..., places].flatten(1)
        for one in (layer.qweight, layer.qzeros)
    )
    return _signed(values.T, layer.scales.T, zeros.T, 4, None)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """``words`` [rows, n] of int32 as the numbers of ``bits`` bits in them, lowest first: [rows, n * 32 / bits]."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
    fields: torch.Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return fields.to(torch.int16).flatten(1)


def _signed(
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bits: int,
    order: torch.Tensor | None,
) -> QuantizedWeight:
    """Unsigned ``values`` and ``zeros`` around 0; the difference stays."""
    middle = 2 ** (bits - 1)
    shifted = (zeros - middle).to(torch.int16)
    return QuantizedWeight(
        (values - middle).to(torch.int8).contiguous(),
        scales.contiguous(),
        shifted.contiguous() if bool(shifted.any()) else None,
        order,
        scales.dtype,
    )


# torchao. Classes are known by their names, as their fields differ.


def _of_torchao(weight: Any) -> QuantizedWeight | None:
    if weight.dim() != 2 or getattr(weight, "act_pre_scale", None) is not None:
        return None
    name = type(weight).__name__
    if name == "Int8Tensor" and weight.act_quant_kwargs is None:
        return _plain(weight)
    if name == "IntxUnpackedToInt8Tensor" and weight.activation_quantization is None:
        return _plain(weight)
    if name == "Int4OpaqueTensor" and weight.act_mapping_type is None:
        return _tinygemm(weight)
    return None


def _plain(weight: Any) -> QuantizedWeight | None:
    """``qdata`` [out, in] of int8, ``scale`` and ``zero_point`` per block of a row."""
    rows, columns = weight.shape
    tall, wide = weight.block_size
    if columns % wide or (tall != 1 and tall != rows):
        return None
    shape = (rows, columns // wide)
    scales = weight.scale.reshape(-1, shape[1]).expand(shape)
    zeros = weight.zero_point
    if zeros is not None:
        zeros = zeros.reshape(-1, shape[1]).expand(shape).contiguous()
        zeros = zeros if bool(zeros.any()) else None
    return QuantizedWeight(
        weight.qdata.contiguous(), scales.contiguous(), zeros, None, weight.dtype
    )


def _tinygemm(weight: Any) -> QuantizedWeight | None:
    """Packed for torch's product of int4 on CPU, whose weight is (q - 8) * scale + zero.

    That product with the unit matrix, scales of 1 and zeros of 0 gives the integers.
    """
    if weight.device.type != "cpu":
        return None
    columns = weight.shape[1]
    scales, zeros = weight.scale_and_zero.float().unbind(-1)  # [groups, out]
    plain = torch.stack((torch.ones_like(scales), torch.zeros_like(zeros)), -1)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    values = product(torch.eye(columns), weight.qdata, weight.block_size[1], plain).T
    points = torch.where(scales == 0, 0.0, -zeros / scales).T
    return QuantizedWeight(
        values.to(torch.int8).contiguous(),
        scales.T.contiguous(),
        points.contiguous() if bool(points.any()) else None,
        None,
        weight.dtype,
    )


def _number(layer: Any, *names: str) -> int:
    """The first of the attributes ``names`` that is an int, or 0."""
    values = (getattr(layer, name, None) for name in names)
    return next((int(v) for v in values if isinstance(v, int)), 0)
