# SPDX-License-Identifier: Apache-2.0
"""Run an FX graph and give its outputs away one by one: no more is in memory than what is still needed.

    run = OutputByOutput(cluster.gm)
    for number, output in run.each(inputs): ...    # each as soon as it is computed, and then no longer held
    [third] = run.of([2])(inputs)                  # computes only what that output needs

In training the outputs of forward are all that it saves for backward.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from blade.graph.fx.interpreter import Interpreter
from blade.verification.rng_replay import may_draw

Inputs = tuple[torch.Tensor, ...]
Self = TypeVar("Self", bound="OutputByOutput")


class OutputByOutput(Interpreter):
    """``before`` is called before each run. ``arguments`` makes the graph's inputs of those that a run is given.

    ``writes``: an op of the graph does, maybe to an input.
    """

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        before: Callable[[], None] = lambda: None,
        arguments: Callable[[Inputs], Sequence[Any]] = tuple,
    ) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._before, self._arguments = before, arguments
        writes = any(n.op == "call_function" and _is_mutable(n.target) for n in self.graph.nodes)
        self.writes = writes
        self._last_uses = _last_uses(self.graph, writes)
        self._outputs: Sequence[int] | None = None
        self._needed: set[torch.fx.Node] = set()

    def of(self: Self, outputs: Sequence[int]) -> Self:
        """Return a run of these outputs only; random ops draw in any case."""
        part = copy.copy(self)
        part._outputs = outputs
        part._needed = _needed(self.graph, outputs)
        return part

    @property
    def count(self) -> int:
        """How many outputs are chosen."""
        return len(_returned(self.graph) if self._outputs is None else self._outputs)

    def __call__(self, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Return the chosen outputs."""
        found = dict(self.each(inputs))
        return tuple(found[k] for k in range(len(found)))

    def each(self, inputs: Inputs) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the chosen outputs with their numbers among them, in the order in which they are computed.

        One that the caller does not keep is freed at its last use. Where the graph writes, all come at its end.
        """
        self._before()
        self.begin(inputs)
        self.env, self.args_iter = {}, iter(self._arguments(inputs))
        returned = _returned(self.graph)
        chosen = range(len(returned)) if self._outputs is None else self._outputs
        due: dict[torch.fx.Node, list[int]] = {}
        for k, i in enumerate(chosen):
            due.setdefault(returned[i], []).append(k)
        try:
            *nodes, _ = self.graph.nodes
            for node in nodes:
                with torch.no_grad():
                    self.env[node] = self.run_node(node)
                for k in () if self.writes else due.pop(node, ()):
                    yield k, self._result(node)
                for unused in self._last_uses.get(node, ()):
                    del self.env[unused]
            for node, numbers in due.items():
                for k in numbers:
                    yield k, self._result(node)
        finally:
            self.env = {}
            self.end()

    def begin(self, inputs: Inputs) -> None:
        """A run of ``inputs`` begins."""

    def end(self) -> None:
        """It has ended."""

    def result(self, value: Any) -> torch.Tensor:
        """What is given away of an output's value."""
        made: torch.Tensor = value
        return made

    def computes(self, node: torch.fx.Node) -> bool:
        """Whether a chosen output needs ``node``."""
        return self._outputs is None or node.op != "call_function" or node in self._needed

    def run_node(self, n: torch.fx.Node) -> Any:
        return super().run_node(n) if self.computes(n) else None

    def _result(self, node: torch.fx.Node) -> torch.Tensor:
        with torch.no_grad():
            return self.result(self.env[node])


def _is_mutable(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _returned(graph: torch.fx.Graph) -> Sequence[Any]:
    returned = graph.output_node().args[0]
    assert isinstance(returned, (list, tuple)), returned
    return returned


def _last_uses(graph: torch.fx.Graph, writes: bool) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """Return the values that each node is the last to use. Being returned is a use only where the graph writes."""
    found: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    seen: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        is_output = node.op == "output"
        if not is_output:
            last = [node] if node not in seen else []
            last += [one for one in dict.fromkeys(node.all_input_nodes) if one not in seen]
            found[node] = last
            seen.update(last)
        elif writes:
            seen.update(node.all_input_nodes)
    return found


def _needed(graph: torch.fx.Graph, outputs: Sequence[int]) -> set[torch.fx.Node]:
    returned = _returned(graph)
    pending = [*(returned[i] for i in outputs), *filter(may_draw, graph.nodes)]
    found: set[torch.fx.Node] = set()
    while pending:
        node = pending.pop()
        if isinstance(node, torch.fx.Node) and node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found
