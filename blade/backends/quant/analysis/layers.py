# SPDX-License-Identifier: Apache-2.0
"""The layers of a cluster that can be quantized: products and convolutions with a constant weight.

    layers = find_layers(gm)
    layers[0].weight, layers[0].x          # [out, in, ...] float32, the activation's FX node

A layer's weight has the output channel first, for every op; ``run`` computes the layer with another
activation and another weight of that form.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten
CONVOLUTIONS = (
    aten.conv1d.default,
    aten.conv2d.default,
    aten.convolution.default,
    aten._convolution.default,
    aten._convolution.deprecated,
)
_TRANSPOSED = 6  # position of `transposed` in aten.convolution and aten._convolution
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
PRODUCTS = (aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default)
_SCOPE = re.compile(r"__module\.([\w.]+)")


@dataclass(frozen=True)
class Layer:
    """``node`` computes ``x`` times ``weight`` [out, in, ...] plus ``bias`` (a node of [out], or ``None``).

    ``kind``: "linear" (any product with a matrix) or "conv". ``title``: the name for users.
    """

    node: Node
    kind: str
    x: Node
    weight: torch.Tensor
    bias: Node | None
    title: str

    @property
    def name(self) -> str:
        """A name that is unique in the graph and equal in its copies."""
        return self.node.name

    @property
    def signature(self) -> tuple[Any, ...]:
        """Layers with equal signatures take equal time at equal inputs."""
        rest = tuple(a for a in self.node.args[3:] if not isinstance(a, Node))
        return self.kind, tuple(self.weight.shape), repr(rest)

    def run(self, x: Any, weight: Any, bias: Any) -> Any:
        """The layer on other operands, tensors."""
        return self.target(*self.arguments(x, weight, bias))

    @property
    def target(self) -> Any:
        return aten.linear.default if self.kind == "linear" else self.node.target

    def arguments(self, x: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
        """The arguments of ``target``."""
        if self.kind == "linear":
            return (x, weight) if bias is None else (x, weight, bias)
        return (x, weight, bias, *self.node.args[3:])


def find_layers(gm: GraphModule, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> list[Layer]:
    """The layers in program order. Activation and weight (a constant of the cluster) are of ``dtypes``."""
    found = [_layer(gm, node) for node in gm.graph.nodes if node.op == "call_function"]
    return [layer for layer in found if layer is not None and layer.weight.dtype in dtypes]


def tensor_of(gm: GraphModule, node: Any) -> torch.Tensor | None:
    """The constant that ``node`` is, or of which it is a transpose."""
    if not isinstance(node, Node):
        return None
    if node.op == "get_attr":
        held = attrgetter(str(node.target))(gm)
        return held if isinstance(held, torch.Tensor) else None
    view = _VIEWS.get(node.target)
    held = tensor_of(gm, node.args[0]) if view is not None else None
    return None if held is None or view is None else view(held, *node.args[1:])


_VIEWS: dict[Any, Callable[..., torch.Tensor]] = {
    aten.t.default: lambda x: x.t(),
    aten.numpy_T.default: lambda x: x.T,
    aten.transpose.int: lambda x, a, b: x.transpose(a, b),
    aten.permute.default: lambda x, axes: x.permute(axes),
    aten.detach.default: lambda x: x,
}


def _layer(gm: GraphModule, node: Node) -> Layer | None:
    if node.kwargs:
        return None
    if node.target in PRODUCTS:
        return _product(gm, node)
    if node.target not in CONVOLUTIONS or len(node.args) < 2:
        return None
    weight = tensor_of(gm, node.args[1])
    bias = node.args[2] if len(node.args) > 2 else None
    if len(node.args) > _TRANSPOSED and node.args[_TRANSPOSED]:
        return None
    return _checked(gm, node, "conv", node.args[0], weight, bias)


def _product(gm: GraphModule, node: Node) -> Layer | None:
    if node.target is aten.addmm.default:
        if len(node.args) != 3:  # has beta or alpha
            return None
        bias, x, matrix = node.args
        held = tensor_of(gm, matrix)
        return _checked(gm, node, "linear", x, None if held is None else held.t(), bias)
    x, matrix, *rest = node.args
    held = tensor_of(gm, matrix)
    if held is None or held.dim() != 2 or not isinstance(x, Node):
        return None
    if node.target is aten.linear.default:
        return _checked(gm, node, "linear", x, held, rest[0] if rest else None)
    return _checked(gm, node, "linear", x, held.t(), None)


def _checked(
    gm: GraphModule, node: Node, kind: str, x: Any, weight: torch.Tensor | None, bias: Any
) -> Layer | None:
    if not isinstance(x, Node) or weight is None or not weight.numel():
        return None
    value = x.meta["val"]
    if value.dtype != weight.dtype or value.dtype not in FLOATS or value.dim() < 2:
        return None
    if bias is not None:
        held = tensor_of(gm, bias)
        if held is None or held.shape != (len(weight),):
            return None
    return Layer(node, kind, x, weight, bias, title_of(node))


def title_of(node: Node) -> str:
    """The name of the user's module that contains ``node``, or the node's name."""
    scopes = _SCOPE.findall(str(node.meta.get("source", "")))
    return str(scopes[-1]) if scopes else str(node.name)
