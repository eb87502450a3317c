# SPDX-License-Identifier: Apache-2.0
"""Loops in FX graphs: a call of ``run_loop`` with a nested graph module.

    loop_0 = self.loop_0
    found = run_loop(loop_0, sym_size, (zeros,), (x,))      # (last state .., results of all iterations ..)

The nested module takes the iteration index, the state, and what every iteration reads. It returns the new
state, then results of the iteration. Its nodes have values under the ``ShapeEnv`` of the outer graph, in which
the iteration index is a symbol. So guards may contain it; they have to hold for every iteration.
"""

from collections.abc import Iterator, Sequence

import sympy
import torch
from torch.fx import GraphModule, Node

from blade.core.reason import Code
from blade.errors import Refused


def run_loop(
    body: torch.nn.Module,
    count: int,
    state: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
    fewest: int = 0,
) -> tuple[torch.Tensor, ...]:
    """The meaning of a loop, which runs at least ``fewest`` times. Results of iterations are stacked along a new
    first axis.
    """
    if count < fewest:
        raise ValueError(f"a loop runs {count} times, and {fewest} is the fewest")
    results: list[Sequence[torch.Tensor]] = []
    for index in range(count):
        outputs = body(index, *state, *given)
        state, found = outputs[: len(state)], outputs[len(state) :]
        results.append(found)
    return (*state, *(torch.stack(found) for found in zip(*results, strict=True)))


def body_of(gm: GraphModule, loop: Node) -> GraphModule:
    """The nested module that ``loop`` runs."""
    held = loop.args[0]
    assert isinstance(held, Node), loop
    body = gm.get_submodule(str(held.target))
    assert isinstance(body, GraphModule), loop
    return body


def index_of(body: GraphModule) -> sympy.Symbol:
    """The symbol of the iteration index."""
    first = next(iter(body.graph.nodes))
    symbol = first.meta["val"].node.expr
    assert isinstance(symbol, sympy.Symbol), first
    return symbol


def is_loop(node: Node) -> bool:
    return node.target is run_loop


def all_nodes(gm: GraphModule) -> Iterator[Node]:
    """The nodes of ``gm`` and of the bodies of its loops."""
    for node in gm.graph.nodes:
        yield node
        if is_loop(node):
            yield from all_nodes(body_of(gm, node))


def counts(gm: GraphModule) -> dict[sympy.Symbol, sympy.Expr]:
    """Iteration index -> how many there are, inner loops first."""
    found: dict[sympy.Symbol, sympy.Expr] = {}
    for node in gm.graph.nodes:
        if is_loop(node):
            body = body_of(gm, node)
            found |= counts(body)
            found[index_of(body)] = expression(node.args[1])
    return found


def expression(number: object) -> sympy.Expr:
    """A number or a node of one as an expression of sizes."""
    value = number.meta["val"] if isinstance(number, Node) else number
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.sympify(value)


def for_every_iteration(
    relation: sympy.Basic, counts: dict[sympy.Symbol, sympy.Expr]
) -> sympy.Basic:
    """What has to hold so that ``relation`` holds in every iteration of the loops; raises ``Refused`` if it
    is not known how to tell.
    """
    for index, count in counts.items():
        if index in relation.free_symbols:
            relation = sympy.Or(sympy.Le(count, 0), _throughout(relation, index, count))
    return relation


def _throughout(relation: sympy.Basic, index: sympy.Symbol, count: sympy.Expr) -> sympy.Basic:
    """``relation`` for the index 0 to ``count - 1``: a linear expression is between its values at both ends."""
    if isinstance(relation, sympy.And):
        return sympy.And(*(_throughout(part, index, count) for part in relation.args))
    if not isinstance(relation, sympy.core.relational.Relational):
        raise _unknown(relation)
    difference = relation.lhs - relation.rhs
    slope = difference.diff(index)
    if index in slope.free_symbols or not isinstance(difference, sympy.Expr):
        raise _unknown(relation)
    first, last = (difference.xreplace({index: at}) for at in (sympy.Integer(0), count - 1))
    if isinstance(relation, sympy.Ne):
        return sympy.Or(sympy.And(first > 0, last > 0), sympy.And(first < 0, last < 0))
    return sympy.And(relation.func(first, 0), relation.func(last, 0))


def _unknown(relation: sympy.Basic) -> Refused:
    text = f"Whether {relation} holds in every iteration of a loop is not known in advance."
    return Refused(Code.CONVERSION_FAILED, text)
