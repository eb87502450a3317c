# SPDX-License-Identifier: Apache-2.0
"""Rewrites sizes to normal form, so that sizes that the facts show to be equal are written alike.

    fact Eq(Mod(s0, 7), 0)
    %1 f32[s0/7, 7] = reshape %0          # was [s0//7, 7]: now 7 * s0/7 is visibly s0

Every later stage compares expressions; so fusion, strides and kernels benefit from the facts without
knowing them.
"""

from dataclasses import replace
from typing import Any

import sympy

from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Shape,
    Value,
    live,
)
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.late_sizes import depends_on_late
from blade.backends.disc.ir.simplify import RULES
from blade.backends.disc.ir.size_facts import SizeRelations, minimal


def normalize_sizes(graph: Graph) -> Graph:
    """``graph`` with sizes in normal form, simplified again, without facts that others imply."""
    # what concerns sizes that depend on elements stays as it is: it is checked when they are known
    late = [f.relation for f in graph.facts if depends_on_late(f.relation)]
    relations = minimal([f.relation for f in graph.facts if f.relation not in late])
    facts = tuple(f for f in graph.facts if f.relation in (*relations, *late))
    graph = replace(graph, facts=facts, origins=graph.origins or origins(graph))
    normal = _SizeNormalizer(SizeRelations(relations))
    if all(normal.shape(v.shape) == v.shape for v in graph.values):
        return graph
    b = IrBuilder(RULES)
    new: dict[int, Value] = {}
    for v in live(graph):
        attrs = {k: normal.attribute(k, x) for k, x in v.attrs.items()}
        strides = None if v.strides is None else normal.shape(v.strides)
        args = [new[a.id] for a in v.args]
        new[v.id] = b.make(v.op, args, normal.shape(v.shape), v.dtype, strides, **attrs)
    rebuilt = replace(
        graph,
        values=b.values,
        outputs=tuple(new[v.id] for v in graph.outputs),
        output_strides=tuple(map(normal.shape, graph.output_strides)),
        inputs=tuple(new[v.id] for v in graph.inputs),
    )
    rebuilt.values = live(rebuilt)
    return rebuilt


def origins(graph: Graph) -> dict[sympy.Symbol, tuple[int, int]]:
    """Size symbol -> (input, axis) that has this size."""
    found: dict[sympy.Symbol, tuple[int, int]] = {}
    for value in graph.inputs:
        for axis, dim in enumerate(value.shape):
            if isinstance(dim, sympy.Symbol):
                found.setdefault(dim, (value.attrs["index"], axis))
    return found


class _SizeNormalizer:
    """Normal forms, each computed once."""

    def __init__(self, facts: SizeRelations) -> None:
        self.facts = facts
        self.known: dict[Dim, Dim] = {}

    def dim(self, dim: Dim) -> Dim:
        if isinstance(dim, int):
            return dim
        if dim not in self.known:
            self.known[dim] = self.facts.normal(dim)
        return self.known[dim]

    def shape(self, shape: Shape) -> Shape:
        return tuple(map(self.dim, shape))

    def attribute(self, name: str, value: Any) -> Any:
        if name == "starts":
            return self.shape(value)
        return self.dim(value) if name == "value" and isinstance(value, sympy.Expr) else value
