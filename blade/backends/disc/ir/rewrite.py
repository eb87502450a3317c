# SPDX-License-Identifier: Apache-2.0
"""The driver of most passes: copies a graph value by value and lets a function replace values.

def step(b, v, args):
    return b.pointwise("neg", args[0]) if v.op == "..." else None     # None: copy unchanged

graph = rewrite_values(graph, step)
"""

from collections.abc import Callable
from dataclasses import replace

from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Value,
    live,
)

RewriteFn = Callable[[IrBuilder, Value, list[Value]], Value | None]
"""(builder of the copy, value, its operands in the copy) -> its replacement; ``None``: copy it unchanged."""


def rewrite_values(graph: Graph, step: RewriteFn) -> Graph:
    """Copy ``graph``, with the values that ``step`` returns in place of the original ones."""
    return rewrite_with_builder(graph, step)[1]


def rewrite_with_builder(graph: Graph, step: RewriteFn) -> tuple[IrBuilder, Graph]:
    """``rewrite_values``, with the builder, for callers that add values and then call
    ``eliminate_dead_code``.
    """
    b = IrBuilder()
    new: dict[int, Value] = {}
    for v in live(graph):
        args = [new[a.id] for a in v.args]
        made = step(b, v, args)
        if made is None:
            made = b.make(v.op, args, v.shape, v.dtype, v.strides, **v.attrs)
        new[v.id] = made
    outs = tuple(new[v.id] for v in graph.outputs)
    ins = tuple(new[v.id] for v in graph.inputs)
    return b, eliminate_dead_code(replace(graph, values=b.values, outputs=outs, inputs=ins))


def eliminate_dead_code(graph: Graph) -> Graph:
    """``graph`` without values that no output needs."""
    graph.values = live(graph)
    return graph
