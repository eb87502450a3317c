# SPDX-License-Identifier: Apache-2.0
"""A node that ONNX Runtime runs, as an engine of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blade.importers.onnx.emitter import Emitter
from blade.importers.onnx.errors import NotImported
from blade.importers.onnx.table import NodeView
from blade.importers.onnx.types import OutputType
from blade.importers.onnx.values import Value


def write_runtime_node(
    e: Emitter,
    node: NodeView,
    inputs: Sequence[Value | None],
    types: Sequence[OutputType],
    opsets: Mapping[str, int],
) -> Sequence[Value]:
    """Write a call of the engine that runs ``node``."""
    raise NotImported("later")
