# SPDX-License-Identifier: Apache-2.0
"""An inference graph that has the parameters it was compiled with as constants.

Dynamo lifts parameters to inputs, and its guards accept others with the same metadata: those of another
instance of the module, or assigned through ``.data``. So each call compares their addresses. If they differ,
a second version of the graph takes parameters as inputs; it is compiled when first needed. The engine itself
notices writes to the same memory (``Cluster.live``).
"""

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from blade.config import Config
from blade.core.reason import Reason
from blade.dynamo.compile_graph import CompiledGraph, compile_fx
from blade.dynamo.saved_graph import save_graph


class BoundParameters:
    """Has the inputs and outputs of ``graph``. ``given`` are the real inputs of Dynamo's graph.

    ``places``: the inputs that are constants.
    """

    def __init__(
        self,
        graph: GraphModule,
        given: Sequence[Any],
        config: Config,
        name: str,
        notes: Sequence[Reason] = (),
    ) -> None:
        self._config, self._name = config, name
        self._lock = threading.Lock()
        self.places = bindable(graph, given)
        self._held = held = {i: given[i].detach() for i in self.places}
        self._pointers = [held[i].data_ptr() for i in self.places]
        self._unbound_graph = copy.deepcopy(graph) if held else None
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        constants = {placeholders[i]: tensor for i, tensor in held.items()}
        self._bound = compile_fx(graph, config, name, constants, notes=notes)
        self._unbound: CompiledGraph | None = None

    def __call__(self, *args: Any) -> Any:
        pointers = [args[i].data_ptr() for i in self.places]
        if pointers == self._pointers:
            return self._bound(*args)
        return self._for_others()(*args)

    def is_served(self) -> bool | None:
        """As of ``CompiledGraph``, for the parameters that are constants."""
        return self._bound.is_served()

    def save(self) -> bytes:
        """The graph for another process, whose parameters it will be bound to (``saved_graph``)."""
        bound = self._bound
        return save_graph(bound.name, bound.run, bound.report(), self._held)

    def _for_others(self) -> CompiledGraph:
        with self._lock:
            if self._unbound is None:
                assert self._unbound_graph is not None
                name = f"{self._name}.unbound"
                self._unbound = compile_fx(self._unbound_graph, self._config, name, {})
            return self._unbound


def bindable(graph: GraphModule, given: Sequence[Any]) -> list[int]:
    """The inputs that are parameters or buffers which the graph only reads."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(given):  # AOTAutograd took subclasses or aliases apart
        return []
    pairs = enumerate(zip(placeholders, given, strict=True))
    return [i for i, (node, tensor) in pairs if _is_static(tensor) and _fits(node, tensor)]


def _is_static(tensor: Any) -> bool:
    if not isinstance(tensor, torch.Tensor) or type(tensor.data) is not torch.Tensor:
        return False
    marked = getattr(tensor, "_dynamo_static_input_type", None) is not None
    # DISC compiles a one-element constant in as a number, which later writes could not change
    return (marked or isinstance(tensor, torch.nn.Parameter)) and tensor.numel() != 1


def _fits(node: Node, tensor: torch.Tensor) -> bool:
    fake = node.meta["val"]
    written = any(
        user.target is torch.ops.aten.copy_.default and user.args[0] is node for user in node.users
    )
    return (
        isinstance(fake, torch.Tensor)
        and not written
        and tensor.layout is torch.strided
        and (fake.dtype, fake.device) == (tensor.dtype, tensor.device)
        and tuple(fake.shape) == tuple(tensor.shape)
    )
