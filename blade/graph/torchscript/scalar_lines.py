# SPDX-License-Identifier: Apache-2.0
"""Finds scalar lines: bookkeeping such as sizes, scalar arithmetic and lists, which are no ops.

A scalar line is pure and nearly free, so it is never a node: it is duplicated into every user of its
value, and edges pass through it. ``jit.trace`` writes ``x.size(1) + 1`` as
``NumToTensor -> aten::add (a 0-d tensor) -> aten::Int``; such chains of 0-d integer tensors are scalar
lines too. Chains that leave the integers (``sqrt``, true division) are not: they round in the 0-d tensor's
dtype, which only the real op reproduces. The exceptions are ``ceil`` or ``floor`` of a quotient, and the integer part
of a square root, on the way to an integer, which are exact for sizes below ``EXACT``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import Any, NamedTuple

import torch

from blade.graph.torchscript.alias import Aliases, schema_of
from blade.graph.torchscript.bind_overloads import resolve
from blade.graph.torchscript.program import Line, Program

INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

METADATA = frozenset(
    "aten::size aten::len aten::dim aten::numel aten::is_floating_point prim::dtype prim::device "
    "prim::layout prim::is_cuda prim::is_cpu".split()
)
"""Properties of a tensor that do not depend on its elements."""

SCALAR = frozenset(
    "aten::Int aten::Float aten::Bool aten::ScalarImplicit aten::IntImplicit aten::FloatImplicit "
    "aten::add aten::sub aten::mul aten::div aten::floordiv aten::remainder aten::neg aten::floor "
    "aten::ceil aten::round aten::sqrt aten::pow aten::abs prim::min prim::max prim::abs aten::eq "
    "aten::ne aten::lt aten::le aten::gt aten::ge aten::__and__ aten::__or__ aten::__not__ "
    "aten::__is__ aten::__isnot__ aten::__getitem__ aten::__range_length aten::__derive_index "
    "prim::unchecked_cast aten::list aten::copy aten::sum aten::format aten::str aten::slice aten::mod "
    "aten::__lshift__ aten::__rshift__ aten::__contains__ aten::divmod prim::type".split()
)
"""Arithmetic on plain scalars and lists; a scalar line if no tensor goes in or comes out."""

STRUCTURE = frozenset(("prim::ListConstruct", "prim::TupleConstruct"))

CHAIN = frozenset(
    "aten::add aten::sub aten::mul aten::floor_divide aten::remainder aten::neg aten::rsub aten::div "
    "aten::to".split()
)
"""Integer arithmetic that tracing writes on 0-d tensors of sizes; only divisions that round and
conversions that change nothing."""

EXACT = 1 << 22
"""Below it float32 holds every integer, and no quotient of integers, plus one, rounds to an integer that it is not."""

ROUNDING = frozenset(("aten::ceil", "aten::floor"))
"""What makes an integer of a quotient, as a float; only integer arithmetic and a conversion may follow."""

ROOTS = frozenset(("aten::pow", "aten::sqrt"))
"""What may be the square root of an integer, as a float whose fraction is cut off at once."""

READS = frozenset(("aten::Int", "aten::IntImplicit"))
"""Conversions of a tensor's element into an int. One whose int only becomes sizes is a scalar line."""

FROM_CHAIN = frozenset(
    "aten::Int aten::Float aten::ScalarImplicit aten::IntImplicit aten::FloatImplicit".split()
)

COMPARISONS = frozenset("aten::eq aten::ne aten::lt aten::le aten::gt aten::ge".split())
"""Of 0-d tensors of sizes, where their results only choose the greater or the smaller one, or become a bool."""

ORDERS = COMPARISONS - {"aten::eq", "aten::ne"}


def find_scalar_lines(program: Program, aliases: Aliases) -> frozenset[int]:
    """Indices of the scalar lines of ``program``, constants included."""
    cheap: set[int] = set()
    chain: set[int] = set()  # 0-d integer tensors that stand for scalars
    truths: set[int] = set()  # 0-d tensors of their comparisons
    floats = _Floats(set(), set(), set())
    reads = any(line.kind in READS for line in program.lines)
    sizes = _only_sizes(program) if reads else frozenset[int]()
    for line in program.lines:
        if any(aliases.may_be_written(v) for v in line.outputs):
            continue
        if line.kind == "prim::Constant" or line.kind in STRUCTURE:
            cheap.add(line.index)
        elif _is_chain(program, line, chain):
            cheap.add(line.index)
            chain.update(line.outputs)
        elif _is_comparison(program, line, chain):
            cheap.add(line.index)
            truths.update(line.outputs)
        elif _is_choice(program, line, chain):
            cheap.add(line.index)
            chain.update(line.outputs)
        elif line.kind == "aten::Bool" and line.inputs[0] in truths:
            cheap.add(line.index)
        elif _is_rounding(program, line, chain, floats):
            cheap.add(line.index)
            floats.add(line, chain)
        elif _is_scalar_code(
            program, line, chain | floats.rounded | floats.roots, cheap, aliases
        ) or _is_read(program, line, aliases, sizes):
            cheap.add(line.index)
    return frozenset(cheap)


