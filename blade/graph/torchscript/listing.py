# SPDX-License-Identifier: Apache-2.0
"""Lists the ops of a graph for reports.

nodes = list_nodes(graph_view, {"cluster_0": (0, 1, 2)})
"""

from collections.abc import Mapping, Sequence

from blade.core.cluster import OpNode
from blade.graph.torchscript.decision_checks import check_of
from blade.graph.torchscript.view import GraphView
from blade.report.graph import NodeReport


def list_nodes(view: GraphView, clusters: Mapping[str, Sequence[int]]) -> tuple[NodeReport, ...]:
    """Every node of ``view`` in order; ``clusters`` maps each cluster's name to its nodes."""
    inside = {node: name for name, nodes in clusters.items() for node in nodes}
    inputs: list[list[int]] = [[] for _ in view.nodes]
    for producer, consumer, _ in view.edges:
        inputs[consumer].append(producer)
    return tuple(
        NodeReport(node.name, kind_of(node), inside.get(i), tuple(inputs[i]), _place(node.source))
        for i, node in enumerate(view.nodes)
    )


def check_nodes(view: GraphView) -> frozenset[int]:
    """The nodes that check decisions, compare inputs for that, or raise; they are no ops of the model."""
    program = view.program
    owners = {line.index for line in program.lines if check_of(line.node) is not None}
    found = set()
    for node, unit in enumerate(view.units):
        line = program.lines[unit.lines[0]]
        compares = bool(owners) and line.kind in ("aten::__is__", "aten::__isnot__")
        if line.index in owners or program.blocks[line.block].owner in owners or compares:
            found.add(node)
    return frozenset(found)


def kind_of(node: OpNode) -> str:
    """The op kind as in a config's lists and in reports: "aten::add".

    Taken from the node's name in the graph ("%y = aten::add", "prim::Print#7"), because the target of a
    node that is no ATen op is a stand-in.
    """
    kind = node.name.rpartition(" = ")[2].partition("#")[0]
    return kind if "::" in kind else str(node.target._schema.name)


def _place(source: str) -> str:
    """``OpNode.source`` without the machine's folders and the names of outer modules."""
    parts = [part.replace("\\", "/").rpartition("/")[2] for part in source.split(" ")]
    return " ".join(parts).removeprefix("__module.")
