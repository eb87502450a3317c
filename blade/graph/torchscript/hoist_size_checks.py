# SPDX-License-Identifier: Apache-2.0
"""Moves checks of sizes to the beginning of a graph, as conditions on the sizes of its inputs.

    if (x.linear().view(...).size(1) % 7 == 0) != True: raise ...     ->     if not (x.size(2) % 7 == 0): raise ...

Within the graph a check cuts what may be one cluster. At the beginning all of them cost a few comparisons. A
check that holds at every size goes; of equal ones the first stays. Checks of elements stay where they are, and
no check of sizes passes one: what is behind it may be another path's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import IntTrueDiv
from torch.utils._sympy.printers import PythonPrinter

from blade.core import torchscript
from blade.core.jit_nodes import inputs_of, outputs_of
from blade.graph.torchscript.decision_checks import LIMITED, MARK, Check, checks_of
from blade.graph.torchscript.symbolic_sizes import NotOfSizes, SymbolicSizes, quotient_of

ASSUMED = 1_000_000
"""The number of the check of what the conditions themselves rely on, which no decision asked for."""


@dataclass(frozen=True)
class WrittenChecks:
    """Checks to be written behind the check number ``behind`` of the graph, or behind the inputs (-1).

    ``code``: of a function ``check`` of the tensors named ``tensors``, in TorchScript. ``texts``: the conditions as
    they are shown, by decision.
    """

    behind: int
    code: str
    tensors: tuple[str, ...]
    texts: dict[int, str]


@dataclass(frozen=True)
class HoistedChecks:
    """What becomes of the checks of a graph: those numbered ``gone`` go, ``written`` come."""

    gone: tuple[int, ...]
    written: tuple[WrittenChecks, ...]


def hoist_size_checks(
    graph: torch._C.Graph, sample: Sequence[Any], known: HoistedChecks | None = None
) -> tuple[dict[int, str], HoistedChecks]:
    """Rewrite ``graph`` in place; return the condition of each check that was moved, by decision, and what was done.

    ``sample`` passes all checks. ``known``: what was done to an equal graph; nothing is evaluated then. Raises
    ``KeyError`` if the graph has other values.
    """
    checks = list(checks_of(graph))
    if not checks:
        return {}, HoistedChecks((), ())
    _without_writes(graph)
    hoisted = _hoisted(graph, sample, checks) if known is None else known
    for number in hoisted.gone:
        checks[number].node.destroy()
    texts: dict[int, str] = {}
    for one in hoisted.written:
        texts |= one.texts
        _write(graph, one, None if one.behind < 0 else checks[one.behind])
    _clean(graph)
    return texts, hoisted


def _hoisted(graph: torch._C.Graph, sample: Sequence[Any], checks: list[Check]) -> HoistedChecks:
    sizes = SymbolicSizes(graph, sample)
    gone: list[int] = []
    segment: Check | None = None  # the check of elements that the following ones come after
    moved: dict[Check | None, dict[int, list[Any]]] = {}
    seen: set[Any] = set()
    fixed: dict[Any, Any] = {}  # sizes that an earlier check leaves one value
    assumed_in: dict[int, list[Any]] | None = (
        None  # the conditions among which that of ASSUMED stands
    )
    for number, check in enumerate(checks):
        if check.index == LIMITED:  # it comes first, and has its own message
            continue
        holds = _condition(sizes, check)
        if assumed_in is None and _assumptions(sizes):
            # What is asked earlier relies on nothing, and may lead to another path.
            assumed_in = moved.setdefault(segment, {})
            assumed_in[ASSUMED] = []
        if holds is None or holds is sympy.false:
            segment = check
            continue
        holds = holds.xreplace(fixed)
        if isinstance(holds, sympy.Eq) and holds.lhs.is_symbol and holds.rhs.is_Integer:
            fixed[holds.lhs] = holds.rhs
        if holds is not sympy.true and holds not in seen:
            seen.add(holds)
            moved.setdefault(segment, {})[check.index] = [holds]
        gone.append(number)
    if not all(map(_can_be_written, _assumptions(sizes))):
        return HoistedChecks((), ())  # the checks stay where they are
    if assumed_in is not None:
        assumed_in[ASSUMED] = [one for one in _assumptions(sizes) if one not in seen]
        if not assumed_in[ASSUMED] or not seen:
            del assumed_in[ASSUMED]
    written = [
        _written(sizes, conditions, next((k for k, one in enumerate(checks) if one is segment), -1))
        for segment, conditions in moved.items()
        if conditions
    ]
    return HoistedChecks(tuple(gone), tuple(written))


_ARITHMETIC = frozenset("aten::add aten::sub aten::mul aten::floor_divide".split())
_IN_PLACE = frozenset("aten::add_ aten::sub_ aten::mul_".split())


def _without_writes(graph: torch._C.Graph) -> None:
    """Replace ``count *= size`` by a product: sizes are tensors in a trace, and Python's numbers never change."""
    own: Any = graph
    numbers: set[int] = set()
    for node in list(own.nodes()):
        if node.kind() == "prim::NumToTensor":
            numbers.add(node.output().unique())
        elif node.kind() in _ARITHMETIC:
            if all(_is_number(value, numbers) for value in inputs_of(node)[:2]):
                numbers.add(node.output().unique())
        elif node.kind() in _IN_PLACE:
            given = inputs_of(node)
            later = [use.user for use in given[0].uses() if use.user != node]
            if given[0].unique() in numbers and all(one.isBefore(node) for one in later):
                made = own.create(node.kind().removesuffix("_"), given, 1)
                made.insertBefore(node)
                made.copyMetadata(node)
                made.output().setType(node.output().type())
                node.output().replaceAllUsesWith(made.output())
                node.destroy()
                numbers.add(made.output().unique())


