# SPDX-License-Identifier: Apache-2.0
"""Simulation of a cluster with some layers quantized, in eager float32, to measure the loss of accuracy.

simulation = Simulation(gm, layers, samples)
simulation.error({"linear_3": scheme})          # the worst OutputError over all samples and outputs
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch.fx import GraphModule, Node

from blade.backends.quant.analysis.affine import Affine, Weight, token_round_trip
from blade.backends.quant.analysis.int8_residuals import residuals
from blade.backends.quant.analysis.layers import Layer
from blade.backends.quant.analysis.scaled_ops import round_trip as scaled_round_trip
from blade.config.accuracy import OutputError, output_error, worst
from blade.graph.fx.interpreter import Interpreter

Inputs = tuple[torch.Tensor, ...]
KEPT_BYTES = 1 << 29  # limit for the stored values of one sample


@dataclass(frozen=True)
class Scheme:
    """The quantization of one layer.

    ``kind``: "static" (by ``activation``), "dynamic" (per token, ``symmetric`` or not) or "weight_only".
    ``bias``: a corrected bias that replaces the layer's own, or ``None``. ``narrow``: the dtype of both
    operands on GPUs (scaled_ops.py), int8 or float8; ``None``: the CPU's bytes.
    """

    kind: str
    weight: Weight
    activation: Affine | None = None
    symmetric: bool = True
    bias: torch.Tensor | None = None
    narrow: torch.dtype | None = None

    @property
    def precision(self) -> str:
        """For the report: "int8 static", "int4 weight-only"."""
        name = "fp8" if self.narrow == torch.float8_e4m3fn else f"int{self.weight.bits}"
        return f"{name} {self.kind.replace('_', '-')}"

    def seen(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with the quantization error of the layer's input."""
        if self.narrow is not None:
            scale = None if self.activation is None else self.activation.scale
            return scaled_round_trip(x, self.narrow, scale)
        if self.activation is not None:
            return self.activation.round_trip(x)
        return token_round_trip(x, self.symmetric) if self.kind == "dynamic" else x

    def corrected(self, bias: torch.Tensor) -> "Scheme":
        return replace(self, bias=bias)


Schemes = Mapping[str, Scheme]


class Simulation:
    """Runs of one cluster. Errors are relative to its own float outputs, or to ``wanted``, if given."""

    def __init__(
        self,
        gm: GraphModule,
        layers: Iterable[Layer],
        samples: Sequence[Inputs],
        wanted: Sequence[Inputs] | None = None,
    ) -> None:
        self.gm, self.samples = gm, samples
        self._layers = {layer.name: layer for layer in layers}
        self._weights: dict[int, tuple[Weight, torch.Tensor]] = {}
        self.wanted = [self.run(x, {}) for x in samples] if wanted is None else wanted

    def run(
        self,
        inputs: Inputs,
        schemes: Schemes,
        watch: "Watch | None" = None,
        env: dict[Node, Any] | None = None,
    ) -> Inputs:
        """The cluster's outputs with ``schemes`` by name of layer; ``watch`` sees every computed value.

        Values in ``env`` are not computed again.
        """
        runner = _QuantInterpreter(self, schemes, watch)
        with torch.no_grad():
            return tuple(runner.run(*inputs, initial_env=env, enable_io_processing=False))

    def error(self, schemes: Schemes) -> OutputError:
        """The worst error over all samples and outputs."""
        return worst(
            output_error(got, want)
            for inputs, every in zip(self.samples, self.wanted, strict=True)
            for got, want in zip(self.run(inputs, schemes), every, strict=True)
        )

    def alone(self, schemes: Schemes) -> dict[str, OutputError]:
        """The error of each scheme alone; values before a layer are computed once."""
        errors: dict[str, list[OutputError]] = {name: [] for name in schemes}
        for inputs, wanted in zip(self.samples, self.wanted, strict=True) if schemes else ():
            known = self._values(inputs)
            for name, scheme in schemes.items():
                layer = self.layer(name)
                assert layer is not None, name
                made = self.run(inputs, {name: scheme}, env=_before(layer.node, known))
                errors[name] += [output_error(a, b) for a, b in zip(made, wanted, strict=True)]
        return {name: worst(found) for name, found in errors.items()}

    def _values(self, inputs: Inputs) -> dict[Node, Any]:
        """The value of every node at ``inputs``; empty if they take more than ``KEPT_BYTES``."""
        if any(_writes(node) for node in self.gm.graph.nodes):
            return {}
        made: dict[Node, Any] = {}
        total = 0

        def watch(node: Node, value: Any, alive: Mapping[Node, Any]) -> None:
            nonlocal total
            total += value.nbytes if isinstance(value, torch.Tensor) else 0
            if total <= KEPT_BYTES:
                made[node] = value

        self.run(inputs, {}, watch)
        return made if total <= KEPT_BYTES else {}

    def with_samples(self, count: int) -> "Simulation":
        """This simulation on only the first ``count`` samples."""
        fewer = copy.copy(self)
        fewer.samples, fewer.wanted = self.samples[:count], self.wanted[:count]
        return fewer

    def residuals(self, schemes: Schemes) -> dict[str, tuple[int, Scheme]]:
        """The sums that read an operand as bytes (int8_residuals.py)."""
        return residuals(self.gm, self._layers.values(), schemes) if schemes else {}

    def layer(self, name: str) -> Layer | None:
        return self._layers.get(name)

    def dequantized(self, weight: Weight) -> torch.Tensor:
        """The float weight, computed once; a reference keeps the weight's id unique."""
        if id(weight) not in self._weights:
            self._weights[id(weight)] = weight, weight.dequantize()
        return self._weights[id(weight)][1]


Watch = Callable[[Node, Any, Mapping[Node, Any]], None]
"""Called with a node, its value, and all live values."""


def _writes(node: Node) -> bool:
    """Does ``node`` change an operand in place?"""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _before(node: Node, values: Mapping[Node, Any]) -> dict[Node, Any] | None:
    """The ``values`` that are computed before ``node``; ``None`` if there are no values."""
    return dict(takewhile(lambda item: item[0] is not node, values.items())) or None


class _QuantInterpreter(Interpreter):
    def __init__(self, of: Simulation, schemes: Schemes, watch: Watch | None) -> None:
        super().__init__(of.gm, garbage_collect_values=True)
        self._of, self._schemes, self._watch = of, schemes, watch
        self._residuals = of.residuals(schemes)

    def run_node(self, n: Node) -> Any:
        scheme = self._schemes.get(n.name)
        if n.name in self._residuals:
            made = self._sum(n, *self._residuals[n.name])
        else:
            made = super().run_node(n) if scheme is None else self._quantized(n, scheme)
        if self._watch is not None:
            self._watch(n, made, self.env)
        return made

    def _sum(self, node: Node, place: int, scheme: Scheme) -> Any:
        """``node`` with operand ``place`` quantized by ``scheme``."""
        args: list[Any] = list(torch.fx.map_arg(node.args, lambda a: self.env[a]))
        args[place] = scheme.seen(args[place])
        return node.target(*args)  # type: ignore[operator]

    def _quantized(self, node: Node, scheme: Scheme) -> torch.Tensor:
        layer = self._of.layer(node.name)
        assert layer is not None, node
        x, weight = scheme.seen(self.env[layer.x]), self._of.dequantized(scheme.weight)
        bias = scheme.bias
        if bias is None and layer.bias is not None:
            bias = self.env[layer.bias]
        made: torch.Tensor = layer.run(x, weight.to(layer.weight.dtype), bias)
        return made
