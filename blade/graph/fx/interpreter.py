# SPDX-License-Identifier: Apache-2.0
"""torch.fx's interpreter without its progress bar, and one that gives its outputs one by one.

Even a hidden bar starts a thread of tqdm's and creates a lock that fixes the start method of the process:
``multiprocessing.set_start_method("spawn")`` raises from then on. A library must not cause either.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from blade.graph.fx.random_ops import may_draw
from blade.graph.fx.views import may_lie_in_operand


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
    """Runs a graph that writes to nothing but its inputs, and holds each value until its last use: an output that the
    caller drops is no longer held then.

    for number, output in OutputsInTurn(gm).each(inputs): ...
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._schedule = Schedule(self.graph)

    def each(self, inputs: Sequence[Any]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the outputs with their numbers, in the order in which they are computed."""
        self.env, self.args_iter = {}, iter(inputs)
        every = returned(self.graph)
        try:
            for node in self._schedule.nodes:
                with torch.no_grad():
                    self.env[node] = self.run_node(node)
                for k in self._schedule.due.get(node, ()):
                    yield k, self.env[node]
                for unused in self._schedule.unused.get(node, ()):
                    del self.env[unused]
            for k in self._schedule.late:
                yield k, self.env[every[k]]
        finally:
            self.env = {}


def without_outputs(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a module that computes all that ``gm`` does and returns nothing: no output outlives its last use."""
    graph = fx.Graph()
    graph.graph_copy(gm.graph, {})
    graph.output(())
    return fx.GraphModule(gm, graph)


class Schedule:
    """An order of the nodes of a graph in which few values live at a time, and when each output is computed.

    What nothing but the output uses, such as the views that a forward graph saves, runs as soon as it can. A graph
    that writes keeps its order; an output in memory that may be written is ``late``, at the end.

    ``nodes``: but for the output, and those that ``needed`` leaves out. ``due``: numbers of the outputs that a node
    computes. ``unused``: values that a node is the last to use.
    """

    def __init__(
        self,
        graph: fx.Graph,
        numbers: Sequence[int] | None = None,
        needed: Collection[fx.Node] | None = None,
    ) -> None:
        """``numbers``: of the outputs, in the order in which ``due`` counts them; by default all."""
        every = returned(graph)
        writes = any(map(writes_memory, graph.nodes))
        chosen = range(len(every)) if numbers is None else numbers
        nodes = [*graph.nodes][:-1] if writes else _early(graph)
        if needed is not None:
            nodes = [node for node in nodes if node.op != "call_function" or node in needed]
        self.nodes: Sequence[fx.Node] = nodes
        self.late = [k for k, i in enumerate(chosen) if writes and _may_be_an_input(every[i])]
        self.due: dict[fx.Node, list[int]] = {}
        for k, i in enumerate(chosen):
            if k not in self.late:
                self.due.setdefault(every[i], []).append(k)
        self.unused: dict[fx.Node, list[fx.Node]] = {}
        seen = {every[chosen[k]] for k in self.late}
        for node in reversed(nodes):
            last = [one for one in dict.fromkeys((node, *node.all_input_nodes)) if one not in seen]
            self.unused[node] = last
            seen.update(last)


def returned(graph: fx.Graph) -> Sequence[Any]:
    """The nodes that ``graph`` returns."""
    found = graph.output_node().args[0]
    assert isinstance(found, (list, tuple)), found
    return found


def writes_memory(node: fx.Node) -> bool:
    """Whether an op of ATen writes to one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _early(graph: fx.Graph) -> list[fx.Node]:
    nodes = [*graph.nodes][:-1]
    ends: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.op != "call_function" or may_draw(node):
            continue  # what draws keeps its place in the order of draws
        users = {user for user in node.users if user.op != "output"}
        if not users or (_may_be_a_view(node) and users <= ends):
            ends.add(node)
    found: dict[fx.Node, None] = {}
    for node in nodes:
        pending = [node]
        while pending:
            one = pending.pop()
            if one in found:
                continue
            found[one] = None
            ready = (u for u in one.users if u in ends and u not in found)
            pending += [u for u in ready if all(a in found for a in u.all_input_nodes)]
    return [*found]


def _may_be_an_input(node: fx.Node) -> bool:
    """Whether the value of ``node`` may lie in an input's memory."""
    while node.op == "call_function":
        if not _may_be_a_view(node):
            return False
        node = node.all_input_nodes[0]
    return True


def _may_be_a_view(node: fx.Node) -> bool:
    """Whether the value of ``node`` may lie in the memory of its first operand."""
    return not isinstance(node.target, torch._ops.OpOverload) or may_lie_in_operand(node.target)