_ARITHMETIC = frozenset("aten::add aten::sub aten::mul aten::floordiv prim::min prim::max".split())


def _is_read(program: Program, line: Line, aliases: Aliases, sizes: Set[int]) -> bool:
    """Whether ``line`` reads an int out of a tensor that is never written, and only sizes are made of it."""
    if line.kind not in READS or not program.is_tensor(line.inputs[0]):
        return False
    return not aliases.may_be_written(line.inputs[0]) and line.outputs[0] in sizes


def _only_sizes(program: Program) -> frozenset[int]:
    """The ints whose every use is integer arithmetic, or an int or a list of ints of an op.

    From the last line to the first, so that a sum of hundreds takes no recursion.
    """
    found: set[int] = set()
    for line in reversed(program.lines):
        for value in line.outputs:
            if value in program.returned or not _is_int(program, value):
                continue
            if all(_takes_size(program, u, value, found) for u in program.users_of(value)):
                found.add(value)
    return frozenset(found)


def _takes_size(program: Program, line: Line, value: int, sizes: Set[int]) -> bool:
    """``sizes``: ints of which that is known."""
    if line.free or value not in line.inputs:
        return False
    if line.kind in _ARITHMETIC and all(_is_int(program, v) for v in (*line.inputs, *line.outputs)):
        return line.outputs[0] in sizes
    if line.kind == "prim::ListConstruct":
        made = line.outputs[0]
        users = program.users_of(made)
        return made not in program.returned and all(_has_sizes(user, made) for user in users)
    return _has_sizes(line, value)


def _has_sizes(line: Line, value: int) -> bool:
    """Whether ``line`` is an op, and ``value`` a size or several wherever it is an argument."""
    overload = resolve(line.node)
    if overload is None:
        return False
    given = zip(overload._schema.arguments, line.inputs, strict=True)
    return line.kind == "aten::arange" or all(_is_size(a) for a, v in given if v == value)


def _is_size(argument: torch._C.Argument) -> bool:
    kind = argument.real_type
    while kind.kind() in ("OptionalType", "ListType"):
        kind = kind.getElementType()
    return kind.kind() == "SymIntType"


def reads_elements(program: Program, cheap: frozenset[int], value: int) -> bool:
    """Whether a scalar line that ``value`` is computed by reads a tensor's element."""
    pending, seen = [value], set[int]()
    while pending:
        current = pending.pop()
        line = program.maker(current)
        if current in seen or line is None or line.index not in cheap:
            continue
        seen.add(current)
        if reads_node(program, cheap, line):
            return True
        pending.extend(line.reads)
    return False


def reads_node(program: Program, cheap: frozenset[int], line: Line) -> bool:
    """Whether ``line``, a scalar line, reads a tensor that an op made: one that tracing made of a size is no read."""
    if line.kind not in READS or not program.is_tensor(line.inputs[0]):
        return False
    maker = program.maker(line.inputs[0])
    return maker is None or maker.index not in cheap


def _is_chain(program: Program, line: Line, chain: set[int]) -> bool:
    if line.kind == "prim::NumToTensor":
        return _is_int(program, line.inputs[0])
    return line.kind in CHAIN and _extends_chain(program, line, chain)


def _is_comparison(program: Program, line: Line, chain: set[int]) -> bool:
    if line.kind not in COMPARISONS or not _are_numbers(program, line.inputs, chain):
        return False
    [truth] = line.outputs
    return truth not in program.returned and all(
        user.kind == "aten::Bool" or _chooses(program, user) for user in program.users_of(truth)
    )


def _is_choice(program: Program, line: Line, chain: set[int]) -> bool:
    """Whether ``line`` is the maximum or minimum of two integers: part of a chain, too."""
    return _chooses(program, line) and _are_numbers(program, line.inputs[1:], chain)


