# SPDX-License-Identifier: Apache-2.0
"""Extracts groups of nodes from an FX graph, as a cluster for backends and as FX for the fallback.

    cut = extract_fx("cluster_0", fx_view, (0, 1, 2), constants={...})
    cut.cluster.gm, cut.fallback, cut.inputs, cut.outputs

The counterpart of ``extract`` for graphs from torch.compile. A size that no tensor at the boundary has
crosses as an int. An engine takes tensors only, so it gets an int ``n`` as a tensor of ``n`` elements that
needs no memory (``carrier``).

Engines read row-major tensors. An input with permuted axes, such as attention heads that forward saves for
its gradient, crosses with its axes in memory order (``orders``) and is not copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add, attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic

from blade.core.cluster import Cluster, ValueInfo
from blade.core.reason import Code
from blade.errors import Refused
from blade.graph.fx.carrier import carrier
from blade.graph.fx.kept_views import base_of
from blade.graph.fx.view import FxView, is_number
from blade.graph.fx.write_in_place import write_in_place
from blade.graph.fx.writer import (
    CANNOT,
    FxWriter,
    value_of,
    writing,
)
from blade.graph.shapes.fake_tensors import (
    has_static_layout,
    hint,
    is_fresh,
    layout_at_hints,
    materialize,
    sole_owners,
    tensors_of,
)
from blade.graph.shapes.memory_format import axes_in_memory

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


@dataclass(frozen=True)
class FxExtracted:
    """A self-contained group. ``inputs`` are tensors, then numbers; ``outputs`` are tensors.

    ``fallback`` takes and returns them in this order. ``constants`` are tensors that the caller bound.
    ``updates``: (input, value) for each input that is given new contents.
    """

    name: str
    view: FxView
    group: tuple[int, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    constants: Mapping[Node, torch.Tensor]
    fallback: GraphModule
    updates: tuple[tuple[Node, Node], ...] = ()

    @property
    def num_tensors(self) -> int:
        return sum(not is_number(node) for node in self.inputs)

    @property
    def live(self) -> bool:
        """Whether constants remain the caller's (``Cluster.live``)."""
        return bool(self.constants)

    @cached_property
    def orders(self) -> dict[int, tuple[int, ...]]:
        """Input position -> its axes in memory order, for inputs that the cluster takes permuted."""
        written = {into for into, _ in self.updates}
        found = {}
        for k, node in enumerate(self.inputs[: self.num_tensors]):
            fake = node.meta["val"]
            if node in written:
                continue
            order = axes_in_memory(layout_at_hints(fake))
            if order is not None:
                found[k] = order
        return found

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster for backends. Raises ``Refused`` naming a node whose shapes cannot be expressed."""
        with writing():
            return _FxClusterBuilder(self).build()


def extract_fx(
    name: str, view: FxView, group: Sequence[int], constants: Mapping[Node, torch.Tensor]
) -> FxExtracted:
    """``group`` as a unit; its outputs are the values that outside nodes read.

    If outside nodes read a view that is kept (``kept_views``), the output is its base, and the view stays outside.
    """
    inside = {node for i in group for node in view.units[i]}
    order = {node: k for k, node in enumerate(view.graph.nodes)}
    read = [n for n in inside if tensors_of(n) and _is_read_outside(n, inside)]
    outputs = [n for n in dict.fromkeys(map(base_of, read)) if n in inside]
    updates: Any = tuple(view.units[i][0].args[:2] for i in group if i in view.updates)
    if not outputs and not updates:
        names = ", ".join(view.nodes[i].name for i in group)
        if read:
            why = f"What is read of {names} are views of what is made before them: nothing to compute."
            raise Refused(Code.ALIASES, why)
        raise Refused(Code.CONVERSION_FAILED, f"Nothing reads a result of {names}.")
    inputs = _find_inputs(view, group, inside, constants)
    outputs.sort(key=order.__getitem__)
    return FxExtracted(
        name=name,
        view=view,
        group=tuple(group),
        inputs=inputs,
        outputs=tuple(outputs),
        constants=constants,
        fallback=_fallback(view, group, inputs, outputs, constants),
        updates=updates,
    )


def _is_read_outside(node: Node, inside: Set[Node]) -> bool:
    """Whether outside nodes read ``node`` or numbers computed from it, such as its sizes."""
    for user in node.users:
        if is_number(user):
            if _is_read_outside(user, inside):
                return True
        elif user not in inside:
            return True
    return False


def _find_inputs(
    view: FxView, group: Sequence[int], inside: Set[Node], constants: Mapping[Node, torch.Tensor]
) -> tuple[Node, ...]:
    tensors: dict[Node, None] = {}
    numbers: dict[Node, None] = {}
    for i in group:
        for node in view.units[i][0].all_input_nodes:
            if is_number(node):
                numbers[node] = None
            elif node not in inside and node not in constants and node.op != "get_attr":
                tensors[node] = None
    sizes = _sizes(tensors)
    leaves = (leaf for n in numbers for leaf in _leaves(n, inside, sizes))
    crossing = [leaf for leaf in dict.fromkeys(leaves) if leaf not in inside]
    return (*tensors, *crossing)


def _sizes(tensors: Sequence[Node] | dict[Node, None]) -> dict[Any, tuple[Node, int]]:
    """Symbolic size -> (tensor, axis) to read it from."""
    found: dict[Any, tuple[Node, int]] = {}
    for node in tensors:
        for tensor in tensors_of(node):
            for axis, size in enumerate(tensor.shape):
                if isinstance(size, torch.SymInt):
                    found.setdefault(size.node.expr, (node, axis))
    return found


def _leaves(node: Node, inside: Set[Node], sizes: Mapping[Any, tuple[Node, int]]) -> Iterator[Node]:
    """The numbers that ``node`` is computed from and that are not in ``sizes``."""
    value = node.meta["val"]
    if _known(value) is not None or (isinstance(value, torch.SymInt) and value.node.expr in sizes):
        return
    if node.op == "placeholder" or not node.all_input_nodes:
        yield node
        return
    for operand in node.all_input_nodes:
        if is_number(operand):
            yield from _leaves(operand, inside, sizes)
        elif operand not in inside:  # the size of a tensor outside the group
            yield node


def _known(value: Any) -> int | float | None:
    """The number if it does not depend on sizes, else ``None``."""
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, torch.SymBool) or not value.node.expr.is_number:
        return None
    expr = value.node.expr
    return int(expr) if isinstance(value, torch.SymInt) else float(expr)


def _fallback(
    view: FxView,
    group: Sequence[int],
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    constants: Mapping[Node, torch.Tensor],
) -> GraphModule:
    """A module that runs the ops, ``as_laid_out``; parts are written where they lie."""
    root = torch.nn.Module()
    graph = torch.fx.Graph()
    env: dict[Node, Node] = {}
    for k, node in enumerate(inputs):
        env[node] = graph.placeholder(f"x{k}")
    by_size = _sizes([n for n in inputs if not is_number(n)])
    held: dict[int, str] = {}

    def read(node: Node) -> Any:
        if node in env:
            return env[node]
        if node.op == "get_attr" or node in constants:
            bound = constants.get(node)
            constant = _attribute(view, node) if bound is None else bound
            name = held.setdefault(id(constant), f"const_{len(held)}")
            root.register_buffer(name, constant)
            env[node] = graph.get_attr(name)
            return env[node]
        assert is_number(node), node
        value = node.meta["val"]
        if (known := _known(value)) is not None:
            return known
        if isinstance(value, torch.SymInt) and value.node.expr in by_size:
            tensor, axis = by_size[value.node.expr]
            env[node] = graph.call_function(torch.ops.aten.sym_size.int, (env[tensor], axis))
        else:
            env[node] = graph.node_copy(node, read)
        return env[node]

    for i in group:
        for node in view.units[i]:
            args = torch.fx.map_arg(node.args, read)
            kwargs = torch.fx.map_arg(node.kwargs, read)
            env[node] = graph.call_function(as_laid_out(node.target), args, kwargs)
    graph.output(tuple(env[n] for n in outputs))
    write_in_place(graph, [env[n] for n in sole_owners(inputs)])
    graph.lint()
    return GraphModule(root, graph)


def as_laid_out(target: Any) -> Any:
    """``target``, or for a view the op that copies what has no such view.

    Kernels may lay their results out otherwise than their fake ones say, by which the graph was made.
    """
    return torch.ops.aten.reshape.default if target in _VIEWS else target


def _attribute(view: FxView, node: Node) -> torch.Tensor:
    held = attrgetter(str(node.target))(view.graph.owning_module)
    assert isinstance(held, torch.Tensor), node
    return held


class _FxClusterBuilder:
    """Rebuilds the group over sizes of its own."""

    def __init__(self, cut: FxExtracted) -> None:
        self.cut = cut
        self.writer = FxWriter()
        self.env: dict[Node, Any] = {}
        self.slots: dict[int, Node] = {}
        tensors = [n for n in cut.inputs if not is_number(n)]
        self.sizes = _sizes(tensors)
        # nodes with the same sizes and strides as outside
        self.same = set(filter(has_static_layout, tensors))
        for k, node in enumerate(cut.inputs):
            self.env[node] = self._number(k, node) if is_number(node) else self._tensor(k, node)
        self._tie(tensors)

    def build(self) -> Cluster:
        cut = self.cut
        for i in cut.group:
            if i in cut.view.updates:
                continue
            head, *parts = cut.view.units[i]
            try:
                for node in (head, *parts):
                    self._call(node)
            except CANNOT as error:
                first = str(error).strip().split("\n")[0]
                name = cut.view.nodes[i].name
                detail = f"{name} cannot be expressed with symbolic shapes: {first}"
                raise Refused(Code.CONVERSION_FAILED, detail) from error
        new = [self._read(value) for _, value in cut.updates]
        gm = self.writer.finish([*(self.env[n] for n in cut.outputs), *new])
        return Cluster(
            name=cut.name,
            gm=gm,
            shape_env=self.writer.shape_env,
            inputs=tuple(_info(n, cut.orders.get(k)) for k, n in enumerate(cut.inputs)),
            ops=tuple(str(cut.view.nodes[i].target) for i in cut.group),
            live=cut.live,
            traced=True,
            updates=tuple(cut.inputs.index(into) for into, _ in cut.updates),
        )

    def _tensor(self, k: int, node: Node) -> Node:
        fake = node.meta["val"]
        order = self.cut.orders.get(k, tuple(range(fake.dim())))
        sizes = [
            DimDynamic.DYNAMIC
            if isinstance(s, torch.SymInt) and _known(s) is None
            else DimDynamic.STATIC
            for s in (fake.shape[axis] for axis in order)
        ]
        like = materialize(fake)
        if k not in self.cut.orders:
            return self.writer.place(f"x{k}", like, sizes, f"%{node.name}")
        placed = self.writer.place(f"x{k}", like.permute(order), sizes, f"%{node.name}")
        back = [order.index(axis) for axis in range(len(order))]
        return self.writer.emit(torch.ops.aten.permute.default, (placed, back), {}, f"%{node.name}")

    def _number(self, k: int, node: Node) -> Any:
        value = node.meta["val"]
        if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
            raise Refused(Code.CONVERSION_FAILED, f"%{node.name}, no int, would have to cross.")
        like = carrier(hint(value))
        placed = self.writer.place(f"x{k}", like, [DimDynamic.DYNAMIC], f"%{node.name}")
        return self.writer.size(placed, 0, f"%{node.name}")

    def _tie(self, tensors: Sequence[Node]) -> None:
        """Make sizes equal that torch.compile treats as equal."""
        for node in tensors:
            for axis, size in enumerate(node.meta["val"].shape):
                if isinstance(size, torch.SymInt) and _known(size) is None:
                    first, other = self.sizes[size.node.expr]
                    one = value_of(self.env[first]).shape[other]
                    torch._check(value_of(self.env[node]).shape[axis] == one)

    def _call(self, node: Node) -> None:
        args = torch.fx.map_arg(node.args, self._read)
        kwargs = torch.fx.map_arg(node.kwargs, self._read)
        assert callable(node.target), node
        source = self._source(node)
        if self._depends_on_same(node):
            self.same.add(node)
        if node in self.same and is_fresh(
            node
        ):  # takes a tenth of the time of running torch's shape function
            like = node.meta["val"]
            self.env[node] = self.writer.copy(node.target, args, kwargs, like, source)
        else:
            self.env[node] = self.writer.emit(node.target, args, kwargs, source)

    def _depends_on_same(self, node: Node) -> bool:
        own = (
            n for n in node.all_input_nodes if n.op != "get_attr" and n not in self.cut.constants
        )
        return all(n in self.same for n in own)

    def _read(self, node: Node) -> Any:
        if node in self.env:
            return self.env[node]
        constant = self.cut.constants.get(node)
        if constant is not None or node.op == "get_attr":
            self.env[node] = self._constant(node, constant)
        else:
            self.env[node] = self._compute(node)
        return self.env[node]

    def _constant(self, node: Node, bound: torch.Tensor | None) -> Node:
        tensor = _attribute(self.cut.view, node) if bound is None else bound
        if id(tensor) not in self.slots:
            self.slots[id(tensor)] = self.writer.hold(len(self.slots), tensor, f"%{node.name}")
        return self.slots[id(tensor)]

    def _compute(self, node: Node) -> Any:
        """Compute a number."""
        assert is_number(node), node
        value, source = node.meta["val"], self._source(node)
        if (known := _known(value)) is not None:
            return known
        if isinstance(value, torch.SymInt) and value.node.expr in self.sizes:
            tensor, axis = self.sizes[value.node.expr]
            return self.writer.size(self.env[tensor], axis, source)
        if node.target is torch.ops.aten.sym_size.int:
            measured: Any = node.args
            return self.writer.size(self._read(measured[0]), measured[1], source)
        if node.target is torch.ops.aten._local_scalar_dense.default:
            made = self.writer.emit(node.target, [self._read(node.args[0])], {}, source)  # type: ignore[arg-type]
            torch._check(value_of(made) >= 0)
            return made
        if node.target is torch.sym_sum:
            (terms,) = node.args
            read = [self._read(a) if isinstance(a, Node) else a for a in terms]  # type: ignore[union-attr]
            return reduce(lambda a, b: self.writer.number(add, [a, b], source), read)
        inputs = [self._read(a) if isinstance(a, Node) else a for a in node.args]
        return self.writer.number(node.target, inputs, source)  # type: ignore[arg-type]

    def _source(self, node: Node) -> str:
        unit = self.cut.view.unit_of.get(node)
        return f"%{node.name}" if unit is None else self.cut.view.nodes[unit].source


def _info(node: Node, order: tuple[int, ...] | None) -> ValueInfo:
    if is_number(node):
        return ValueInfo("tensor", torch.uint8, torch.device("cpu"), 1, (hint(node.meta["val"]),))
    fake = node.meta["val"]
    shape = tuple(map(hint, fake.shape if order is None else fake.permute(order).shape))
    return ValueInfo("tensor", fake.dtype, fake.device, fake.dim(), shape)
