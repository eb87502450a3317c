# SPDX-License-Identifier: Apache-2.0
"""The value of a number in a graph as an expression over the sizes of the graph's inputs.

    sizes = SymbolicSizes(graph, sample)
    sizes.number(check.fails)             # a SymBool: Ne(s1 % 7, 0); NotOfSizes if it depends on elements

Only what the number needs is evaluated, on fake tensors. The relations that torch's shape functions asked for
on the way are in ``sizes.env.guards``: the expression holds where they do.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv, IntTrueDiv

from blade.core.jit_nodes import blocks_of, inputs_of, outputs_of
from blade.core.torch_modes import SYM_SQRT, dispatched_in_python, oblivious_to_sizes
from blade.graph.fx.writer import CANNOT, blank
from blade.graph.shapes.memo import ResultMemo, is_data_dependent
from blade.graph.shapes.padding_sizes import shortened
from blade.graph.shapes.symbolic import UnspecializedFakeMode, UnspecializedShapeEnv
from blade.graph.torchscript.bind_overloads import (
    SCALAR_TYPES,
    resolve,
    split_arguments,
    to_python,
    trim_defaults,
)
from blade.graph.torchscript.check_arguments import unwrapped

Value = Any  # torch._C.Value

LONG = 128
"""Terms of a size beyond which no number that depends on it is found: the time grows with their square or faster."""


class NotOfSizes(Exception):
    """The number depends on more than sizes, or its expression cannot be found."""


class SymbolicSizes:
    """Evaluates values of ``graph``, whose tensor inputs have symbolic sizes with those of ``sample`` as hints.

    ``symbols`` maps each symbol to (value, axis). ``sample`` has one entry per input but ``self``. To torch's
    shape functions no size is 0; ``relied`` are the comparisons that this has decided.
    """

    def __init__(self, graph: torch._C.Graph, sample: Sequence[Any]) -> None:
        self.env = UnspecializedShapeEnv()
        self.symbols: dict[sympy.Symbol, tuple[Value, int]] = {}
        self.relied: list[Any] = []
        self._read: set[sympy.Symbol] = set()  # elements
        self._mode = UnspecializedFakeMode(self.env)
        self._mode.cache_enabled = False
        self._results_of_calls = ResultMemo()
        self._known: dict[int, Any] = {}
        self._failed: set[int] = set()
        given: Any = graph.inputs()
        _, *inputs = given
        for value, entry in zip(inputs, sample, strict=True):
            if isinstance(entry, torch.Tensor):
                self._place(unwrapped(value), entry)
            else:
                self._entries = {value.unique(): entry}
                self._unpack(value, entry)

    def number(self, value: Value) -> Any:
        """The number, bool or symbolic one that ``value`` holds; raises ``NotOfSizes``."""
        with oblivious_to_sizes(), torch.no_grad():
            return self._evaluated(value, _number)

    @property
    def is_exact(self) -> bool:
        """Whether no shape function has concluded what an element is equal to: it may be 1 and broadcast."""
        return not any(symbol in self._read for symbol in self.env.replacements)

    def _place(self, value: Value, tensor: torch.Tensor) -> None:
        fake = self._mode.from_tensor(
            tensor,
            source=ConstantSource(f"x{len(self._known)}"),
            symbolic_context=StatelessSymbolicContext(
                dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim()
            ),
        )
        self._known[value.unique()] = fake
        for axis, size in enumerate(fake.shape):
            if isinstance(size, torch.SymInt):
                self.symbols.setdefault(size.node.expr, (value, axis))

    def _unpack(self, value: Value, entry: Any) -> None:
        """Place the tensors of an entry that is a tuple, where the graph unpacks it."""
        for use in value.uses():
            node = use.user
            if isinstance(entry, (tuple, list)) and node.kind() in (
                "prim::TupleUnpack",
                "prim::ListUnpack",
            ):
                for part, inner in zip(node.outputs(), entry, strict=True):
                    if isinstance(inner, torch.Tensor):
                        self._place(part, inner)
                    else:
                        self._unpack(part, inner)

    def _evaluated(self, value: Value, kind: Callable[..., Any]) -> Any:
        """Evaluate ``value`` after what it needs, without recursion: a graph may be deep."""
        pending = [value]
        while pending:
            top = pending[-1]
            if top.unique() in self._known:
                pending.pop()
                continue
            if top.unique() in self._failed:
                raise NotOfSizes
            node = top.node()
            missing = [v for v in inputs_of(node) if v.unique() not in self._known]
            if missing and node.kind() != "prim::Constant":
                if any(v.unique() in self._failed for v in missing):
                    self._failed.add(top.unique())
                    raise NotOfSizes
                pending += missing
                continue
            pending.pop()
            try:
                self._make(node)
            except (*CANNOT, NotOfSizes) as error:
                self._failed.update(v.unique() for v in (*node.outputs(), *pending))
                raise NotOfSizes(str(error)) from error
        return kind(self._known[value.unique()])

    def _make(self, node: Any) -> None:
        outputs = outputs_of(node)
        if any(True for _ in blocks_of(node)) or node.kind() == "prim::Param":
            raise NotOfSizes(node.kind())
        results = self._results(node)
        if len(outputs) == 1:
            results = (results,)
        if any(map(_is_long, _sizes_in(results))):
            raise NotOfSizes("an expression of many terms")
        for output, result in zip(outputs, results, strict=True):
            self._known[output.unique()] = result

    def _results(self, node: Any) -> Any:
        kind = node.kind()
        if kind == "prim::Constant":
            return self._constant(node)
        given = [self._known[v.unique()] for v in inputs_of(node)]
        if kind in ("prim::ListConstruct", "prim::TupleConstruct"):
            return list(given)
        if kind in ("prim::ListUnpack", "prim::TupleUnpack"):
            only = given[0]
            return only[0] if len(only) == 1 else only
        if kind in OF_TENSOR and isinstance(given[0], torch.Tensor):
            return OF_TENSOR[kind](*given)
        if kind in _READ and isinstance(given[0], torch.Tensor):
            return self._unknown(given[0])
        if kind in NUMBERS and not any(isinstance(x, torch.Tensor) for x in given):
            result = NUMBERS[kind](given)
            if kind in _RELATIONS:
                self._note(_RELATIONS[kind], given[0], given[1], result)
            return result
        return self._call(node, given)

    def _note(self, relation: Any, a: Any, b: Any, result: Any) -> None:
        """Add to ``relied`` unless ``result``, that of a comparison, holds for sizes of 0, too."""
        found = result.node.expr if isinstance(result, torch.SymBool) else sympy.sympify(result)
        if found not in (sympy.true, sympy.false):
            return
        sides = [x.node.expr if isinstance(x, torch.SymInt) else x for x in (a, b)]
        if not any(isinstance(side, sympy.Expr) for side in sides):
            return
        known = {s for side in sides for s in sympy.sympify(side).free_symbols} & set(self.symbols)
        maybe = {s: sympy.Symbol(s.name, integer=True, nonnegative=True) for s in known}
        holds = relation(*(sympy.sympify(side).xreplace(maybe) for side in sides))
        if holds is not found:
            self.symbols.update({maybe[s]: self.symbols[s] for s in known})
            self.relied.append(holds if found is sympy.true else sympy.Not(holds))

    def _unknown(self, tensor: torch.Tensor) -> Any:
        """An integer element, as a symbol that no condition may have: sizes beside it are known all the same."""
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
            raise NotOfSizes("a tensor's element")
        number = self.env.create_unbacked_symint()
        self._read.add(number.node.expr)
        return number

    def _constant(self, node: Any) -> Any:
        held = node.output().toIValue()
        if not isinstance(held, torch.Tensor):
            return held
        if held.dim() == 0 and not held.is_complex():
            return held.item()
        with self._mode:
            return blank(held)

    def _call(self, node: Any, given: Sequence[Any]) -> Any:
        overload = resolve(node)
        if overload is None:
            raise NotOfSizes(node.kind())
        if overload._schema.is_mutable:
            if node.kind() in _KEEPS_SIZES and isinstance(given[0], torch.Tensor):
                return given[0]  # an element that is read later is unknown anyway
            raise NotOfSizes(node.kind())
        values = {
            argument.name: to_python(argument, self._operand(argument, value))
            for argument, value in zip(overload._schema.arguments, given, strict=True)
        }
        if node.kind() == "aten::scaled_dot_product_attention":
            values["attn_mask"] = None  # the sizes of the result do not depend on it
        args, kwargs = trim_defaults(overload, *split_arguments(overload, values))
        with self._mode, dispatched_in_python():
            if is_data_dependent(overload):  # operands that look alike may be one fake tensor
                args, kwargs = pytree.tree_map_only(torch.Tensor, blank, (args, kwargs))
            result = self._results_of_calls.of(overload, args, kwargs).value
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            raise NotOfSizes(node.kind())  # strides, which the fake tensors need not share
        return result

    def _operand(self, argument: Any, value: Any) -> Any:
        """``value``; a number that the graph holds in a tensor becomes a tensor of unknown content."""
        kind = str(argument.type)
        if kind.startswith("Tensor") and isinstance(value, NUMBER_TYPES):
            with self._mode:
                return torch.zeros((), dtype=dtype_of_number(value))
        if kind.startswith(("List[Tensor", "List[Optional[Tensor")):
            with self._mode:
                return [
                    torch.zeros((), dtype=dtype_of_number(x)) if isinstance(x, NUMBER_TYPES) else x
                    for x in value
                ]
        return value


def _sizes_in(results: Any) -> Iterator[torch.SymInt]:
    for leaf in pytree.tree_leaves(results):
        for size in leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,):
            if isinstance(size, torch.SymInt):
                yield size


def _is_long(size: torch.SymInt) -> bool:
    """Whether ``size`` has more than ``LONG`` terms; no more of them are looked at."""
    terms = sympy.preorder_traversal(size.node.expr)
    return next(islice(terms, LONG, None), None) is not None


NUMBER_TYPES = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def _number(value: Any) -> Any:
    if not isinstance(value, NUMBER_TYPES):
        raise NotOfSizes("a tensor's element")
    return value


def dtype_of_number(value: Any) -> torch.dtype:
    if isinstance(value, (bool, torch.SymBool)):
        return torch.bool
    return torch.float64 if isinstance(value, (float, torch.SymFloat)) else torch.int64


def _numel(tensor: torch.Tensor) -> Any:
    return math.prod(tensor.shape)


OF_TENSOR: Mapping[str, Callable[..., Any]] = {
    "aten::size": lambda x, axis=None: list(x.shape) if axis is None else x.shape[axis],
    "aten::dim": lambda x: x.dim(),
    "aten::numel": _numel,
    "aten::len": lambda x: x.shape[0],
    "aten::is_floating_point": lambda x: x.is_floating_point(),
    "prim::dtype": lambda x: next(k for k, dtype in SCALAR_TYPES.items() if dtype is x.dtype),
}


def _plain(function: Callable[..., Any], count: int) -> Callable[[Sequence[Any]], Any]:
    return lambda given: function(*map(_number, given[:count]))


def _with_alpha(function: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
    def call(given: Sequence[Any]) -> Any:
        a, b, *alpha = given
        if isinstance(a, list) or isinstance(b, list):
            return a + b
        return function(_number(a), _number(b) if not alpha else _number(b) * alpha[0])

    return call


def _div(given: Sequence[Any]) -> Any:
    a, b, *mode = given
    if mode and mode[0] is not None:
        if mode[0] == "trunc":
            return torch.sym_int(_number(a) / _number(b))
        return _number(a) // _number(b)
    return _number(a) / _number(b)


def _to(given: Sequence[Any]) -> Any:
    """``aten::to`` with a dtype: ints become floats and back as torch converts them."""
    value = _number(given[0])
    asked = given[2] if isinstance(given[1], torch.device) else given[1]
    dtype = SCALAR_TYPES.get(asked) if type(asked) is int else None
    if dtype is None:
        raise NotOfSizes("to")
    if dtype.is_floating_point:
        return torch.sym_float(value)
    return value if dtype is torch.bool else torch.sym_int(value)


def _both(a: Any, b: Any) -> Any:
    return _truth(a) & _truth(b)


def _either(a: Any, b: Any) -> Any:
    return _truth(a) | _truth(b)


def _and(a: Any, b: Any) -> Any:
    """``a & b``: of numbers bit by bit, where one of them is known."""
    if _are_truths(a, b):
        return _both(a, b)
    if type(a) is int and type(b) is int:
        return a & b
    number, mask = (b, a) if type(a) is int else (a, b)
    if type(mask) is not int or mask < 0:
        raise NotOfSizes("aten::__and__")
    bits = [1 << k for k in range(mask.bit_length()) if mask >> k & 1]
    if mask + 1 == 1 << len(bits):
        return number % (mask + 1)
    return sum(number // bit % 2 * bit for bit in bits)


def _or(a: Any, b: Any) -> Any:
    """``a | b``, as ``_and``."""
    return _either(a, b) if _are_truths(a, b) else a + b - _and(a, b)


def _are_truths(*values: Any) -> bool:
    return all(isinstance(value, (bool, torch.SymBool)) for value in values)


def _truth(value: Any) -> Any:
    return value if isinstance(value, (bool, torch.SymBool)) else value != 0


def _equal(a: Any, b: Any) -> Any:
    """``a == b``, which torch does not leave symbolic for bools."""
    if isinstance(b, bool):
        a, b = b, a
    if isinstance(a, bool) and isinstance(b, torch.SymBool):
        return b if a else torch.sym_not(b)
    if isinstance(a, torch.SymBool) and isinstance(b, torch.SymBool):
        return (a & b) | (torch.sym_not(a) & torch.sym_not(b))
    return a == b


def _chosen(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where ``condition`` holds, ``b`` elsewhere: a maximum or minimum where it compares them."""
    if isinstance(condition, bool):
        return a if condition else b
    if isinstance(condition, torch.SymBool):
        asked = condition.node.expr
        if asked in (_expression(a > b), _expression(a >= b)):
            return torch.sym_max(a, b)
        if asked in (_expression(a < b), _expression(a <= b)):
            return torch.sym_min(a, b)
    return torch.sym_ite(condition, a, b)


