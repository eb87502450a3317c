# SPDX-License-Identifier: Apache-2.0
"""Loops: a nested graph that runs as often as a size says.

    %4 f32[s0, 8] = loop %3 %0 body=loop_s5 count=s1        %3: the state at the start, %0: read by every iteration
    %5 f32[s0, 8] = carried %4 index=0                      the state after the last iteration
    %6 f32[s1, s0, 8] = item %4 index=0                     a result of each iteration, along a new first axis

The body is a graph of its own over the same size symbols. ``LoopBody.index`` is the iteration index;
it may occur where elements are read (the start of a slice) and in values, not in shapes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Shape,
    Value,
    contiguous_strides,
    live,
    plain,
)
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.late_sizes import late_symbols
from blade.backends.disc.ir.rewrite import eliminate_dead_code, rewrite_with_builder
from blade.backends.disc.ir.views import view_of
from blade.core.reason import Code
from blade.errors import Refused


@dataclass(frozen=True, eq=False)
class LoopBody:
    """One iteration of a loop. Inputs: the state, then what every iteration reads. Outputs: the new state, then results
    of the iteration, which the loop collects: those of the first iteration come first, or last if ``backwards``.

    Compared by identity: two equal loops are two.
    """

    graph: Graph
    index: sympy.Symbol
    carried: int
    backwards: bool = False

    def place(self, count: Dim) -> Dim:
        """Where the results of an iteration are among those of ``count``."""
        return plain(count - 1 - self.index if self.backwards else self.index)

    def __repr__(self) -> str:
        return f"loop_{self.index}"


def body_graph(b: IrBuilder, inputs: Sequence[Value], outputs: Sequence[Value]) -> Graph:
    """The graph of a body that ``b`` has built: its outputs have the strides that the loop gives them."""
    strides = tuple(contiguous_strides(v.shape) for v in outputs)
    graph = Graph(b.values, tuple(outputs), strides, tuple(inputs))
    graph.values = live(graph)
    return graph


def make_loop(
    b: IrBuilder,
    given: Sequence[Value],
    body: LoopBody,
    count: Dim,
    results: Iterable[tuple[Shape, torch.dtype]],
) -> list[Value]:
    """A loop over ``given``: its last state, then what it collects, of the types ``results``."""
    loop = b.make("loop", given, (), torch.float32, body=body, count=count)
    return [
        b.make("carried", (loop,), shape, dtype, index=k)
        if k < body.carried
        else b.make("item", (loop,), shape, dtype, index=k - body.carried)
        for k, (shape, dtype) in enumerate(results)
    ]


def loops(graph: Graph) -> list[Value]:
    return [v for v in graph.values if v.op == "loop"]


def body_of(loop: Value) -> LoopBody:
    body = loop.attrs["body"]
    assert isinstance(body, LoopBody), loop
    return body


def check_body(body: LoopBody, count: Dim) -> None:
    """Raise ``Refused`` if a shape or ``count`` depends on the index or on elements: a plan is made once for all
    iterations.
    """
    if late_symbols(count):
        raise Refused(Code.DATA_DEPENDENT, f"The trip count {count} of a loop depends on elements.")
    for value in _values(body.graph):
        if value.op == "read" or late_symbols((value.shape, *value.attrs.values())):
            raise Refused(Code.DATA_DEPENDENT, f"A size in a loop depends on elements: {value}.")
        dims = (*value.shape, *(value.strides or ()), value.attrs.get("count", 0))
        if any(isinstance(d, sympy.Expr) and body.index in d.free_symbols for d in dims):
            raise Refused(Code.UNSUPPORTED_OP, f"A shape in a loop depends on its index: {value}.")
        if "draw" in value.attrs:
            raise Refused(Code.UNSUPPORTED_OP, f"A loop draws random numbers: {value}.")


def _values(graph: Graph) -> Iterator[Value]:
    """The values of ``graph`` and of the bodies of its loops."""
    for value in graph.values:
        yield value
        if value.op == "loop":
            yield from _values(body_of(value).graph)


def own_results(graph: Graph) -> Graph:
    """The body ``graph`` with outputs that are buffers of their own, which the loop may place."""
    b, graph = rewrite_with_builder(graph, lambda b, v, args: None)
    taken: set[int] = set()
    outputs = []
    for k, value in enumerate(graph.outputs):
        outputs.append(value if _is_own(value, taken) else _copied(b, value, k))
        taken.add(outputs[-1].id)
    return eliminate_dead_code(replace(graph, values=b.values, outputs=tuple(outputs)))


def _is_own(value: Value, taken: set[int]) -> bool:
    view = view_of(value)
    return (
        view is not None
        and view.base is value
        and value.strides is None
        and value.op not in _ELSEWHERE
        and value.id not in taken
    )


def _copied(b: IrBuilder, value: Value, output: int) -> Value:
    return b.make("cast", [value], value.shape, value.dtype, output=output)


_ELSEWHERE = "input const packed call item carried concat conv conv_weight_gradient spatial".split()
"""Ops whose results a loop cannot place: memory of others, of a call, or of another layout."""
