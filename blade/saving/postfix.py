# SPDX-License-Identifier: Apache-2.0
"""Sizes as text that C++ and Python evaluate alike (``blade/runtime/result_form.py``).

postfix(s0 * 2 + 1, {s0: "x0.1"})          # "x0.1 2 * 1 +"
"""

from collections.abc import Mapping

import sympy

from blade.runtime.result_form import UNKNOWN

_FOLDS = {"Add": "+", "Mul": "*", "Max": "max", "Min": "min"}
_PAIRS = {"FloorDiv": "//", "CleanDiv": "//", "Mod": "%", "PythonMod": "%"}
_POWERS = ("Pow", "PowByNatural")
_LARGEST_POWER = 8


def postfix(number: object, names: Mapping[sympy.Symbol, str]) -> str:
    """``number``, an int or an expression, in postfix notation; "?" if it has none."""
    try:
        return " ".join(_words(sympy.sympify(number), names))
    except _NoForm:
        return UNKNOWN


class _NoForm(Exception):
    """The expression has something that only sympy computes."""


def _words(expr: sympy.Basic, names: Mapping[sympy.Symbol, str]) -> list[str]:
    if isinstance(expr, sympy.Integer):
        return [str(int(expr))]
    if isinstance(expr, sympy.Symbol) and expr in names:
        return [names[expr]]
    name = type(expr).__name__
    parts = [_words(part, names) for part in expr.args]
    if name in _FOLDS:
        found = parts[0]
        for part in parts[1:]:
            found = [*found, *part, _FOLDS[name]]
        return found
    if name in _PAIRS and len(parts) == 2:
        return [*parts[0], *parts[1], _PAIRS[name]]
    if name in _POWERS and isinstance(expr.args[1], sympy.Integer):
        times = int(expr.args[1])
        if 1 <= times <= _LARGEST_POWER:
            return [*parts[0], *(word for _ in range(times - 1) for word in (*parts[0], "*"))]
    raise _NoForm
