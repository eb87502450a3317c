# SPDX-License-Identifier: Apache-2.0
"""Candidate quantization plans of a cluster on CPU, before accuracy and speed are measured.

    for plan in make_plans(prepared, config): plan.schemes, plan.against

"auto" proposes per-token scales for products and calibrated scales for convolutions; then calibrated scales
everywhere; then, if few rows are computed at a time, weight-only quantization.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.fx import GraphModule

from blade.backends.quant.analysis.affine import (
    Weight,
    affine_of,
    group_of,
    quantize_weight,
    token_round_trip,
)
from blade.backends.quant.analysis.calibrate import CalibrationStats
from blade.backends.quant.analysis.layers import Layer
from blade.backends.quant.analysis.simulate import Scheme, Simulation
from blade.backends.quant.transforms.accept_quantized import grid_of
from blade.backends.quant.transforms.equalize import correct_bias
from blade.config import Config

GROUP = 128  # inputs that share a scale with 4-bit weights
UNEVEN = 0.8  # a zero point pays if it leaves at most this fraction of the squared error
MATTERS = 0.05  # products with a smaller share of the multiplications get no plan
FEW = 4  # samples on which bias correction is tested
FEW_ROWS = 16  # rows of an activation up to which reading the weights dominates the time


@dataclass(frozen=True)
class QuantPlan:
    """A scheme per layer; ``against``: the reasons of layers without a scheme."""

    name: str
    schemes: dict[str, Scheme]
    against: dict[str, str]


@dataclass(frozen=True)
class PreparedCluster:
    """A cluster's graph, with scales moved where that helps, and its calibration.

    ``simulation`` compares with the original graph.
    """

    gm: GraphModule
    layers: tuple[Layer, ...]
    seen: CalibrationStats
    simulation: Simulation


def make_plans(prepared: PreparedCluster, config: Config) -> Iterator[QuantPlan]:
    """The plans, most promising first; "auto" omits plans without any scheme."""
    maker = _PlanMaker(prepared, config)
    wanted = config.quantization_type
    if wanted != "auto":
        plans = [maker.plan(wanted, {"linear": wanted, "conv": wanted})]
    else:
        plans = [maker.plan("mixed", {"linear": "dynamic", "conv": "static"})]
        if maker.share("linear") > MATTERS:
            plans.append(maker.plan("static", {"linear": "static", "conv": "static"}))
            if _rows(prepared.layers) <= FEW_ROWS:
                plans.append(
                    maker.plan("weight_only", dict.fromkeys(("linear", "conv"), "weight_only"))
                )
    for plan in plans:
        if plan.schemes or wanted != "auto":
            yield maker.corrected(plan)


class _PlanMaker:
    def __init__(self, prepared: PreparedCluster, config: Config) -> None:
        self.prepared, self.config = prepared, config
        self._weights: dict[tuple[int, int, int], tuple[torch.Tensor, Weight]] = {}
        self._schemes: dict[tuple[str, str], Scheme | str] = {}
        self._corrected: dict[str, Scheme] = {}

    def share(self, kind: str) -> float:
        """The share of ``kind`` in all multiplications, at the sizes of the example."""
        work = {layer.name: multiplications(layer) for layer in self.prepared.layers}
        own = sum(work[layer.name] for layer in self.prepared.layers if layer.kind == kind)
        return own / max(1, sum(work.values()))

    def plan(self, name: str, kinds: dict[str, str]) -> QuantPlan:
        """A plan with a quantization type per kind of layer."""
        schemes, against = {}, {}
        for layer in self.prepared.layers:
            found = self._scheme(layer, kinds[layer.kind])
            if isinstance(found, Scheme):
                schemes[layer.name] = found
            else:
                against[layer.name] = found
        return QuantPlan(name, schemes, against)

    def corrected(self, plan: QuantPlan) -> QuantPlan:
        """``plan`` with corrected biases, if these reduce the error of the outputs."""
        calibrated = {n: s for n, s in plan.schemes.items() if s.kind == "static"}
        if not calibrated:
            return plan
        by_name = {layer.name: layer for layer in self.prepared.layers}
        simulation = self.prepared.simulation.with_samples(FEW)
        fresh = {n: s for n, s in calibrated.items() if n not in self._corrected}
        self._corrected |= correct_bias(simulation, by_name, fresh)
        corrected = {n: self._corrected[n] for n in calibrated}
        schemes = {**plan.schemes, **corrected}
        before, after = simulation.error(plan.schemes), simulation.error(schemes)
        better = after.relative < before.relative
        return QuantPlan(plan.name, schemes, plan.against) if better else plan

    def _scheme(self, layer: Layer, kind: str) -> Scheme | str:
        """The scheme or the reason against it; cached, so that plans share results about it."""
        key = layer.name, kind
        if key not in self._schemes:
            self._schemes[key] = self._make(layer, kind)
        return self._schemes[key]

    def _make(self, layer: Layer, kind: str) -> Scheme | str:
        if (why := self.prepared.seen.against.get(layer.x.name)) is not None:
            return why
        if layer.kind == "conv" and kind != "static":
            return f"a convolution's activations have no rows for {kind} quantization"
        symmetric = self.config.symmetric_activations
        if kind == "weight_only":
            return Scheme(kind, self._weight(layer, self.config.weight_bits))
        weight = self._weight(layer, 8)
        if kind == "dynamic":
            even = _is_even(self.prepared.seen.rows.get(layer.x.name))
            return Scheme(kind, weight, symmetric=even if symmetric is None else symmetric)
        low, high = self.prepared.seen.ranges[layer.x.name]
        return Scheme(kind, weight, affine_of(low, high, symmetric is True))

    def _weight(self, layer: Layer, bits: int) -> Weight:
        """The quantized weight; layers that share a weight share the result."""
        group = group_of(layer.weight.shape[1], GROUP) if bits == 4 else 0
        key = layer.weight.data_ptr(), layer.weight.stride(0), bits
        if key not in self._weights:
            made = _given(layer.weight, bits) or quantize_weight(layer.weight, bits, group)
            self._weights[key] = layer.weight, made
        return self._weights[key][1]


def _given(weight: torch.Tensor, bits: int) -> Weight | None:
    """The original int8 form of a weight that was dequantized; ``None`` if it has none."""
    if bits != 8 or grid_of(weight[:1]) is None:  # one row excludes most weights
        return None
    return grid_of(weight)


def _is_even(rows: torch.Tensor | None) -> bool:
    """Are ``rows`` [n, features] about symmetric around zero, so that a zero point does not pay?"""
    if rows is None or not rows.numel():
        return True
    errors = [float((token_round_trip(rows, s) - rows).square().sum()) for s in (True, False)]
    return errors[1] > UNEVEN * errors[0]


def _rows(layers: Sequence[Layer]) -> int:
    """The fewest rows of any activation that products read, at the sizes of the example."""
    shapes = [layer.x.meta["val"].shape[:-1] for layer in layers if layer.kind == "linear"]
    return min((prod(map(_hint, shape)) for shape in shapes), default=0)


def multiplications(layer: Layer) -> int:
    """Multiplications of ``layer`` at the sizes of the example."""
    return prod(map(_hint, layer.node.meta["val"].shape)) * (
        layer.weight.numel() // len(layer.weight)
    )


def _hint(size: int | torch.SymInt) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size
