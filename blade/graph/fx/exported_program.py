# SPDX-License-Identifier: Apache-2.0
"""Converts a cluster to ``torch.export.ExportedProgram``, the input of exporters and other compilers.

    program = to_exported(cluster)
    program.module()(*cluster.samples[0])       # a tuple, like cluster.gm

Nothing is traced: the cluster's FX graph already has ATen calls and symbolic shapes; only its constants
become inputs (buffers ``const_k``, the same tensors). Symbolic sizes of the cluster stay symbolic in the
program. Tracing the program again adds guards to ``cluster.shape_env``, so ``guard_program`` must be called
afterwards, and conversion belongs in a child process, where the cluster is a copy.

The program has no ``example_inputs``: with them torch would check its own guards in ``module()``, which are
written for inputs named by Dynamo. If a user needs some, set
``program.example_inputs = (cluster.samples[0], {})``.
"""

import operator
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, Node
from torch.utils._pytree import tree_flatten

from blade.core.cluster import Cluster
from blade.core.reason import Code
from blade.errors import Refused
from blade.graph.shapes.guards import end_of_own

aten = torch.ops.aten


def to_exported(
    cluster: Cluster, *, row_major: bool = False, reduce: Callable[[Graph], None] | None = None
) -> ExportedProgram:
    """``cluster`` with its constants lifted to buffers.

    Every output is a value of its own: an output that is an input, a constant or another output is cloned.
    ``row_major``: permute outputs to the order of their axes in memory, for formats with row-major results
    only (``output_orders`` tells how to permute them back, for free).
    ``reduce`` may rewrite the graph before it becomes a program.

    Raises ``Refused(CONVERSION_FAILED)`` for an output that is not dense in memory.
    """
    end_of_own(cluster.shape_env)
    lifted = _LiftedProgram(cluster)
    for node in cluster.gm.graph.nodes:
        lifted.take(node)
    orders = output_orders(cluster) if row_major else [None] * len(lifted.returned)
    outputs = [lifted.output(*one) for one in zip(lifted.returned, orders, strict=True)]
    returned = lifted.graph.output(tuple(outputs))
    if reduce is not None:
        reduce(lifted.graph)
    lifted.graph.lint()
    return _program(cluster, lifted, list(returned.args[0]))


def output_orders(cluster: Cluster) -> list[tuple[int, ...] | None]:
    """Per output its axes in memory order, outermost first; ``None`` for row-major outputs."""
    returned = cluster.gm.graph.output_node().args[0]
    assert isinstance(returned, (list, tuple)), returned
    return [_order(k, node.meta["val"]) for k, node in enumerate(returned)]


class _LiftedProgram:
    """The new graph: placeholders for constants, then for inputs, then the calls."""

    def __init__(self, cluster: Cluster) -> None:
        self.graph = Graph()
        self.nodes: dict[Node, Node] = {}
        self.constants: dict[str, Node] = {}
        self.inputs: list[Node] = []
        self.returned: list[Node] = []
        self.taken: set[Node] = set()
        for node in cluster.gm.graph.nodes:
            if node.op == "get_attr" and str(node.target) not in self.constants:
                placed = self._place(f"b_{str(node.target).replace('.', '_')}", node)
                self.constants[str(node.target)] = placed
        for k, node in enumerate(n for n in cluster.gm.graph.nodes if n.op == "placeholder"):
            self.inputs.append(self._place(f"x{k}", node))
            self.nodes[node] = self.inputs[-1]
        self.taken.update(self.inputs, self.constants.values())

    def take(self, node: Node) -> None:
        """Copy ``node``; its arguments have been copied before."""
        if node.op == "get_attr":
            self.nodes[node] = self.constants[str(node.target)]
        elif node.op == "output":
            self.returned = [self.nodes[n] for n in node.args[0]]  # type: ignore[union-attr, index]
        elif node.op == "call_function":
            copied = self.graph.node_copy(node, lambda n: self.nodes[n])
            copied.meta = {"val": node.meta["val"]}
            self.nodes[node] = copied

    def output(self, node: Node, order: tuple[int, ...] | None) -> Node:
        """The value returned for ``node``: itself if possible, but only once."""
        if order is not None:
            node = self._call(aten.permute.default, node, list(order))
        elif node in self.taken:
            node = self._call(aten.clone.default, node)
        self.taken.add(node)
        return node

    def _place(self, name: str, like: Node) -> Node:
        placed = self.graph.placeholder(name)
        assert placed.name == name, placed
        placed.meta = {"val": like.meta["val"]}
        return placed

    def _call(self, target: Any, node: Node, *args: Any, **kwargs: Any) -> Node:
        made = self.graph.call_function(target, (node, *args), kwargs)
        fake = node.meta["val"]
        with fake.fake_mode:
            made.meta = {"val": target(fake, *args, **kwargs)}
        return made


def _program(cluster: Cluster, lifted: _LiftedProgram, outputs: list[Node]) -> ExportedProgram:
    constants = {name: attrgetter(name)(cluster.gm) for name in lifted.constants}
    takes = [
        InputSpec(InputKind.BUFFER, TensorArgument(node.name), target=name, persistent=True)
        for name, node in lifted.constants.items()
    ]
    takes += [InputSpec(InputKind.USER_INPUT, TensorArgument(n.name), None) for n in lifted.inputs]
    gives = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in outputs]
    return ExportedProgram(
        root=torch.nn.Module(),
        graph=lifted.graph,
        graph_signature=ExportGraphSignature(takes, gives),
        state_dict=constants,
        range_constraints=_ranges(cluster),
        module_call_graph=[ModuleCallEntry("", _signature(lifted.inputs, outputs))],
        constants={},
    )


def _signature(inputs: list[Node], outputs: list[Node]) -> ModuleCallSignature:
    _, takes = tree_flatten((tuple(inputs), {}))
    _, gives = tree_flatten(tuple(outputs))
    return ModuleCallSignature(
        inputs=[TensorArgument(n.name) for n in inputs],
        outputs=[TensorArgument(n.name) for n in outputs],
        in_spec=takes,
        out_spec=gives,
        forward_arg_names=[n.name for n in inputs],
    )


def _ranges(cluster: Cluster) -> dict[Any, Any]:
    """The known range of each symbol, for printing and checking."""
    ranges = cluster.shape_env.var_to_range
    found = {}
    for node in cluster.gm.graph.nodes:
        if node.op == "placeholder":
            for size in node.meta["val"].shape:
                symbols = size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ()
                found.update({s: ranges[s] for s in symbols if s in ranges})
    return found


def _order(position: int, fake: torch.Tensor) -> tuple[int, ...] | None:
    """From the sample's sizes and strides; axes of size 0 and 1 may have any place."""
    sizes, strides = ([_hint(n) for n in dims] for dims in (fake.shape, fake.stride()))
    axes = [a for a in range(len(sizes)) if sizes[a] != 1]
    if 0 in sizes:
        return None
    order = sorted(axes, key=lambda a: -strides[a])
    expected = 1
    for axis in reversed(order):
        if strides[axis] != expected:
            raise Refused(
                Code.CONVERSION_FAILED,
                f"Output {position} has strides {strides} at sizes {sizes}: only results whose "
                "elements are laid out densely can come from this backend.",
            )
        expected *= sizes[axis]
    if order == axes:
        return None
    rest = iter(order)
    return tuple(a if sizes[a] == 1 else next(rest) for a in range(len(sizes)))


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else operator.index(size.node.hint)
