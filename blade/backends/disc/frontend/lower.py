# SPDX-License-Identifier: Apache-2.0
"""Lowers a cluster's FX graph to DISC IR, one table row per node.

Sizes need no instructions: torch's shape functions have already made every size an expression over the
sizes of the inputs (``node.meta["val"]``), and every assumption a guard of the ``ShapeEnv``.
"""

import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import Max

from blade.backends.disc.frontend.ops import (
    activation,
    activation_backward,
    assemble,
    attention,
    batch_norm,
    complex_numbers,
    convolution,
    convolution_backward,
    einsum,
    embedding_bag,
    factory,
    functions,
    gather,
    layout,
    library,
    loss,
    norm,
    norm_backward,
    pointwise,
    pooling,
    pooling_gradient,
    quantize,
    recurrent,
    reduction,
    region,
    resample,
    scaled,
    transformer,
    windows,
)
from blade.backends.disc.frontend.ops.table import (
    Lowering,
    NotLowered,
    ResultType,
    rule_for,
)
from blade.backends.disc.frontend.static_parts import attribute, only_for, static_parts
from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Shape,
    Value,
    live,
    plain,
)
from blade.backends.disc.ir.loop import LoopBody, body_graph, check_body, make_loop
from blade.backends.disc.ir.simplify import RULES
from blade.backends.disc.target.capabilities import CPU, TargetCapabilities
from blade.core.pytree import tensors_in
from blade.core.reason import Code
from blade.errors import Refused
from blade.graph.fx.writer import value_of
from blade.graph.shapes.guards import relied_on
from blade.graph.shapes.loops import body_of, for_every_iteration, index_of, is_loop
from blade.graph.shapes.symbolic import is_late

# Importing these modules fills the table.
FAMILIES = (
    activation,
    activation_backward,
    assemble,
    attention,
    batch_norm,
    complex_numbers,
    convolution,
    convolution_backward,
    einsum,
    embedding_bag,
    factory,
    functions,
    gather,
    layout,
    library,
    loss,
    norm,
    norm_backward,
    pointwise,
    pooling,
    pooling_gradient,
    quantize,
    recurrent,
    reduction,
    region,
    resample,
    scaled,
    transformer,
    windows,
)


def lower(
    gm: GraphModule,
    shape_env: ShapeEnv,
    single: bool = False,
    updates: Sequence[int] = (),
    forms: TargetCapabilities = CPU,
    folds: bool = False,
) -> Graph:
    """IR of ``gm``; raises ``Refused`` naming the node that has no form in it.

    ``single``: constants are not packed, so that no second copy of one exists.
    ``folds``: what constants and static sizes determine may be computed now (``static_parts``).
    ``updates``: inputs that the last outputs are written to (``Graph.updates``).
    ``forms``: dtypes that the target implements for each op.
    """
    lowerer = _Lowerer(gm, shape_env, {"single": True} if single else {}, forms)
    lowerer.parts = static_parts(gm) if folds else {}
    folded = only_for(lowerer.parts, gm)
    for node in gm.graph.nodes:
        if node.op == "placeholder" or node not in folded:
            lowerer.step(node)
    return replace(lowerer.finish(), updates=tuple(updates))


