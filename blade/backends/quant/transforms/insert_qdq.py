# SPDX-License-Identifier: Apache-2.0
"""Insertion of Q/DQ ops of ``torch.ops.quantized_decomposed`` around the quantized layers of a cluster.

    quantized = insert_qdq(cluster, layers, schemes)       # a new Cluster; the given one is unchanged

On CPU:
dynamic:      choose_qparams_per_token -> quantize_per_token -> dequantize_per_token -> linear
static:       quantize_per_tensor -> dequantize_per_tensor -> linear or convolution
weights:      dequantize_per_channel (axis 0) of an int8 constant [out, ...]; in groups, dequantize_per_channel_group

On GPU: ops of ``torch.ops.blade_quant`` (scaled_ops.py).

Layers that read an activation with equal schemes share its quantization. Every product becomes
``aten.linear``.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers the ops
from torch.fx import Graph, GraphModule, Node

from blade.backends.quant.analysis.affine import Affine, Weight
from blade.backends.quant.analysis.int8_residuals import residuals
from blade.backends.quant.analysis.layers import Layer
from blade.backends.quant.analysis.scaled_ops import ops as scaled
from blade.backends.quant.analysis.simulate import Scheme, Schemes
from blade.core.cluster import Cluster
from blade.core.torch_modes import dispatched_in_python, oblivious_to_sizes

ops = torch.ops.quantized_decomposed
_TOKENS = {True: ops.choose_qparams_per_token, False: ops.choose_qparams_per_token_asymmetric}


def insert_qdq(cluster: Cluster, layers: Sequence[Layer], schemes: Schemes) -> Cluster:
    """``cluster`` with Q/DQ around the ``layers`` that have a scheme."""
    gm = private(cluster.gm)
    writer = QdqWriter(gm)
    nodes = {node.name: node for node in gm.graph.nodes}
    for layer in layers:
        if layer.name in schemes:
            writer.quantize(layer, schemes[layer.name], nodes)
    for name, (place, scheme) in residuals(cluster.gm, layers, schemes).items():
        writer.read_quantized(nodes[name], place, scheme)
    return replace(cluster, gm=finish(gm))


def private(gm: GraphModule) -> GraphModule:
    """A copy of the graph that shares its constants; nodes keep names, shapes and sources."""
    root = torch.nn.Module()
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            root.register_buffer(str(node.target), getattr(gm, str(node.target)))
    graph = Graph()
    env: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
        env[node].meta = copy.copy(node.meta)
    return GraphModule(root, graph)


def finish(gm: GraphModule) -> GraphModule:
    """Remove unused nodes and constants from ``gm`` and recompile it, in place."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            gm.graph.erase_node(node)
    gm.graph.lint()
    used = {str(n.target) for n in gm.graph.nodes if n.op == "get_attr"}
    for name in [name for name, _ in gm.named_buffers() if name not in used]:
        delattr(gm, name)
    gm.recompile()
    return gm


