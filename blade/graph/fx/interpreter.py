# SPDX-License-Identifier: Apache-2.0
"""torch.fx's interpreter without its progress bar, and one that gives its outputs one by one.

Even a hidden bar starts a thread of tqdm's and creates a lock that fixes the start method of the process:
``multiprocessing.set_start_method("spawn")`` raises from then on. A library must not cause either.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx


class Interpreter(fx.Interpreter):
    """``run`` as in torch, for subclasses that define what happens to a node."""

    def run(
        self,
        *args: Any,
        initial_env: dict[fx.Node, Any] | None = None,
        enable_io_processing: bool = True,
    ) -> Any:
        """The result of the graph for ``args``; raises the errors of its nodes."""
        self.env = {} if initial_env is None else initial_env
        self.args_iter = iter(self.graph.process_inputs(*args) if enable_io_processing else args)
        for node in self.graph.nodes:
            if node in self.env:
                continue
            self.env[node] = self.run_node(node)
            if self.garbage_collect_values:
                for unused in self.user_to_last_uses.get(node, ()):
                    del self.env[unused]
            if node.op == "output":
                result = self.env[node]
                return self.graph.process_outputs(result) if enable_io_processing else result
        raise AssertionError("a graph without an output")


class OutputsInTurn(Interpreter):
    """Runs a functional graph, and holds each value until its last use: an output that the caller drops is no longer
    held then.

    for number, output in OutputsInTurn(gm).each(inputs): ...
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._last_uses = last_uses(self.graph)

    def each(self, inputs: Sequence[Any]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the outputs with their numbers, in the order in which they are computed."""
        self.env, self.args_iter = {}, iter(inputs)
        due: dict[fx.Node, list[int]] = {}
        for k, one in enumerate(returned(self.graph)):
            due.setdefault(one, []).append(k)
        try:
            *nodes, _ = self.graph.nodes
            for node in nodes:
                with torch.no_grad():
                    self.env[node] = self.run_node(node)
                for k in due.pop(node, ()):
                    yield k, self.env[node]
                for unused in self._last_uses[node]:
                    del self.env[unused]
        finally:
            self.env = {}


def returned(graph: fx.Graph) -> Sequence[Any]:
    """The nodes that ``graph`` returns."""
    found = graph.output_node().args[0]
    assert isinstance(found, (list, tuple)), found
    return found


def last_uses(graph: fx.Graph, until_the_end: bool = False) -> dict[fx.Node, list[fx.Node]]:
    """Return the values that each node is the last to use. Being returned is a use only ``until_the_end``."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_output = node.op == "output"
        if not is_output:
            last = [node] if node not in seen else []
            last += [one for one in dict.fromkeys(node.all_input_nodes) if one not in seen]
            found[node] = last
            seen.update(last)
        elif until_the_end:
            seen.update(node.all_input_nodes)
    return found