def _chooses(program: Program, line: Line) -> bool:
    """Whether ``line`` is ``where(a > b, a, b)`` or the like."""
    if line.kind != "aten::where" or len(line.inputs) != 3:
        return False
    compared = program.maker(line.inputs[0])
    if compared is None or compared.kind not in ORDERS:
        return False
    pairs = zip(compared.inputs, line.inputs[1:], strict=True)
    return all(a == b or _is_same_number(program, a, b) for a, b in pairs)


def _is_same_number(program: Program, a: int, b: int) -> bool:
    """Whether both are constants of one number, be it a 0-d tensor."""
    numbers = [_held_number(program, v) for v in (a, b)]
    return type(numbers[0]) is type(numbers[1]) is int and numbers[0] == numbers[1]


def _held_number(program: Program, value: int) -> int | float | None:
    """The number that a constant is, be it a 0-d tensor; ``None`` if ``value`` is no constant number."""
    held = program.held(value) if program.constant(value) else None
    number = held.item() if isinstance(held, torch.Tensor) and held.dim() == 0 else held
    return number if isinstance(number, (int, float)) else None


class _Floats(NamedTuple):
    """0-d float tensors that stand for numbers: quotients and roots of integers, and what is an integer again."""

    quotients: set[int]
    roots: set[int]
    rounded: set[int]

    def add(self, line: Line, chain: set[int]) -> None:
        """Add the result of ``line``, which ``_is_rounding``."""
        stays = line.kind not in (*ROUNDING, "aten::to")
        if line.kind in ROOTS:
            self.roots.update(line.outputs)
            return
        is_quotient = line.kind == "aten::div" or (stays and line.inputs[0] in self.quotients)
        own = self.quotients if is_quotient else self.rounded
        (chain if line.kind == "aten::to" else own).update(line.outputs)


def _is_rounding(program: Program, line: Line, chain: set[int], floats: _Floats) -> bool:
    """Whether ``line`` is part of a rounded quotient, or of a root, of sizes that becomes an integer again."""
    if line.kind in ROOTS and _is_root(program, line):
        return line.inputs[0] in chain and _becomes_int(program, line.outputs[0])
    if line.kind == "aten::div":
        is_quotient = len(line.inputs) == 2 or program.held(line.inputs[2]) is None
        is_of_ints = is_quotient and _are_numbers(program, line.inputs[:2], chain)
        return is_of_ints and _is_rounded(program, line.outputs[0])
    if line.kind == "aten::to":
        return line.inputs[0] in floats.roots | floats.rounded and _is_to_int64(program, line)
    if line.kind in ROUNDING:
        return line.inputs[0] in floats.quotients | floats.rounded
    if line.inputs and line.inputs[0] in floats.quotients:
        return _is_shift(program, line)
    if _is_with_constants(program, line):
        return line.inputs[0] in floats.rounded
    is_arithmetic = line.kind in _EXACT_ARITHMETIC and any(v in floats.rounded for v in line.inputs)
    return is_arithmetic and _are_numbers(program, line.inputs, chain | floats.rounded)


def _is_root(program: Program, line: Line) -> bool:
    """Whether ``line`` takes a square root on the CPU; the users of it have to cut its fraction off at once."""
    if line.kind == "aten::pow" and _held_number(program, line.inputs[1]) != 0.5:
        return False
    users = program.users_of(line.outputs[0])
    return all(one.kind in ("aten::to", "aten::Int") for one in users)


def _is_with_constants(program: Program, line: Line) -> bool:
    """Whether ``line`` bounds its first input by integers, or divides it by a positive one and rounds down."""
    if line.kind not in ("aten::clamp", "aten::floor_divide"):
        return False
    if line.kind == "aten::floor_divide":
        divisor = _held_number(program, line.inputs[1])
        return type(divisor) is int and divisor > 0
    others = [program.held(v) if program.constant(v) else 0.5 for v in line.inputs[1:]]
    return all(o is None or type(o) is int for o in others)


_EXACT_ARITHMETIC = frozenset(("aten::add", "aten::sub", "aten::mul"))


def _is_shift(program: Program, line: Line) -> bool:
    """Whether ``line`` adds 1 to its first input, or subtracts it."""
    is_sum = line.kind in ("aten::add", "aten::sub")
    return is_sum and all(_held_number(program, v) == 1 for v in line.inputs[1:])


def _is_rounded(program: Program, value: int) -> bool:
    """Whether the quotient ``value``, or one more or less, is only rounded, and becomes an int."""
    users = program.users_of(value)
    if value in program.returned or not users:
        return False
    return all(
        not one.free
        and one.inputs[0] == value
        and (
            _becomes_int(program, one.outputs[0])
            if one.kind in ROUNDING
            else _is_shift(program, one) and _is_rounded(program, one.outputs[0])
        )
        for one in users
    )


