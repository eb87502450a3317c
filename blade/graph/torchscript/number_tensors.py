# SPDX-License-Identifier: Apache-2.0
"""Makes tensors of Python numbers by ATen ops instead of ``aten::tensor``, which only TorchScript knows.

    torch.tensor(n)  ->  scalar_tensor(n, dtype=int64)      torch.tensor([w, h])  ->  stack([scalar_tensor(w), ...])

Scripted code has such an op wherever a number is assigned to a part of a tensor: ``mask[:, :k] = 1.0``.
"""

import torch

from blade.graph.torchscript.bind_overloads import SCALAR_TYPES
from blade.graph.torchscript.insert import Inserter
from blade.graph.torchscript.program import nested

_DTYPES = {"IntType": torch.int64, "BoolType": torch.bool, "FloatType": None}
"""Kind of number -> the dtype of its tensor; ``None``: the default dtype."""

_LONGEST = 16


def make_number_tensors(graph: torch._C.Graph) -> None:
    """Replace each ``aten::tensor`` of a number, or of a short list of numbers, in ``graph``."""
    nodes = [inner for node in graph.nodes() for inner in (node, *nested(node))]
    for node in nodes:
        if node.kind() != "aten::tensor":
            continue
        made = _made(graph, node)
        if made is not None:
            node.output().replaceAllUsesWith(made)
            node.destroy()


def _made(graph: torch._C.Graph, node: torch._C.Node) -> torch._C.Value | None:
    given, dtype, device, grad = node.inputs()
    if grad.node().kind() != "prim::Constant" or grad.toIValue():
        return None
    insert = Inserter(graph, node)
    kind = given.type()
    if kind.kind() == "BoolType" and any(
        use.user.kind() != "aten::copy_" for use in node.output().uses()
    ):
        return None  # elsewhere torch's passes make it a bool again, which the ops do not take
    if kind.kind() in _DTYPES:
        return _scalar(insert, given, dtype, device)
    numbers = list(given.node().inputs())
    is_list = given.node().kind() == "prim::ListConstruct" and len(given.uses()) == 1
    if not is_list or not 0 < len(numbers) <= _LONGEST:
        return None
    if any(n.type().kind() not in ("IntType", "FloatType") for n in numbers):
        return None
    parts = [_scalar(insert, n, dtype, device) for n in numbers]
    return insert.op("aten::stack", [insert.tensors(parts), insert.constant(0)])


def _scalar(
    insert: Inserter, number: torch._C.Value, dtype: torch._C.Value, device: torch._C.Value
) -> torch._C.Value:
    wanted = _DTYPES[number.type().kind()]
    if wanted is torch.bool:  # which is no Scalar in TorchScript
        number = insert.int_of(number)
    if dtype.type().kind() == "NoneType" and wanted is not None:
        dtype = insert.constant(next(k for k, d in SCALAR_TYPES.items() if d is wanted))
    nothing = insert.constant(None)
    return insert.op("aten::scalar_tensor", [number, dtype, nothing, device, nothing])
