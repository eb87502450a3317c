# SPDX-License-Identifier: Apache-2.0
"""Let the engines of a graph compete before its first call: ``aot_compile`` saves the selected ones."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from blade.core.attempt import attempt
from blade.core.reason import Code, Reason, Stage
from blade.dynamo.bound_parameters import BoundParameters
from blade.dynamo.compile_graph import CompiledGraph
from blade.process.torch_state import torch_state_kept

log = logging.getLogger(__name__)


def select_engines(
    made: CompiledGraph | BoundParameters, graph: GraphModule, given: Sequence[Any], strict: bool
) -> None:
    """Let the engines compete now, at copies of the inputs ``given``, so that the selected ones are saved.

    Where that is not possible they compete at the first call.
    """
    bound = made.places if isinstance(made, BoundParameters) else []
    count = sum(node.op == "placeholder" for node in graph.graph.nodes)
    if count != len(given) or not all(map(_is_real, given)):
        return  # AOTAutograd took subclasses or aliases apart
    args = [one if i in bound else _copy(one) for i, one in enumerate(given)]
    with torch_state_kept():
        found = attempt(
            Stage.SELECT, None, "graph", lambda: made(*args), strict, Code.ENGINE_RAISED
        )
    if isinstance(found, Reason):
        log.info("engines are selected at the first call: %s", found.detail)


def _is_real(one: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return type(one.data) is torch.Tensor
    return isinstance(one, int) or (isinstance(one, torch.SymInt) and one.node.has_hint())


def _copy(one: Any) -> Any:
    if isinstance(one, torch.Tensor):
        return one.detach().clone()
    return (
        one.node.hint if isinstance(one, torch.SymInt) else one
    )  # int() would specialize the graph
