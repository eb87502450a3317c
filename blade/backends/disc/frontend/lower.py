# SPDX-License-Identifier: Apache-2.0
"""Lowers a cluster's FX graph to DISC IR, one table row per node.

Sizes need no instructions: torch's shape functions have already made every size an expression over the
sizes of the inputs (``node.meta["val"]``), and every assumption a guard of the ``ShapeEnv``.
"""

import operator
from collections.abc import Mapping, Sequence
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
    convolution,
    convolution_backward,
    einsum,
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
    quantize,
    reduction,
    region,
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
from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Shape,
    Value,
    live,
    plain,
)
from blade.backends.disc.ir.simplify import RULES
from blade.backends.disc.target.capabilities import CPU, TargetCapabilities
from blade.core.reason import Code
from blade.errors import Refused
from blade.graph.shapes.guards import relied_on

# Importing these modules fills the table.
FAMILIES = (
    activation,
    activation_backward,
    assemble,
    attention,
    batch_norm,
    convolution,
    convolution_backward,
    einsum,
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
    quantize,
    reduction,
    region,
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
) -> Graph:
    """IR of ``gm``; raises ``Refused`` naming the node that has no form in it.

    ``single``: constants are not packed, so that no second copy of one exists.
    ``updates``: inputs that the last outputs are written to (``Graph.updates``).
    ``forms``: dtypes that the target implements for each op.
    """
    lowerer = _Lowerer(gm, shape_env, {"single": True} if single else {}, forms)
    for node in gm.graph.nodes:
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
        self.b = IrBuilder(RULES)
        self.env: dict[Node, Any] = {}
        self.inputs: list[Value] = []
        self.constants: list[torch.Tensor] = []
        self.outputs: tuple[Value, ...] = ()
        self.output_strides: tuple[Any, ...] = ()
        self.storages: tuple[int, ...] = ()

    def step(self, node: Node) -> None:
        if node.op == "placeholder":
            result = self.results(node)[0]
            value = self.b.make("input", (), result.shape, result.dtype, index=len(self.inputs))
            self.inputs.append(value)
            self.env[node] = value
        elif node.op == "get_attr":
            self.env[node] = self.constant(node)
        elif node.op == "output":
            self.output(node)
        else:
            self.env[node] = self.operation(node)

    def constant(self, node: Node) -> Value:
        tensor = _attribute(self.gm, str(node.target))
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
        if isinstance(meta, (torch.SymInt, int)) and not isinstance(meta, bool):
            return self.size(meta)
        if isinstance(meta, torch.SymFloat):
            return meta
        args = tuple(self.operand(a) for a in node.args)
        kwargs = {k: self.operand(v) for k, v in node.kwargs.items()}
        if not isinstance(node.target, torch._ops.OpOverload):
            return self.python(node, args)
        places = (
            tuple(k for k, m in enumerate(meta) if isinstance(m, torch.Tensor))
            if isinstance(meta, (list, tuple))
            else None
        )
        lo = Lowering(self.b, self.results(node), places, self.forms)
        rule = rule_for(node.target)
        if rule is not None:
            try:
                return rule(lo, *args, **kwargs)
            except NotLowered:
                pass
        return lo.call(node.target, bound(node.target, args, kwargs))

    def python(self, node: Node, args: tuple[Any, ...]) -> Any:
        if node.target is operator.getitem:
            return args[0][args[1]]
        raise Refused(Code.UNSUPPORTED_OP, f"{node.target} has no form in DISC IR ({node.name}).")

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

    def results(self, node: Node) -> tuple[ResultType, ...]:
        meta = node.meta["val"]
        metas = meta if isinstance(meta, (list, tuple)) else (meta,)
        return tuple(
            ResultType(
                tuple(self.size(d) for d in m.shape),
                m.dtype,
                tuple(self.size(d) for d in m.stride()),
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
        given = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
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


def _attribute(gm: GraphModule, path: str) -> torch.Tensor:
    owner: Any = gm
    for part in path.split("."):
        owner = getattr(owner, part)
    assert isinstance(owner, torch.Tensor), path
    return owner


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