def _expression(condition: Any) -> Any:
    return condition.node.expr if isinstance(condition, torch.SymBool) else condition


def _item(given: Sequence[Any]) -> Any:
    items, index = given
    if not isinstance(items, (list, tuple)) or not isinstance(index, int):
        raise NotOfSizes("__getitem__")
    return items[index]


def _same(given: Sequence[Any]) -> Any:
    return given[0]


def _ceil(x: Any) -> Any:
    quotient = _whole_quotient(x)
    if quotient is None:
        return x if isinstance(x, (int, torch.SymInt)) else math.ceil(x)
    over, by = quotient
    up = FloorDiv(over + by - 1, by) if by.is_Integer and by > 0 else -FloorDiv(-over, by)
    return _size(x, up, math.ceil)


def _floor(x: Any) -> Any:
    quotient = _whole_quotient(x)
    if quotient is None:
        return x if isinstance(x, (int, torch.SymInt)) else math.floor(x)
    return _size(x, FloorDiv(*quotient), math.floor)


def _whole_quotient(x: Any) -> tuple[Any, Any] | None:
    return quotient_of(x.node.expr) if isinstance(x, torch.SymFloat) else None


def quotient_of(expr: Any) -> tuple[Any, Any] | None:
    """Numerator and denominator of ``expr`` if it is a quotient of integers, or a whole number more or less."""
    number, shift = expr.as_coeff_Add()[::-1]
    if not isinstance(number, IntTrueDiv) or not float(shift).is_integer():
        return None
    over, by = number.args
    return over + int(shift) * by, by