class QdqWriter:
    """Adds nodes with shapes to a graph, and constants to its module."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        values = [node.meta["val"] for node in gm.graph.nodes if "val" in node.meta]
        modes = [v.fake_mode for v in values if isinstance(v, torch._subclasses.FakeTensor)]
        self.mode: FakeTensorMode = modes[0] if modes else FakeTensorMode()
        self._shared: dict[Any, Node] = {}
        self._constants: dict[int, tuple[torch.Tensor, Node]] = {}
        taken = (name.removeprefix("const_") for name, _ in gm.named_buffers())
        self._next = 1 + max((int(k) for k in taken if k.isdecimal()), default=-1)

    def quantize(self, layer: Layer, scheme: Scheme, nodes: dict[str, Node]) -> None:
        """Replace ``layer`` by the quantized layer."""
        old = nodes[layer.name]
        with self.gm.graph.inserting_before(old):
            x = self._activation(nodes[layer.x.name], scheme)
            weight = (
                self.weight(scheme.weight)
                if scheme.narrow is None
                else self._channels(scheme.weight, layer.weight.dtype)
            )
            bias = nodes[layer.bias.name] if layer.bias is not None else None
            if scheme.bias is not None:
                bias = self.constant(scheme.bias)
            new = self.call(layer.target, *layer.arguments(x, weight, bias))
        new.meta["source"] = old.meta.get("source", "")
        old.replace_all_uses_with(new)
        nodes[layer.name] = new

    def read_quantized(self, node: Node, place: int, scheme: Scheme) -> None:
        """Let ``node`` also read its operand ``place`` as quantized by ``scheme``, like a layer."""
        args = list(node.args)
        x = args[place]
        assert isinstance(x, Node), node
        with self.gm.graph.inserting_before(node):
            args[place] = self._activation(x, scheme)
        node.args = tuple(args)

    def reweight(
        self, layer: Layer, weight: torch.Tensor, bias: torch.Tensor | None, nodes: dict[str, Node]
    ) -> None:
        """Give ``layer`` another weight [out, in, ...] and another bias; the node stays."""
        node = nodes[layer.name]
        with self.gm.graph.inserting_before(node):
            held = None if bias is None else self.constant(bias)
            operands = (nodes[layer.x.name], self.constant(weight), held)
        node.target, node.args = layer.target, layer.arguments(*operands)

    def _activation(self, x: Node, scheme: Scheme) -> Node:
        if scheme.kind == "weight_only":
            return x
        key = (x, scheme.activation, scheme.symmetric, scheme.narrow)
        if key not in self._shared:
            self._shared[key] = (
                self._scaled(x, scheme.activation, scheme.narrow)
                if scheme.narrow is not None
                else self._per_token(x, scheme.symmetric)
                if scheme.activation is None
                else self.per_tensor(x, scheme.activation)
            )
        return self._shared[key]

    def _scaled(self, x: Node, affine: Affine | None, narrow: torch.dtype) -> Node:
        """``x`` quantized for GPUs, with one scale or a scale per row, and dequantized."""
        dtype = x.meta["val"].dtype
        if affine is not None:
            columns = (int(x.meta["val"].shape[-1]),)
            device = x.meta["val"].device
            inverses = self.constant(torch.full(columns, 1.0 / affine.scale, device=device))
            q = self.call(scaled.quantize.default, x, inverses, narrow)
            return self.call(scaled.dequantize.default, q, affine.scale, dtype)
        both = self.call(scaled.quantize_rows.default, x, narrow)
        q, scales = (self.call(getitem, both, i) for i in (0, 1))
        return self.call(scaled.dequantize_rows.default, q, scales, dtype)

    def _channels(self, weight: Weight, dtype: torch.dtype) -> Node:
        """``weight`` quantized for GPUs and dequantized to ``dtype``."""
        key = id(weight), dtype
        if key not in self._shared:
            held = self.constant(weight.values), self.constant(weight.scales)
            self._shared[key] = self.call(scaled.dequantize_channels.default, *held, dtype)
        return self._shared[key]

    def _per_token(self, x: Node, symmetric: bool) -> Node:
        form = (-128, 127, torch.int8)
        chosen = self.call(_TOKENS[symmetric].default, x, torch.int8)
        if (
            symmetric
        ):  # torch's meta function returns float64 and int64, which is true only for the other op
            chosen.meta["val"] = tuple(v.to(torch.float32) for v in chosen.meta["val"])
        scale, zero = (self.call(getitem, chosen, i) for i in (0, 1))
        q = self.call(ops.quantize_per_token.default, x, scale, zero, *form)
        return self.call(ops.dequantize_per_token.default, q, scale, zero, *form, torch.float32)

    def per_tensor(self, x: Node, affine: Affine) -> Node:
        """``x`` quantized and dequantized with one scale."""
        form = (affine.scale, affine.zero_point, affine.low, affine.high, affine.dtype)
        q = self.call(ops.quantize_per_tensor.default, x, *form)
        return self.call(ops.dequantize_per_tensor.default, q, *form)

    def weight(self, weight: Weight) -> Node:
        """``weight`` in int8, dequantized."""
        key = id(weight)
        if key not in self._shared:
            values, scales = self.constant(weight.values), self.constant(weight.scales)
            form = (-weight.high, weight.high, torch.int8)
            self._shared[key] = (
                self.call(
                    ops.dequantize_per_channel_group.default,
                    *(values, scales, None, *form, weight.group, torch.float32),
                )
                if weight.group
                else self.call(ops.dequantize_per_channel.default, values, scales, None, 0, *form)
            )
        return self._shared[key]

    def constant(self, tensor: torch.Tensor) -> Node:
        """The node of an attribute ``const_k``, one per tensor."""
        if id(tensor) in self._constants:
            return self._constants[id(tensor)][1]
        name, self._next = f"const_{self._next}", self._next + 1
        self.gm.register_buffer(name, tensor)
        node = self.gm.graph.get_attr(name)
        node.meta["val"] = self.mode.from_tensor(tensor, static_shapes=True)
        self._constants[id(tensor)] = tensor, node
        return node

    def call(self, target: Any, *args: Any) -> Node:
        """A node at the point of insertion, with its shape inferred as in ``graph.to_fx``."""
        fakes = torch.fx.map_arg(args, lambda n: n.meta["val"])
        oblivious = oblivious_to_sizes()
        with oblivious, torch.no_grad(), self.mode, dispatched_in_python():
            made = target(*fakes)
        node = self.gm.graph.call_function(target, args)
        node.meta["val"] = made
        return node
