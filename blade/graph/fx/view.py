# SPDX-License-Identifier: Apache-2.0
"""The view of a functional FX graph of ATen ops, like ``GraphView`` of a TorchScript graph.

    graph = view_fx(gm.graph)                     # every node has a fake value in meta["val"]
    plan = support(graph.nodes, graph.excluded, backends, config)
    clustering = cluster(graph.problem(plan.labels, min_size=3))

An op and the ``getitem``s that unpack its result are one node. Numbers (sizes, and arithmetic on them) are
no nodes: their users get copies.
"""

import operator
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

from blade.clustering.problem import Problem
from blade.core.cluster import SCALAR_BYTES, OpNode, ValueInfo, is_random, unknown_target
from blade.core.reason import Code, Reason, Stage
from blade.graph.fx.random_ops import BLANK
from blade.graph.fx.views import is_view
from blade.graph.shapes.fake_tensors import hint, tensors_of

NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class FxView:
    """``units[i]`` are the FX nodes of node i, the op first; the other fields are as in ``GraphView``.

    ``updates``: nodes that give an input of the graph new contents, after its last read.
    """

    graph: Graph
    units: tuple[tuple[Node, ...], ...]
    nodes: tuple[OpNode, ...]
    edges: tuple[tuple[int, int, int], ...]
    effects: tuple[tuple[int, int], ...]
    excluded: dict[int, Reason]
    updates: frozenset[int]

    def problem(self, labels: Sequence[frozenset[str]], min_size: int = 1) -> Problem:
        return Problem(labels, self.edges, self.effects, min_size=min_size)

    @cached_property
    def unit_of(self) -> dict[Node, int]:
        return {node: i for i, unit in enumerate(self.units) for node in unit}


def view_fx(graph: Graph) -> FxView:
    """Read ``graph``, which may write to its inputs and to nothing else."""
    units = tuple(_find_units(graph))
    unit_of = {node: i for i, unit in enumerate(units) for node in unit}
    nodes = tuple(map(_describe, units))
    updates = frozenset(_find_updates(graph, units))
    return FxView(
        graph=graph,
        units=units,
        nodes=nodes,
        edges=_find_edges(units, unit_of),
        effects=tuple(dict.fromkeys(_find_effects(units, unit_of, nodes))),
        excluded=dict(_find_excluded(units, nodes, updates)),
        updates=updates,
    )


def is_number(node: Node) -> bool:
    """Whether ``node`` is a size or is computed from sizes alone."""
    return isinstance(node.meta.get("val"), NUMBERS)


def operands(node: Node) -> Iterator[Node]:
    """The tensors (or inputs) that ``node`` needs, directly or through numbers."""
    pending = list(reversed(node.all_input_nodes))
    while pending:
        one = pending.pop()
        if is_number(one) and one.op != "placeholder":
            pending.extend(reversed(one.all_input_nodes))
        else:
            yield one


def _find_units(graph: Graph) -> Iterator[tuple[Node, ...]]:
    for node in graph.nodes:
        if node.op not in ("call_function", "call_module", "call_method") or is_number(node):
            continue
        if _takes_apart(node):
            continue
        yield (node, *(user for user in node.users if _takes_apart(user)))


def _takes_apart(node: Node) -> bool:
    if node.target is not operator.getitem:
        return False
    made = node.args[0]
    return isinstance(made, Node) and isinstance(made.meta.get("val"), (list, tuple))


def _describe(unit: Sequence[Node]) -> OpNode:
    head = unit[0]
    outputs = tuple(_info(n.meta.get("val")) for n in (unit[1:] or unit))
    source = _source(head)
    if not isinstance(head.target, torch._ops.OpOverload):
        name = f"%{head.name} = {getattr(head.target, '__name__', head.target)}"
        given = tuple(_info(n.meta.get("val")) for n in head.all_input_nodes)
        return OpNode(name, unknown_target(), given, {}, outputs, source)
    name = f"%{head.name} = {head.target._schema.name}"
    late = any(map(_is_unbacked, _touched(unit)))
    args = tuple(_argument(a) for a in head.args)
    kwargs = {k: _argument(v) for k, v in head.kwargs.items()}
    return OpNode(name, head.target, *_bound(head.target, args, kwargs), outputs, source, late)


