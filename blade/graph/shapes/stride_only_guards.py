# SPDX-License-Identifier: Apache-2.0
"""Finds guards that only chose strides: torch asks "is this size 1?" far more often than it matters.

    chosen = StrideOnlyGuards(gm, shape_env)
    chosen.only_chose_strides(Ne(8*s0, 8))     # True: at s0 = 1 every result has the size it should have

A guard is tested at sizes that violate it: torch's shape functions run again, node by node, and must return
the sizes that the symbolic ones promise. Strides may differ; the program's are equally valid. (If the guard
decided about a broadcast or a rank, the sizes disagree.)
"""

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import combinations, islice
from typing import Any

import sympy
import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils._pytree import tree_map_only
from torch.utils._sympy.functions import FloorDiv

from blade.core.pytree import tensors_in
from blade.core.torch_modes import dispatched_in_python
from blade.graph.shapes.loops import all_nodes, counts
from blade.graph.shapes.memo import ResultMemo
from blade.graph.shapes.shape_functions import result_of

Assignment = Mapping[sympy.Basic, sympy.Integer]
_RELATIONS = (sympy.Ne, sympy.Lt, sympy.Gt, sympy.Le, sympy.Ge)
_CANNOT = (
    *(RuntimeError, TypeError, ValueError, IndexError),
    *(NotImplementedError, AssertionError, ZeroDivisionError),
)
_SMALL = range(9)
_TRIED = 4
"""Number of sets of sizes at which a relation is tested."""

_LATE_SIZES = tuple(map(sympy.Integer, (5, 7, 11, 13, 17, 19, 23, 29)))
"""What sizes that depend on elements are taken for; with more of them nothing agrees."""

_LOG: logging.Logger = fake_tensor.log


def _is_one(relation: sympy.Basic) -> bool:
    """Whether the relation says that an expression of sizes is 1; a size that is 1 itself is a constant."""
    if not isinstance(relation, sympy.Eq) or relation.rhs != 1:
        return False
    return not relation.lhs.is_symbol and bool(relation.free_symbols)


def _nothing(record: logging.LogRecord) -> bool:
    """A log filter: torch logs an error if a shape function raises, which is an expected answer here."""
    return False


class StrideOnlyGuards:
    """Tests the sizes of ``gm``'s nodes, once per assignment of sizes; of equal calls, such as those of equal layers,
    one is tested."""

    def __init__(self, gm: GraphModule, shape_env: ShapeEnv) -> None:
        every = [n for n in all_nodes(gm) if isinstance(n.target, torch._ops.OpOverload)]
        self.nodes = [n for n in _different(every) if not _makes_sizes(n)]
        self.shape_env = shape_env
        self.replaced: dict[sympy.Basic, sympy.Basic] = {}
        self.hints = {k: sympy.Integer(int(v)) for k, v in shape_env.backed_var_to_val.items()}
        self.late = dict(zip(sorted(_late_symbols(every), key=str), _LATE_SIZES))
        # the first iteration is there whatever the trip count, unless that is 0
        self.hints |= dict.fromkeys(counts(gm), sympy.Integer(0))
        self.known: dict[tuple[Any, ...], bool | None] = {}
        # what must hold at sizes that are tried
        self.between = [
            known
            for guard in shape_env.guards
            if isinstance(known := shape_env.replace(guard.expr), (sympy.Eq, sympy.Or))
        ]

    def only_chose_strides(self, relation: sympy.Basic) -> bool:
        """Whether the program is also right at sizes of 1 that violate ``relation``."""
        if relation.is_number or not (isinstance(relation, _RELATIONS) or _is_one(relation)):
            return False
        tried = list(islice(self._violations(relation, [1]), _TRIED))
        if not tried:  # a quotient such as s0 // 64 is 1 at larger sizes
            by = {int(q.args[1]) for q in relation.atoms(FloorDiv) if q.args[1].is_Integer}
            tried = list(islice(self._violations(relation, sorted(by)), _TRIED))
        verdicts = [(self._agrees(one), self._is_empty(one)) for one in tried]
        # A failure on empty tensors says nothing: the op itself may accept them.
        known = all(agrees or (agrees is None and empty) for agrees, empty in verdicts)
        return known and any(agrees for agrees, _ in verdicts)

    def _is_empty(self, sizes: Assignment) -> bool:
        return any(size == 0 != self.hints[symbol] for symbol, size in sizes.items())

    def _violations(self, relation: sympy.Basic, steps: Sequence[int]) -> Iterator[Assignment]:
        symbols = sorted(relation.free_symbols, key=str)
        if not all(s in self.hints for s in symbols):
            return
        for one in self._candidates(symbols, steps):
            if _at(relation, one) == sympy.false and self._is_possible(one, relation):
                yield one

    def _candidates(self, symbols: list[sympy.Basic], steps: Sequence[int]) -> Iterator[Assignment]:
        """Assignments of sizes to try.

        First the sample itself, for which torch may have been told to assume the opposite; then one size
        (and those equal to it in the sample) as a small multiple of a step; then several sizes of 1.
        """
        yield self.hints
        for symbol in symbols:
            equal = [k for k, v in self.hints.items() if v == self.hints[symbol]]
            for size in (sympy.Integer(n * step) for step in steps for n in _SMALL):
                yield {**self.hints, symbol: size}
                if len(equal) > 1:
                    yield {**self.hints, **dict.fromkeys(equal, size)}
        for count in range(2, min(len(symbols), 4) + 1):
            for chosen in combinations(symbols, count):
                yield {**self.hints, **dict.fromkeys(chosen, sympy.Integer(1))}

    def _is_possible(self, sizes: Assignment, relation: sympy.Basic) -> bool:
        """Whether the other known relations between sizes (equalities, multiples) hold."""
        others = (k for k in self.between if k != relation)
        return all(_at(k, sizes) not in (None, sympy.false) for k in others)

    def _agrees(self, sizes: Assignment) -> bool | None:
        """Whether all nodes agree at ``sizes``; ``None`` if torch's shape functions raise."""
        key = tuple(sorted((str(k), int(v)) for k, v in sizes.items()))
        if key not in self.known:
            concrete = _ConcreteEvaluation(self.shape_env, {**sizes, **self.late}, self.replaced)
            _LOG.addFilter(_nothing)
            try:
                with concrete.mode, dispatched_in_python(), torch.no_grad():
                    self.known[key] = all(map(concrete.agrees, self.nodes))
            except _CANNOT:
                self.known[key] = None
            finally:
                _LOG.removeFilter(_nothing)
        return self.known[key]


