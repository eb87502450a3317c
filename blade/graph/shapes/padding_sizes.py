# SPDX-License-Identifier: Apache-2.0
"""Shortens the size that pads another one to a multiple: ``(7 - h % 7) % 7`` becomes ``7 * ((h + 6) // 7) - h``.

    padded = shortened((7 - h % 7) % 7) + h       # 7 * ((h + 6) // 7): h is there once, not twice
    is_padded(padded, h)                          # True: at least h

    padded = h + max(0, 2 * (-(-h // 2) - 1) + 3 - h)     # so that a window of 3 with step 2 goes -(-h // 2) times
    windows_shortened(windows)                    # of sizes (padded - 3) // 2 + 1: (h - 1) // 2 + 1

A model that pads at each stage, as those with windows do, has sizes that would double at each of them.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Max, Mod, PythonMod

from blade.graph.shapes.fake_tensors import layout_at_hints


def shortened(number: Any) -> Any:
    """``number``, as another expression of the same value if it is such a padding."""
    if not isinstance(number, torch.SymInt) or not isinstance(number.node.expr, (Mod, PythonMod)):
        return number
    node = number.node
    size = _padded(*node.expr.args)
    if size is None:
        return number
    base, multiple = size
    padding = _rounded_up(base, multiple) - base
    made: torch.SymInt = node.shape_env.create_symintnode(padding, hint=node.hint)
    return made


def is_padded(size: Any, base: Any) -> bool:
    """Whether ``size`` is ``base`` rounded up to a multiple of a number."""
    if not isinstance(size, torch.SymInt) or not isinstance(base, torch.SymInt):
        return False
    whole, part = sympy.expand(size.node.expr), base.node.expr
    common, _ = whole.as_content_primitive()
    multiples = sympy.divisors(common)[1:] if common.is_Integer else []
    return any(_rounded_up(part, multiple) == whole for multiple in multiples)


def _rounded_up(base: Any, multiple: Any) -> Any:
    return sympy.expand(multiple * FloorDiv(base + multiple - 1, multiple))


def _padded(part: Any, multiple: Any) -> tuple[Any, Any] | None:
    """(e, k) of ``(k - e % k) % k``, with a positive number k."""
    if not multiple.is_Integer or multiple < 1:
        return None
    rest = sympy.expand(multiple - part)
    if isinstance(rest, (Mod, PythonMod)) and rest.args[1] == multiple:
        return rest.args[0], multiple
    return None


def windows_shortened(made: torch.Tensor) -> torch.Tensor:
    """A fresh dense fake tensor like ``made``, with sizes that count windows in a "same" padding written shorter."""
    sizes = list(map(_with_one_division, made.shape))
    if all(a is b for a, b in zip(sizes, made.shape, strict=True)):
        return made
    steps = layout_at_hints(made).stride()
    order = sorted(range(made.dim()), key=lambda axis: -steps[axis])
    blank = made.new_empty([sizes[axis] for axis in order])
    return blank.permute([order.index(axis) for axis in range(made.dim())])


def _with_one_division(size: Any) -> Any:
    """``size``; where it divides a maximum, and the quotient of one operand is never below the others', that alone."""
    if not isinstance(size, torch.SymInt) or not size.node.expr.has(Max):
        return size
    old = size.node.expr
    names = {q: _greatest_quotient(q) for q in old.atoms(FloorDiv) if q.has(Max)}
    new = old.xreplace({q: found for q, found in names.items() if found is not None})
    if new == old:
        return size
    made: torch.SymInt = size.node.shape_env.create_symintnode(new, hint=size.node.hint)
    return made


def _greatest_quotient(quotient: FloorDiv) -> Any | None:
    """``(Max(a, b) + c) // k`` as ``(a + c) // k``, if that is never below ``(b + c) // k``; ``None`` if not shown."""
    whole, step = quotient.args
    terms = sympy.Add.make_args(whole)
    greatest = [term for term in terms if isinstance(term, Max)]
    if len(greatest) != 1 or not step.is_Integer or step < 1:
        return None
    rest = sympy.Add(*(term for term in terms if term is not greatest[0]))
    found, *others = (FloorDiv(_with_floors(a + rest), step) for a in greatest[0].args)
    for other in others:
        if _is_at_least(other, found, step):
            found = other
        elif not _is_at_least(found, other, step):
            return None
    return _as_windows(found, step)


def _with_floors(size: Any) -> Any:
    """``-((-a) // k)``, which rounds up, as ``(a + k - 1) // k``."""
    up = {q: -_rounded(q) for q in size.atoms(FloorDiv) if q.args[0].could_extract_minus_sign()}
    return sympy.expand(size.xreplace(up))


def _rounded(quotient: FloorDiv) -> Any:
    part, step = quotient.args
    return FloorDiv(step - 1 - part, step) if step.is_Integer and step > 0 else -quotient


def _is_at_least(a: Any, b: Any, step: Any) -> bool:
    """Whether the quotient ``a`` by ``step`` is never below ``b``, as far as a constant difference shows it."""
    apart = (sympy.expand(a - b), sympy.expand(_dividend(a, step) - _dividend(b, step)))
    return any(d.is_Integer and d >= 0 for d in apart)


def _dividend(quotient: Any, step: Any) -> Any:
    """A number whose quotient by ``step`` is ``quotient``: ``a // k + 2`` is that of ``a + 2 * k``."""
    number, rest = quotient.as_coeff_Add()
    is_quotient = isinstance(rest, FloorDiv) and (rest.args[1] / step).is_Integer
    whole = FloorDiv(rest.args[0], rest.args[1] / step) if is_quotient else step * rest
    return whole + step * number


def _as_windows(quotient: Any, step: Any) -> Any:
    """``(a + 1) // 2`` as ``(a - 1) // 2 + 1``, as windows without padding are counted: equal counts look alike."""
    number, rest = _dividend(quotient, step).as_coeff_Add()
    more = -(-number // step)
    return FloorDiv(rest + number - more * step, step) + more
