# SPDX-License-Identifier: Apache-2.0
"""Gradients of activations read the activation's result, which the next product saves anyway.

    y = leaky_relu(x, 0.1);   leaky_relu_backward(g, x, 0.1, False)   ->   leaky_relu_backward(g, y, 0.1, True)

Both give the same values to the bit: on which side of a bend ``x`` lies, ``y`` tells as well.
"""

from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten

_COPIES = (aten.alias.default, aten.clone.default, aten.detach.default)
_IS_RESULT = 3  # argument of leaky_relu_backward


def read_results(joint: Graph) -> None:
    """Change ``joint`` in place. Its forward comes first."""
    seen: set[Node] = set()
    for node in joint.nodes:
        seen.add(node)
        if node.target is aten.hardtanh_backward.default:
            result = _result_of(aten.hardtanh.default, node, (-1, 1))
        elif node.target is aten.leaky_relu_backward.default and _tells_signs(node):
            result = _result_of(aten.leaky_relu.default, node, (0.01,))
        else:
            continue
        if result in seen:
            node.update_arg(1, result)
            if node.target is aten.leaky_relu_backward.default:
                node.update_arg(_IS_RESULT, True)


def _tells_signs(gradient: Node) -> bool:
    _, _, slope, is_result = gradient.args
    return not is_result and isinstance(slope, (int, float)) and slope > 0


def _result_of(activation: Any, gradient: Node, defaults: tuple[float, ...]) -> Node | None:
    """The result of ``activation`` with what ``gradient`` reads and its numbers."""
    count = len(defaults)
    read = gradient.args[1]
    numbers = gradient.args[2 : 2 + count]
    while isinstance(read, Node) and read.target in _COPIES:
        read = read.args[0]
    for user in read.users if isinstance(read, Node) else ():
        if user.target is activation:
            given = user.args[1:]
            if (*given, *defaults[len(given) :]) == numbers and not user.kwargs:
                return user
    return None
