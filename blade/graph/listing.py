# SPDX-License-Identifier: Apache-2.0
"""The ops of a graph as a report lists them.

nodes = list_nodes(graph_view, {"cluster_0": (0, 1, 2)})
"""

from collections.abc import Mapping, Sequence

from blade.backends.base import OpNode
from blade.graph.view import GraphView
from blade.report_graph import NodeReport


def list_nodes(view: GraphView, clusters: Mapping[str, Sequence[int]]) -> tuple[NodeReport, ...]:
    """Every node of ``view``, in its order; ``clusters`` are the nodes of each by its name."""
    inside = {node: name for name, nodes in clusters.items() for node in nodes}
    inputs: list[list[int]] = [[] for _ in view.nodes]
    for producer, consumer, _ in view.edges:
        inputs[consumer].append(producer)
    return tuple(
        NodeReport(node.name, kind_of(node), inside.get(i), tuple(inputs[i]), _place(node.source))
        for i, node in enumerate(view.nodes)
    )


def kind_of(node: OpNode) -> str:
    """The op kind as lists in a config and reports name it: "aten::add".

    Taken from the node's name, which the graph gives it ("%y = aten::add", "prim::Print#7"): the
    target of what is no ATen op is a stand-in.
    """
    kind = node.name.rpartition(" = ")[2].partition("#")[0]
    return kind if "::" in kind else str(node.target._schema.name)


def _place(source: str) -> str:
    """``OpNode.source`` without the folders of the machine and the names of all outer modules."""
    parts = [part.replace("\\", "/").rpartition("/")[2] for part in source.split(" ")]
    return " ".join(parts).removeprefix("__module.")
