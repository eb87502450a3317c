# SPDX-License-Identifier: Apache-2.0
"""Inputs, outputs and blocks of a node of TorchScript, without torch's iterators.

    [value.unique() for value in inputs_of(node)]       # as with node.inputs()

The end of each of those iterators is a C++ exception, which takes up to 60 us in a process with many libraries: more
than reading the node.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

_WITHOUT_BLOCKS = frozenset(
    f"prim::{name}"
    for name in (
        *("Constant", "GetAttr", "ListConstruct", "ListUnpack", "NumToTensor"),
        *("RaiseException", "TupleConstruct", "TupleUnpack"),
    )
)


def inputs_of(node: torch._C.Node) -> list[torch._C.Value]:
    """The list of ``node.inputs()``."""
    own: Any = node  # the stubs lack methods
    return [own.inputsAt(k) for k in range(own.inputsSize())]


def outputs_of(node: torch._C.Node) -> list[torch._C.Value]:
    """The list of ``node.outputs()``."""
    own: Any = node
    return [own.outputsAt(k) for k in range(own.outputsSize())]


def blocks_of(node: torch._C.Node) -> Iterable[torch._C.Block]:
    """``node.blocks()``; torch is not asked about kinds that never have any."""
    kind = node.kind()
    return () if kind.startswith("aten::") or kind in _WITHOUT_BLOCKS else node.blocks()


def nodes_of(block: torch._C.Graph | torch._C.Block) -> Iterator[torch._C.Node]:
    """All nodes of ``block``; those of nested blocks follow the node that contains them."""
    for node in block.nodes():
        yield node
        for inner in blocks_of(node):
            yield from nodes_of(inner)