class _Lowerer:
    def __init__(
        self,
        gm: GraphModule,
        shape_env: ShapeEnv,
        of_constants: Mapping[str, Any],
        forms: TargetCapabilities,
    ) -> None:
        self.gm = gm
        self.forms = forms
        self.of_constants = of_constants
        self.shape_env = shape_env
        self.parts: Mapping[Node, torch.Tensor] = {}
        self.b = IrBuilder(RULES)
        self.env: dict[Node, Any] = {}
        self.inputs: list[Value] = []
        self.constants: list[torch.Tensor] = []
        self.outputs: tuple[Value, ...] = ()
        self.output_strides: tuple[Any, ...] = ()
        self.storages: tuple[int, ...] = ()

    def step(self, node: Node) -> None:
        if node.op == "placeholder" and isinstance(node.meta["val"], torch.SymInt):
            self.env[node] = self.size(node.meta["val"])  # the index of an iteration
        elif node.op == "placeholder":
            result = self.results(node)[0]
            value = self.b.make("input", (), result.shape, result.dtype, index=len(self.inputs))
            self.inputs.append(value)
            self.env[node] = value
        elif node.op == "get_attr" and "val" not in node.meta:
            pass  # the body of a loop, which is lowered with its call
        elif node.op == "get_attr":
            self.env[node] = self.constant(attribute(self.gm, str(node.target)))
        elif node in self.parts:
            self.env[node] = self.constant(self.parts[node])
        elif node.op == "output":
            self.output(node)
        else:
            self.env[node] = self.operation(node)

    def constant(self, tensor: torch.Tensor) -> Value:
        known = [k for k, c in enumerate(self.constants) if c is tensor]
        index = known[0] if known else len(self.constants)
        if not known:
            self.constants.append(tensor)
        if tensor.numel() == 1 and tensor.dtype in SCALARS:
            return self.b.fill(tensor.item(), tensor.shape, tensor.dtype)
        # Constants may have any layout, so their strides are part of the value.
        strides = tuple(tensor.stride())
        attrs = {"index": index, **self.of_constants}
        return self.b.make("const", (), tensor.shape, tensor.dtype, strides, **attrs)

    def operation(self, node: Node) -> Any:
        meta = node.meta["val"]
        if node.target is torch.ops.aten._local_scalar_dense.default:
            return self.number(node)
        if isinstance(meta, (torch.SymInt, int)) and not isinstance(meta, bool):
            return self.size(meta)
        if isinstance(meta, torch.SymFloat):
            return meta
        if is_loop(node):
            return self.loop(node)
        args = tuple(self.operand(a) for a in node.args)
        kwargs = {k: self.operand(v) for k, v in node.kwargs.items()}
        if not isinstance(node.target, torch._ops.OpOverload):
            return self.python(node, args)
        places = (
            tuple(k for k, m in enumerate(meta) if isinstance(m, torch.Tensor))
            if isinstance(meta, (list, tuple))
            else None
        )
        lo = Lowering(self.b, self.results(node), places, self.forms, _reads_first_only(node))
        if new := new_sizes(node):
            return self.call_making_sizes(node, new, bound(node.target, args, kwargs), places)
        rule = rule_for(node.target)
        if complex_numbers.is_complex(args, tuple(kwargs.values()), lo.results):
            rule = rule if complex_numbers.has_views_only(node.target) else None
        if rule is not None:
            try:
                return rule(lo, *args, **kwargs)
            except NotLowered:
                pass
        return lo.call(node.target, bound(node.target, args, kwargs))

    def call_making_sizes(
        self, node: Node, new: Set[sympy.Symbol], args: list[Any], places: tuple[int, ...] | None
    ) -> Any:
        """A call whose results have sizes of their own, ``new``, and what they are known to be equal to."""
        known = self.results(node)
        raw = self.results(node, as_made=True)
        axes = [d for r in raw for d in r.shape]
        if any(s not in axes for s in new):
            text = f"{node.target} makes a size that no result has as it is ({node.name})."
            raise Refused(Code.DATA_DEPENDENT, text)
        assert isinstance(node.target, torch._ops.OpOverload), node
        made = Lowering(self.b, raw, places, self.forms).call(node.target, args)
        several = made if isinstance(made, list) else [made]
        shapes = iter([r.shape for r in known])
        given = [v if v is None else self.b.reshape(v, next(shapes)) for v in several]
        return given if isinstance(made, list) else given[0]

    def number(self, node: Node) -> Any:
        """A size that is read from a tensor."""
        meta, operand = node.meta["val"], self.operand(node.args[0])
        if not isinstance(meta, torch.SymInt):
            raise Refused(Code.UNSUPPORTED_OP, f"{node.target} reads no integer ({node.name}).")
        symbol = meta.node._expr
        self.b.make("read", (operand,), (), torch.int64, symbol=symbol)
        return self.size(meta)

    def python(self, node: Node, args: tuple[Any, ...]) -> Any:
        if node.target is operator.getitem:
            return args[0][args[1]]
        raise Refused(Code.UNSUPPORTED_OP, f"{node.target} has no form in DISC IR ({node.name}).")

    def loop(self, node: Node) -> list[Value]:
        """A loop, whose body is a graph of its own over the same constants and sizes."""
        _, count, state, given, fewest = node.args
        nested = body_of(self.gm, node)
        inner = _Lowerer(nested, self.shape_env, self.of_constants, self.forms)
        inner.constants = self.constants
        for one in nested.graph.nodes:
            inner.step(one)
        index, times = index_of(nested), self.size(value_of(count))
        for relation, fact in inner.b.facts.items():
            self.b.require(
                for_every_iteration(relation, {index: sympy.sympify(times)}), fact.source
            )
        if fewest:
            self.b.require(sympy.Ge(times, fewest, evaluate=False), "a loop that runs")
        graph = body_graph(inner.b, inner.inputs, inner.outputs)
        body = LoopBody(graph, index, len(self.operand(state)))
        check_body(body, times)
        read = [a for a in self.operand(given) if isinstance(a, Value)]  # no indices of outer loops
        args = [*self.operand(state), *read]
        results = [(r.shape, r.dtype) for r in self.results(node)]
        return make_loop(self.b, args, body, times, results)

    def operand(self, arg: Any) -> Any:
        if isinstance(arg, Node):
            return self.env[arg]
        if isinstance(arg, (list, tuple)):
            return [self.operand(a) for a in arg]
        if isinstance(arg, torch.SymInt):
            return self.size(arg)
        return arg

    def size(self, meta: Any) -> Any:
        return (
            plain(self.shape_env.simplify(meta.node.expr))
            if isinstance(meta, torch.SymInt)
            else meta
        )

    def raw_size(self, meta: Any) -> Any:
        """A size that depends on elements under its own name, even if it is known to be equal to another one."""
        is_raw = isinstance(meta, torch.SymInt) and is_late(meta.node._expr)
        return meta.node._expr if is_raw else self.size(meta)

    def results(self, node: Node, as_made: bool = False) -> tuple[ResultType, ...]:
        """``as_made``: with the names that sizes had when ``node`` made them."""
        size = self.raw_size if as_made else self.size
        meta = node.meta["val"]
        metas = meta if isinstance(meta, (list, tuple)) else (meta,)
        return tuple(
            ResultType(
                tuple(size(d) for d in m.shape),
                m.dtype,
                tuple(size(d) for d in m.stride()),
            )
            for m in metas
            if isinstance(m, torch.Tensor)
        )

    def output(self, node: Node) -> None:
        returned = node.args[0]
        assert isinstance(returned, (list, tuple)), returned
        self.outputs = tuple(self.env[n] for n in returned)  # type: ignore[index]
        self.output_strides = tuple(_dense(self.results(n)[0].strides) for n in returned)  # type: ignore[arg-type]
        owners: dict[int, int] = {}  # storage -> its first input or output
        placed = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        given = [n for n in placed if isinstance(n.meta["val"], torch.Tensor)]
        for k, n in enumerate([*given, *returned]):
            owners.setdefault(n.meta["val"].untyped_storage()._cdata, k)
        self.storages = tuple(owners[n.meta["val"].untyped_storage()._cdata] for n in returned)  # type: ignore[union-attr]

    def finish(self) -> Graph:
        for relation, where in relied_on(self.gm, self.shape_env):
            self.b.require(relation, where)
        graph = Graph(
            self.b.values,
            self.outputs,
            self.output_strides,
            tuple(self.inputs),
            tuple(self.constants),
            tuple(self.b.facts.values()),
            self.storages,
        )
        graph.values = live(graph)
        return graph