def _is_number(value: Any, numbers: set[int]) -> bool:
    if value.node().kind() != "prim::Constant":
        return value.unique() in numbers
    held = value.toIValue()
    return isinstance(held, (int, float)) or (isinstance(held, torch.Tensor) and held.dim() == 0)


def _condition(sizes: SymbolicSizes, check: Check) -> Any:
    """The condition of ``check`` over sizes of inputs; ``None`` if there is none that can be written."""
    before = len(sizes.relied)
    try:
        holds = sympy.And(_negated(sizes.number(check.fails)), *sizes.relied[before:])
    except NotOfSizes:
        return None
    if not _can_be_written(holds):
        return None
    is_known = sizes.is_exact and all(symbol in sizes.symbols for symbol in holds.free_symbols)
    return holds if is_known else None


def _can_be_written(holds: Any) -> bool:
    try:
        _Printer().doprint(holds)
    except NotOfSizes:
        return False
    return True


def _negated(fails: Any) -> Any:
    if isinstance(fails, torch.SymBool):
        return sympy.Not(fails.node.expr)
    return sympy.false if fails else sympy.true


def _assumptions(sizes: SymbolicSizes) -> list[Any]:
    """The equalities between sizes on which the shape functions relied."""
    found = []
    for guard in sizes.env.guards:
        relation = sizes.env.replace(guard.expr)
        if isinstance(relation, sympy.Eq) and relation.free_symbols <= sizes.symbols.keys():
            found.append(relation)
    return list(dict.fromkeys(found))


def _rounded_quotient(expr: Any) -> tuple[Any, Any]:
    quotient = quotient_of(expr.args[0])
    if quotient is None:
        raise NotOfSizes(str(expr))
    return quotient


