# SPDX-License-Identifier: Apache-2.0
"""The ways in which a cluster on a GPU could be quantized, before anyone asked what they cost or save.

    for plan in make_gpu_plans(prepared, config, forms): plan.schemes, plan.against

Products alone, in floats of 8 bits or bytes: "mixed" takes a scale for each row where a norm makes the activation,
whose kernel has the row at hand, and a calibrated scale elsewhere, where quantizing ends the kernel that makes it.
"""

from collections.abc import Iterator, Mapping
from math import isfinite

import torch
from torch.fx import Node

from blade.backends.narrow import LARGEST, LEAST
from blade.backends.quant.layers import Layer
from blade.backends.quant.numbers import Affine, Weight
from blade.backends.quant.plans import Plan, Prepared
from blade.backends.quant.scaled import quantize_rows
from blade.backends.quant.simulate import Scheme
from blade.config import Config

aten = torch.ops.aten
EVEN = 16  # columns and depth have to be multiples: what a thread loads of them at once
_ROWS = {aten.layer_norm.default, aten.native_layer_norm.default, aten.rms_norm.default}
_KINDS = {"auto": ("mixed", "dynamic", "static"), "dynamic": ("dynamic",), "static": ("static",)}


def make_gpu_plans(
    prepared: Prepared, config: Config, forms: Mapping[str, torch.dtype]
) -> Iterator[Plan]:
    """The most promising first."""
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
    """Does the kernel that makes ``x`` have a whole row of it at hand?"""
    if x.target in _ROWS:
        return True
    if x.target is not aten.mul.Tensor:  # the last op of an RMS norm that is written out
        return False
    return any(isinstance(a, Node) and a.op == "get_attr" for a in x.args)


def _plan(
    name: str,
    prepared: Prepared,
    kinds: Mapping[str, str],
    narrow: torch.dtype,
    known: dict[object, Weight],
) -> Plan:
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
    return Plan(name, schemes, against)


def _why_not(layer: Layer, prepared: Prepared) -> str | None:
    if (why := prepared.seen.against.get(layer.x.name)) is not None:
        return why
    columns, depth = layer.weight.shape
    if columns % EVEN or depth % EVEN:
        return f"its weight is {columns} x {depth}, and products of 8 bits take multiples of {EVEN}"
    if not isfinite(float(layer.weight.abs().amax())):
        return "its weight has a NaN or an infinity"
    return None


def _affine(prepared: Prepared, layer: Layer, narrow: torch.dtype) -> Affine:
    low, high = prepared.seen.ranges[layer.x.name]
    limit = LARGEST[narrow]
    return Affine(max(-low, high, LEAST) / limit, 0, -int(limit), int(limit), narrow)
