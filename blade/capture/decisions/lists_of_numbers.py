# SPDX-License-Identifier: Apache-2.0
"""Functions of torch that take one number for a list: ``torch.roll(x, n)`` is ``torch.roll(x, [n])``.

torch's tracer makes such a number a constant without a word, and it keeps the numbers of a list.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch._jit_internal import boolean_dispatched
from torch.nn import functional

from blade.capture.decisions.traced_number import rank_of

_POOL = {"kernel_size": 1, "stride": 2, "padding": 3}
_CONV = {"stride": 3, "padding": 4, "dilation": 5}
_CONV_TRANSPOSE = {"stride": 3, "padding": 4, "output_padding": 5, "dilation": 7}
_ADAPTIVE = {"output_size": 1}
_COLUMNS = {"kernel_size": 1, "dilation": 2, "padding": 3, "stride": 4}
_FOLD = {"output_size": 1, "kernel_size": 2, "dilation": 3, "padding": 4, "stride": 5}

_IN_FUNCTIONAL: dict[str, tuple[dict[str, int], int]] = {
    "unfold": (_COLUMNS, 2),
    "fold": (_FOLD, 2),
}
for _d in (1, 2, 3):
    _IN_FUNCTIONAL |= {
        f"conv{_d}d": (_CONV, _d),
        f"conv_transpose{_d}d": (_CONV_TRANSPOSE, _d),
        f"avg_pool{_d}d": (_POOL, _d),
        f"max_pool{_d}d": (_POOL | {"dilation": 4}, _d),
        f"adaptive_avg_pool{_d}d": (_ADAPTIVE, _d),
        f"adaptive_max_pool{_d}d": (_ADAPTIVE, _d),
    }
"""Functions of ``torch.nn.functional``: the places of their lists of numbers, and how long these are."""

_IN_TORCH: dict[str, tuple[dict[str, int], int]] = {"roll": ({"shifts": 1}, 1)}
_IN_TORCH |= {name: it for name, it in _IN_FUNCTIONAL.items() if name.startswith("conv")}


def with_lists(is_active: Callable[[], bool]) -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, name, function) of functions that make lists of single tensors while ``is_active()``."""
    for owner, table in ((torch, _IN_TORCH), (functional, _IN_FUNCTIONAL)):
        for name, (places, count) in table.items():
            yield owner, name, _listing(getattr(owner, name), places, count, is_active)
    yield torch.Tensor, "roll", _listing(torch.Tensor.roll, {"shifts": 1}, 1, is_active)


def _listing(
    original: Any, places: dict[str, int], count: int, is_active: Callable[[], bool]
) -> Any:
    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if is_active():
            args = tuple(_list(x, count) if k in places.values() else x for k, x in enumerate(args))
            kwargs = {k: _list(x, count) if k in places else x for k, x in kwargs.items()}
        return original(*args, **kwargs)

    if original in boolean_dispatched:  # how such functions are scripted
        boolean_dispatched[function] = boolean_dispatched[original]
    # how torch finds what to script in place of a function of Python
    vars(function).update(__script_if_tracing_wrapper=True, __original_fn=original)
    return function


def _list(value: Any, count: int) -> Any:
    is_number = isinstance(value, torch.Tensor) and rank_of(value) == 0
    return [value] * count if is_number else value
