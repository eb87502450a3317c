# SPDX-License-Identifier: Apache-2.0
"""The table of ONNX ops: a row is a function that writes TorchScript.

    @row("Gelu")
    def gelu(e, node, x):
        return f"torch.gelu({e.tensor(x)}, approximate={node.text('approximate', 'none')!r})"

A row takes the node's inputs, ``None`` for those that are left out. It returns the text of a tensor, or a value,
or a tuple of these if the node has several outputs. It raises ``NotImported`` for a form that it has no answer for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.values import Value

Row = Callable[..., Any]
ROWS: dict[tuple[str, str], Row] = {}

MICROSOFT = "com.microsoft"
Index = int
Ints = list[int]
Floats = list[float]


@dataclass(frozen=True)
class NodeView:
    """A node for its row. ``version`` is the opset of its domain."""

    proto: onnx.NodeProto
    op: str
    domain: str
    version: int
    attributes: dict[str, Any]
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]

    def int(self, name: str, default: int) -> int:
        return int(self.attributes.get(name, default))

    def float(self, name: str, default: float) -> float:
        return float(self.attributes.get(name, default))

    def text(self, name: str, default: str) -> str:
        found = self.attributes.get(name, default)
        return found.decode() if isinstance(found, bytes) else str(found)

    def ints(self, name: str) -> Ints | None:
        found: Sequence[Any] | None = self.attributes.get(name)
        return None if found is None else [int(one) for one in found]

    def floats(self, name: str) -> Floats | None:
        found: Sequence[Any] | None = self.attributes.get(name)
        return None if found is None else [float(one) for one in found]

    def array(self, name: str) -> np.ndarray[Any, Any] | None:
        found = self.attributes.get(name)
        return None if found is None else onnx.numpy_helper.to_array(found)

    def graph(self, name: str) -> onnx.GraphProto:
        found: onnx.GraphProto = self.attributes[name]
        return found

    def wants(self, index: Index) -> bool:
        """Whether output ``index`` is used by the model."""
        return index < len(self.outputs) and self.outputs[index] != ""


def view_node(proto: onnx.NodeProto, version: int) -> NodeView:
    attributes = {one.name: onnx.helper.get_attribute_value(one) for one in proto.attribute}
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    return NodeView(
        proto,
        proto.op_type,
        domain,
        version,
        attributes,
        tuple(proto.output),
        tuple(proto.input),
    )


def row(*names: str, domain: str = "") -> Callable[[Row], Row]:
    """Register the row of these ops."""

    def register(function: Row) -> Row:
        for name in names:
            assert (domain, name) not in ROWS, name
            ROWS[domain, name] = function
        return function

    return register


def find(node: NodeView) -> Row:
    """Raises ``NotImported`` for an op without a row."""
    found = ROWS.get((node.domain, node.op))
    if found is None:
        raise NotImported(f"The op {node.op} has no row in the table.")
    return found


Result = str | Value | None