def _bound(
    target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All arguments of the schema, positional and keyword-only, with defaults filled in."""
    given = dict(kwargs)
    for argument, value in zip(target._schema.arguments, args, strict=False):
        given[argument.name] = value
    positional, named = [], {}
    for argument in target._schema.arguments:
        value = given.get(argument.name, argument.default_value)
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    return tuple(positional), named


def _argument(value: Any) -> Any:
    if isinstance(value, Node):
        found = _info(value.meta.get("val"), constant=value.op == "get_attr")
        return replace(found, is_read=_reads_elements(value))
    if isinstance(value, (list, tuple)):
        return [_argument(v) for v in value]
    return value


def _info(value: Any, constant: bool = False) -> ValueInfo:
    if isinstance(value, torch.Tensor):
        shape = tuple(map(hint, value.shape))
        return ValueInfo("tensor", value.dtype, value.device, value.dim(), shape, constant)
    kinds = (
        ("bool", (bool, torch.SymBool)),
        ("int", (int, torch.SymInt)),
        ("float", (float, torch.SymFloat)),
        ("list", (list, tuple)),
        ("none", (type(None),)),
    )
    return ValueInfo(next((kind for kind, types in kinds if isinstance(value, types)), "other"))


def _source(node: Node) -> str:
    """The innermost module and the user's source line."""
    stack = [line.strip() for line in (node.stack_trace or "").splitlines()]
    places = [line for line in stack if line.startswith("File ")]
    place = ""
    if places:
        file, line = places[-1].split(", ")[:2]
        place = f"{file.removeprefix('File ').strip(chr(34))}:{line.removeprefix('line ')}"
    scopes = list((node.meta.get("nn_module_stack") or {}).values())
    scope = str(scopes[-1][0]) if scopes else ""
    return " ".join(part for part in (scope, place) if part)


def _find_edges(
    units: Sequence[Sequence[Node]], unit_of: dict[Node, int]
) -> tuple[tuple[int, int, int], ...]:
    edges: dict[tuple[int, int], int] = {}
    for consumer, unit in enumerate(units):
        direct = set(unit[0].all_input_nodes)
        for node in dict.fromkeys(operands(unit[0])):
            producer = unit_of.get(node)
            if producer is None or producer == consumer:
                continue
            weight = sum(map(_bytes, tensors_of(node))) if node in direct else SCALAR_BYTES
            key = (producer, consumer)
            edges[key] = edges.get(key, 0) + weight
    return tuple((a, b, weight) for (a, b), weight in edges.items())


def _reads_elements(node: Node) -> bool:
    """Whether ``node`` is a number that is computed from a tensor's element."""
    pending = [node]
    while pending:
        one = pending.pop()
        if one.target is torch.ops.aten._local_scalar_dense.default:
            return True
        pending += [n for n in one.all_input_nodes if is_number(one) and is_number(n)]
    return False


def _bytes(tensor: torch.Tensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= hint(size)
    return count * tensor.element_size()


def _find_effects(
    units: Sequence[Sequence[Node]], unit_of: dict[Node, int], nodes: Sequence[OpNode]
) -> Iterator[tuple[int, int]]:
    """Pairs that keep random draws in order, and writes in order with reads of the same memory."""
    drawing = [i for i, node in enumerate(nodes) if is_random(node)]
    yield from pairwise(drawing)
    roots = _StorageRoots()
    touching: dict[Node, list[tuple[int, bool]]] = {}  # memory -> (unit, whether it writes)
    for i, unit in enumerate(units):
        written = set(_written(unit[0]))
        for operand in dict.fromkeys(operands(unit[0])):
            for root in roots.of(operand):
                touching.setdefault(root, []).append((i, operand in written))
    for touches in touching.values():
        if not any(writes for _, writes in touches):
            continue
        for n, (later, writes) in enumerate(touches):
            before = touches[:n]
            yield from ((a, later) for a, wrote in before if (writes or wrote) and a != later)


class _StorageRoots:
    """The memory in which a value may lie: that of inputs and of fresh results."""

    def __init__(self) -> None:
        self._known: dict[Node, frozenset[Node]] = {}

    def of(self, node: Node) -> frozenset[Node]:
        if node not in self._known:
            self._known[node] = self._find(node)
        return self._known[node]

    def _find(self, node: Node) -> frozenset[Node]:
        if node.target is operator.getitem:
            return self.of(node.args[0])  # type: ignore[arg-type]
        if node.op in ("placeholder", "get_attr"):
            return frozenset({node})
        target = node.target
        known = isinstance(target, torch._ops.OpOverload)
        if known and not any(r.alias_info is not None for r in target._schema.returns):  # type: ignore[union-attr]
            return frozenset({node})
        return frozenset({node}).union(*(self.of(n) for n in node.all_input_nodes))


def _written(node: Node) -> Iterator[Node]:
    """The arguments of ``node`` that it writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        if node.op != "output":
            yield from node.all_input_nodes  # unknown: assume all
        return
    arguments = node.target._schema.arguments
    named = {a.name: a for a in arguments}
    given = [*zip(arguments, node.args, strict=False)]
    given += [(named[k], v) for k, v in node.kwargs.items() if k in named]
    for argument, value in given:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from nodes_in(value)


def nodes_in(value: Any) -> list[Node]:
    """The nodes among the arguments ``value``, also those in lists."""
    if isinstance(value, Node):
        return [value]
    if isinstance(value, (list, tuple)):
        return [n for v in value for n in nodes_in(v)]
    return []


def _find_updates(graph: Graph, units: Sequence[Sequence[Node]]) -> Iterator[int]:
    """Updates at the end of a functional graph: ``copy_(input, value)``, at most one per input.

    A returned view of the input would be read after the write, so it excludes the update; a returned
    input is the caller's own tensor anyway.
    """
    order = {node: k for k, node in enumerate(graph.nodes)}
    seen: set[Node] = set()
    for i, (node, *_) in enumerate(units):
        if node.target is not torch.ops.aten.copy_.default or node.users or len(node.args) != 2:
            continue
        into, new = node.args
        if not isinstance(into, Node) or not isinstance(new, Node) or into.op != "placeholder":
            continue
        a, b = into.meta["val"], new.meta["val"]
        same = (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        writers = [user for user in into.users if into in _written(user)]
        read = [u for u in _readers(into) if not (u.op == "output" and u in into.users)]
        if same and writers == [node] and all(order[u] <= order[node] for u in read):
            seen.add(into)
            yield i


def _readers(node: Node) -> Iterator[Node]:
    """Nodes that read the memory of ``node``, through views too."""
    for user in node.users:
        yield user
        if is_view(user.target) or user.target is operator.getitem:
            yield from _readers(user)


def _find_excluded(
    units: Sequence[Sequence[Node]], nodes: Sequence[OpNode], updates: Set[int]
) -> Iterator[tuple[int, Reason]]:
    for i, (unit, node) in enumerate(zip(units, nodes, strict=True)):
        target = unit[0].target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
            why = Code.UNSUPPORTED_OP, "it is not an ATen op"
        elif target._schema.is_mutable and i not in updates:
            why = Code.MUTATES, "it writes to one of its inputs"
        elif target.overloadpacket in BLANK:
            why = Code.RANDOM, "what is in its result nobody knows"
        elif not tensors_of(unit[0]):
            why = Code.DATA_DEPENDENT, "its result is no tensor"
        elif any(t.layout is not torch.strided for t in _touched(unit)):
            why = Code.UNSUPPORTED_DTYPE, "a tensor of it is sparse"
        else:
            continue
        code, sentence = why
        yield i, Reason(Stage.SUPPORT, code, None, node.name, f"{target} stays FX: {sentence}.")


def _touched(unit: Sequence[Node]) -> Iterator[torch.Tensor]:
    for node in (*unit[0].all_input_nodes, *unit):
        yield from tensors_of(node)


def _is_unbacked(tensor: torch.Tensor) -> bool:
    return any(isinstance(s, torch.SymInt) and not s.node.has_hint() for s in tensor.shape)