class _ConcreteEvaluation:
    """Evaluation on fake tensors with concrete sizes; ``replaced`` are the expressions that ``shape_env`` has replaced
    before."""

    def __init__(
        self, shape_env: ShapeEnv, sizes: Assignment, replaced: dict[sympy.Basic, sympy.Basic]
    ) -> None:
        self.mode = FakeTensorMode()
        self.shape_env = shape_env
        self.sizes = dict(sizes)
        self.replaced = replaced
        self.known: dict[sympy.Basic, sympy.Basic] = {}

    def agrees(self, node: Node) -> bool:
        """Whether the sizes of ``node``'s results are those that its symbolic sizes give."""
        given = torch.fx.map_arg((node.args, dict(node.kwargs)), self.operand)
        args, kwargs = tree_map_only(torch.SymInt, self.number, given)
        found = tensors_in(result_of(node.target, args, kwargs))
        expected = tensors_in(node.meta["val"])
        return [list(t.shape) for t in found] == [self.numbers(t.shape) for t in expected]

    def operand(self, node: Node) -> Any:
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, (list, tuple)):
            return [self.tensor(v) for v in value]
        if isinstance(value, torch.SymFloat):
            return float(self.expression(value))
        return self.number(value)

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        sizes, strides = self.numbers(value.shape), self.numbers(value.stride())
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)

    def numbers(self, sizes: Any) -> list[int]:
        return [self.number(s) for s in sizes]

    def number(self, size: Any) -> Any:
        return int(self.expression(size)) if isinstance(size, torch.SymInt) else size

    def expression(self, size: torch.SymInt | torch.SymFloat) -> sympy.Basic:
        expr = size.node.expr
        if (value := self.known.get(expr)) is None:
            if expr not in self.replaced:
                self.replaced[expr] = self.shape_env.replace(expr)
            value = self.known[expr] = self.replaced[expr].xreplace(self.sizes)
        return value


def _different(nodes: Sequence[Node]) -> list[Node]:
    """``nodes`` without the calls that others repeat: with operands and results of equal sizes, strides and dtypes."""
    memo, found = ResultMemo(), []
    seen: set[Hashable] = set()
    for node in nodes:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        call = None if isinstance(node.target, str) else memo.key(node.target, args, kwargs)
        made = tuple(tuple(map(_expression, t.shape)) for t in tensors_in(node.meta["val"]))
        if call is None or (call, made) not in seen:
            found.append(node)
            seen.add((call, made))
    return found


def _expression(size: Any) -> Hashable:
    expr: Hashable = size.node.expr if isinstance(size, torch.SymInt) else size
    return expr


def _late_symbols(nodes: Sequence[Node]) -> set[sympy.Symbol]:
    """The sizes that depend on elements."""
    return {s for n in nodes for s in free_unbacked_symbols(n.meta["val"])}


def _makes_sizes(node: Node) -> bool:
    """Whether results of ``node`` have sizes that depend on elements and that no operand has: any will do."""
    given = [n.meta["val"] for n in node.all_input_nodes]
    return not _late_symbols([node]) <= set().union(*map(free_unbacked_symbols, given))


def _at(relation: sympy.Basic, sizes: Assignment) -> sympy.Basic | None:
    """``relation`` at ``sizes``; ``None`` if it has no value.

    (It divides by a size of 0, or takes the remainder of a negative number, against which torch's ``Mod``
    asserts: torch would never ask about such sizes.)
    """
    try:
        return relation.xreplace(dict(sizes))
    except (ZeroDivisionError, AssertionError):
        return None