def _size(x: torch.SymFloat, expr: Any, rounding: Callable[[float], int]) -> Any:
    """A size of the value of ``x`` rounded."""
    hint = None if x.node.hint is None else rounding(x.node.hint)
    return x.node.shape_env.create_symintnode(sympy.expand(expr), hint=hint)


_KEEPS_SIZES = frozenset(
    f"aten::{name}_"
    for name in (
        "add sub mul div fill zero copy clamp clamp_min clamp_max masked_fill index_put index_add "
        "index_fill index_copy scatter scatter_add relu tanh sigmoid exp neg sqrt rsqrt pow"
    ).split()
)
"""Writes that leave the sizes of what they write to."""

_READ = frozenset("aten::Int aten::IntImplicit".split())

_SAME = (
    "prim::NumToTensor aten::ScalarImplicit aten::IntImplicit aten::FloatImplicit aten::alias "
    "aten::detach aten::clone aten::contiguous prim::unchecked_cast aten::item"
).split()

_RELATIONS: Mapping[str, Any] = {
    "aten::eq": sympy.Eq,
    "aten::ne": sympy.Ne,
    "aten::lt": sympy.Lt,
    "aten::le": sympy.Le,
    "aten::gt": sympy.Gt,
    "aten::ge": sympy.Ge,
}

