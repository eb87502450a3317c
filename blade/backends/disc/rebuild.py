# SPDX-License-Identifier: Apache-2.0
"""A graph copied value by value, which is what most passes are: what becomes of each one is their step.

def step(b, v, args):
    return b.pointwise("neg", args[0]) if v.op == "..." else None     # None: as it is

graph = rebuild(graph, step)
"""

from collections.abc import Callable
from dataclasses import replace

from blade.backends.disc.ir import Builder, Graph, Value, live

Step = Callable[[Builder, Value, list[Value]], Value | None]
"""(builder of the copy, value, its operands in the copy) -> what stands for it there; ``None``: the same op."""


def rebuild(graph: Graph, step: Step) -> Graph:
    """Copy ``graph``; ``step`` may make another value from one and its new operands."""
    return rebuilt(graph, step)[1]


def rebuilt(graph: Graph, step: Step) -> tuple[Builder, Graph]:
    """``rebuild``, with the builder, for who adds values to the copy (and calls ``finished``)."""
    b = Builder()
    new: dict[int, Value] = {}
    for v in live(graph):
        args = [new[a.id] for a in v.args]
        made = step(b, v, args)
        if made is None:
            made = b.make(v.op, args, v.shape, v.dtype, v.strides, **v.attrs)
        new[v.id] = made
    outs = tuple(new[v.id] for v in graph.outputs)
    ins = tuple(new[v.id] for v in graph.inputs)
    return b, finished(replace(graph, values=b.values, outputs=outs, inputs=ins))


def finished(graph: Graph) -> Graph:
    """``graph`` without values that nothing needs."""
    graph.values = live(graph)
    return graph