def _becomes_int(program: Program, value: int) -> bool:
    """Whether the 0-d float ``value``, an integer, is only computed with, and converted to an int in the end."""
    users = program.users_of(value)
    if value in program.returned or not users:
        return False
    return all(
        one.kind == "aten::Int"
        or (one.kind == "aten::to" and one.inputs[0] == value and _is_to_int64(program, one))
        or (
            (one.kind in ROUNDING | _EXACT_ARITHMETIC or _is_with_constants(program, one))
            and not one.free
            and _becomes_int(program, one.outputs[0])
        )
        for one in users
    )


def _are_numbers(program: Program, values: Sequence[int], chain: set[int]) -> bool:
    """Whether ``values`` are integers, one of them at least of the chain."""
    tensors = [v for v in values if program.is_tensor(v)]
    others = [v for v in values if not program.is_tensor(v)]
    return (
        any(v in chain for v in tensors)
        and all(v in chain or _is_int_scalar_constant(program, v) for v in tensors)
        and all(_is_int_number(program, v) for v in others)
    )


def _is_int(program: Program, value: int) -> bool:
    return program.values[value].type().kind() == "IntType"


def _extends_chain(program: Program, line: Line, chain: set[int]) -> bool:
    if line.kind == "aten::to":
        return line.inputs[0] in chain and _stays_as_it_is(program, line)
    numbers = line.inputs
    if line.kind == "aten::div":  # the mode is the last input, absent by default
        if len(numbers) != 3 or program.held(numbers[2]) not in ("trunc", "floor"):
            return False
        numbers = numbers[:2]
    return _are_numbers(program, numbers, chain)


def _stays_as_it_is(program: Program, line: Line) -> bool:
    """Whether an ``aten::to`` leaves an int64 on the CPU unchanged."""
    return _converts_to(program, line, (None, *_INT64))


def _is_to_int64(program: Program, line: Line) -> bool:
    return _converts_to(program, line, _INT64)


def _converts_to(program: Program, line: Line, dtypes: Collection[Any]) -> bool:
    """Whether an ``aten::to`` makes a CPU tensor of one of ``dtypes``."""
    schema = schema_of(line.node)
    if schema is None or not all(program.constant(v) for v in line.inputs[1:]):
        return False
    names = [argument.name for argument in schema.arguments]
    given = {name: program.held(v) for name, v in zip(names, line.inputs, strict=False)}
    on_cpu = torch.device(given.get("device") or "cpu").type == "cpu"
    return "other" not in given and on_cpu and given.get("dtype") in dtypes


_INT64 = (torch.int64, 4)  # 4: TorchScript's number of it


def _is_int_scalar_constant(program: Program, value: int) -> bool:
    if not program.constant(value):
        return False
    tensor = program.held(value)
    if type(tensor) is int:  # a 0-d tensor that was a plain number when traced
        return True
    return isinstance(tensor, torch.Tensor) and tensor.dim() == 0 and tensor.dtype in INTEGER_DTYPES


def _is_int_number(program: Program, value: int) -> bool:
    if _is_int(program, value):
        return True
    return program.constant(value) and type(program.held(value)) is int


def _is_scalar_code(
    program: Program, line: Line, chain: set[int], cheap: set[int], aliases: Aliases
) -> bool:
    if any(holds_tensor(program.values[v].type()) for v in line.outputs) or not line.outputs:
        return False
    if line.kind in METADATA:
        return not any(aliases.may_be_resized(v) for v in line.inputs)
    if line.kind in ("prim::ListUnpack", "prim::TupleUnpack"):
        return program.producer.get(line.inputs[0]) in cheap
    if line.kind in FROM_CHAIN and line.inputs[0] in chain:
        return True
    tensors = any(holds_tensor(program.values[v].type()) for v in line.inputs)
    written = any(aliases.may_be_written(v) for v in line.inputs)  # e.g. a list that is appended to
    return line.kind in SCALAR and not tensors and not written


def holds_tensor(kind: torch._C.JitType) -> bool:
    """Whether a value of this type may contain a tensor (``None`` contains none)."""
    if kind.kind() in ("TensorType", "AnyType", "ClassType", "InterfaceType", "FutureType"):
        return True
    return any(holds_tensor(inner) for inner in kind.containedTypes())  # type: ignore[attr-defined]