NUMBERS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    **dict.fromkeys(_SAME, _same),
    "aten::add": _with_alpha(operator.add),
    "aten::sub": _with_alpha(operator.sub),
    "aten::rsub": _with_alpha(lambda a, b: b - a),
    "aten::mul": _plain(operator.mul, 2),
    "aten::div": _div,
    "aten::true_divide": _plain(operator.truediv, 2),
    "aten::floordiv": _plain(operator.floordiv, 2),
    "aten::floor_divide": _plain(operator.floordiv, 2),
    "aten::remainder": _plain(lambda a, b: shortened(a % b), 2),
    "aten::neg": _plain(operator.neg, 1),
    "aten::pow": _plain(operator.pow, 2),
    "aten::eq": _plain(_equal, 2),
    "aten::ne": _plain(lambda a, b: torch.sym_not(_equal(a, b)), 2),
    "aten::lt": _plain(operator.lt, 2),
    "aten::le": _plain(operator.le, 2),
    "aten::gt": _plain(operator.gt, 2),
    "aten::ge": _plain(operator.ge, 2),
    "aten::__not__": lambda given: torch.sym_not(_truth(given[0])),
    "aten::logical_not": lambda given: torch.sym_not(_truth(given[0])),
    "aten::__and__": _plain(_and, 2),
    "aten::logical_and": _plain(_both, 2),
    "aten::__or__": _plain(_or, 2),
    "aten::logical_or": _plain(_either, 2),
    "aten::Int": _plain(torch.sym_int, 1),
    "aten::Float": _plain(torch.sym_float, 1),
    "aten::Bool": _plain(_truth, 1),
    "aten::ceil": _plain(_ceil, 1),
    "aten::floor": _plain(_floor, 1),
    "aten::sqrt": _plain(SYM_SQRT, 1),
    "aten::maximum": _plain(torch.sym_max, 2),
    "aten::minimum": _plain(torch.sym_min, 2),
    "prim::max": _plain(torch.sym_max, 2),
    "prim::min": _plain(torch.sym_min, 2),
    "aten::where": _plain(_chosen, 3),
    "aten::abs": lambda given: torch.sym_max(_number(given[0]), -given[0]),
    "aten::to": _to,
    "aten::len": lambda given: len(given[0]),
    "aten::__getitem__": _item,
}
"""Kind -> function of evaluated inputs, none of them a tensor but those that hold a number."""
