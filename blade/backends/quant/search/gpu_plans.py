# SPDX-License-Identifier: Apache-2.0
"""Candidate quantization plans of a cluster on GPU, before accuracy and speed are measured.

    for plan in make_gpu_plans(prepared, config, forms): plan.schemes, plan.against

Only products are quantized, to 8-bit floats or bytes. "mixed" uses a scale per row if a norm computes the
activation, since its kernel holds the row, and a calibrated scale elsewhere, applied at the end of the
kernel that computes the activation.
"""

from collections.abc import Iterator, Mapping
from math import isfinite

import torch
from torch.fx import Node

from blade.backends.quant.analysis.affine import Affine, Weight
from blade.backends.quant.analysis.layers import Layer
from blade.backends.quant.analysis.scaled_ops import quantize_rows
from blade.backends.quant.analysis.simulate import Scheme
from blade.backends.quant.search.cpu_plans import PreparedCluster, QuantPlan
from blade.backends.shared.fp8_int8_limits import LARGEST, LEAST
from blade.config import Config

aten = torch.ops.aten
EVEN = 16  # columns and depth must be multiples of this: a thread loads so many elements at once
_ROWS = {aten.layer_norm.default, aten.native_layer_norm.default, aten.rms_norm.default}
_KINDS = {"auto": ("mixed", "dynamic", "static"), "dynamic": ("dynamic",), "static": ("static",)}


def make_gpu_plans(
    prepared: PreparedCluster, config: Config, forms: Mapping[str, torch.dtype]
) -> Iterator[QuantPlan]:
    """The plans, most promising first."""
    known: dict[object, Weight] = {}
    seen: list[dict[str, str]] = []
    for name, narrow in forms.items():
        for kind in _KINDS[config.quantization_type]:
            kinds = {layer.name: _kind(layer, kind) for layer in prepared.layers}
            if kinds in seen:
                continue
            seen.append(kinds)
            yield _plan(f"{name} {kind}", prepared, kinds, narrow, known)
        seen.clear()


def _kind(layer: Layer, kind: str) -> str:
    if kind != "mixed":
        return kind
    return "dynamic" if _is_of_rows(layer.x) else "static"


def _is_of_rows(x: Node) -> bool:
    """Does the kernel that computes ``x`` hold a whole row of it?"""
    if x.target in _ROWS:
        return True
    if x.target is not aten.mul.Tensor:  # the last op of a decomposed RMS norm
        return False
    return any(isinstance(a, Node) and a.op == "get_attr" for a in x.args)


def _plan(
    name: str,
    prepared: PreparedCluster,
    kinds: Mapping[str, str],
    narrow: torch.dtype,
    known: dict[object, Weight],
) -> QuantPlan:
    schemes: dict[str, Scheme] = {}
    against: dict[str, str] = {}
    for layer in prepared.layers:
        if (why := _why_not(layer, prepared)) is not None:
            against[layer.name] = why
            continue
        held = layer.weight
        key = narrow, held.data_ptr(), held.shape, held.stride()
        if key not in known:
            values, scales = quantize_rows(layer.weight.detach(), narrow)
            known[key] = Weight(values.contiguous(), scales.squeeze(1).contiguous())
        activation = None
        if kinds[layer.name] == "static":
            activation = _affine(prepared, layer, narrow)
        schemes[layer.name] = Scheme(kinds[layer.name], known[key], activation, narrow=narrow)
    return QuantPlan(name, schemes, against)


def _why_not(layer: Layer, prepared: PreparedCluster) -> str | None:
    if (why := prepared.seen.against.get(layer.x.name)) is not None:
        return why
    columns, depth = layer.weight.shape
    if columns % EVEN or depth % EVEN:
        return f"its weight is {columns} x {depth}, and products of 8 bits take multiples of {EVEN}"
    if not isfinite(float(layer.weight.abs().amax())):
        return "its weight has a NaN or an infinity"
    return None


def _affine(prepared: PreparedCluster, layer: Layer, narrow: torch.dtype) -> Affine:
    low, high = prepared.seen.ranges[layer.x.name]
    limit = LARGEST[narrow]
    return Affine(max(-low, high, LEAST) / limit, 0, -int(limit), int(limit), narrow)