class _Printer(PythonPrinter):
    """Writes conditions as TorchScript over ``x0_size_1`` and the like."""

    def _print_CeilToInt(self, expr: Any) -> str:
        over, by = map(self._print, _rounded_quotient(expr))
        return f"(-((-({over})) // ({by})))"

    def _print_FloorToInt(self, expr: Any) -> str:
        over, by = map(self._print, _rounded_quotient(expr))
        return f"(({over}) // ({by}))"

    def _print_TruncToInt(self, expr: Any) -> str:
        quotient = expr.args[0]
        if not isinstance(quotient, IntTrueDiv) or not quotient.args[1].is_positive:
            return f"int({self._print(quotient)})"  # as Python has it: int(n**0.5)
        over, by = map(self._print, quotient.args)
        return f"(({over}) // ({by}) if ({over}) >= 0 else -((-({over})) // ({by})))"

    def _print_ToFloat(self, expr: Any) -> str:
        return f"float({self._print(expr.args[0])})"

    def _print_Relational(self, expr: Any) -> str:
        return f"({self._print(expr.lhs)}) {expr.rel_op} ({self._print(expr.rhs)})"

    def _print_And(self, expr: Any) -> str:
        return " and ".join(f"({self._print(one)})" for one in expr.args)

    def _print_Or(self, expr: Any) -> str:
        return " or ".join(f"({self._print(one)})" for one in expr.args)

    def _print_Not(self, expr: Any) -> str:
        return f"not ({self._print(expr.args[0])})"


def _written(
    sizes: SymbolicSizes, conditions: Mapping[int, Sequence[Any]], behind: int
) -> WrittenChecks:
    """A check per decision."""
    symbols = {
        symbol for several in conditions.values() for one in several for symbol in one.free_symbols
    }
    places = {symbol: sizes.symbols[symbol] for symbol in symbols}
    tensors = {value.unique(): value for value, _ in places.values()}
    names = {unique: f"x{k}" for k, unique in enumerate(tensors)}
    terms = {
        s: sympy.Symbol(f"{names[v.unique()]}.size({axis})") for s, (v, axis) in places.items()
    }
    shown = {
        s: sympy.Symbol(f"{v.debugName().rpartition('.')[0] or v.debugName()}.size({axis})")
        for s, (v, axis) in places.items()
    }
    printer = _Printer()
    lines = [f"def check({', '.join(f'{name}: Tensor' for name in names.values())}) -> None:"]
    texts = {}
    for index, several in conditions.items():
        code = " & ".join(f"({printer.doprint(one.xreplace(terms))})" for one in several)
        texts[index] = " and ".join(printer.doprint(one.xreplace(shown)) for one in several)
        lines += [f"    if not ({code}):", f"        raise RuntimeError('{MARK}{index}')"]
    lines.append("    return None")
    named = tuple(value.debugName() for value in tensors.values())
    return WrittenChecks(behind, "\n".join([*lines, ""]), named, texts)


def _write(graph: torch._C.Graph, checks: WrittenChecks, segment: Check | None) -> None:
    """Write ``checks`` behind ``segment``, or the inputs."""
    own: Any = graph
    made = (value for node in own.nodes() for value in outputs_of(node))
    by_name = {value.debugName(): value for value in (*own.inputs(), *made)}
    tensors = [by_name[name] for name in checks.tensors]
    unit: Any = torch.jit.CompilationUnit(checks.code)
    makers = [value.node() for value in tensors] if segment is None else [segment.node]
    own.setInsertPoint(_after(graph, makers))
    own.insertGraph(unit.check.graph, tensors)
    own.setInsertPoint(own.block())


def _after(graph: torch._C.Graph, makers: Sequence[Any]) -> Any:
    """The first node behind ``makers``, which unpack inputs, or are inputs and have no place."""
    nodes = list(graph.nodes())
    last = max((k for k, node in enumerate(nodes) if node in makers), default=-1)
    return nodes[last + 1]


def _clean(graph: torch._C.Graph) -> None:
    own: Any = graph
    own.setInsertPoint(own.block())
    torchscript.remove_dead_code(graph)