def _reads_first_only(node: Node) -> bool:
    read = [u for u in node.users if u.users or u.target is not operator.getitem]
    return all(u.target is operator.getitem and u.args[1] == 0 for u in read)


def new_sizes(node: Node) -> set[sympy.Symbol]:
    """The sizes that depend on elements and that ``node`` makes: no operand has them."""
    made = _late(node.meta["val"])
    return made - {s for n in node.all_input_nodes for s in _late(n.meta["val"])} if made else made


def _late(value: Any) -> set[sympy.Symbol]:
    sizes: list[Any] = [s for t in tensors_in(value) for s in t.shape]
    sizes += [value] if isinstance(value, torch.SymInt) else []
    exprs = (s.node._expr for s in sizes if isinstance(s, torch.SymInt))
    return {s for e in exprs for s in e.free_symbols if is_late(s)}


def _dense(strides: Shape) -> Shape:
    """``strides`` without torch's special case for sizes of 0: in an empty tensor strides do not matter."""
    return tuple(
        plain(s.replace(_is_at_least_one, _other_than_one)) if isinstance(s, sympy.Expr) else s
        for s in strides
    )


def _is_at_least_one(expr: sympy.Basic) -> bool:
    return isinstance(expr, sympy.Max | Max) and len(expr.args) == 2 and 1 in expr.args


def _other_than_one(expr: sympy.Basic) -> sympy.Basic:
    return next(a for a in expr.args if a != 1)


def bound(target: Any, args: Any, kwargs: Any) -> list[Any]:
    """All arguments in the schema's order, with defaults filled in."""
    values = []
    for position, argument in enumerate(target._schema.arguments):
        if position < len(args):
            values.append(args[position])
        elif argument.name in kwargs:
            values.append(kwargs[argument.name])
        elif argument.has_default_value():
            values.append(argument.default_value)
        else:
            raise Refused(Code.CONVERSION_FAILED, f"{target} lacks its argument {argument.name}.")
    return values


SCALARS = (
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
