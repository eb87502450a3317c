# SPDX-License-Identifier: Apache-2.0
"""``x[index] = value`` with a value that is broadcast, in a trace that holds at other sizes.

    assign(x, index, value, get, put)    # for put(x, index, value)

Torch takes leading dimensions of 1 off the value and expands it, before the op that the tracer sees, and both with
sizes that are constants: ``out[rows] = expert(x[rows])``, traced with one row, raises with two. The ops that write
broadcast by themselves.
"""

from collections.abc import Callable
from typing import Any

import torch

from blade.capture.decisions.traced_number import dtype_of, rank_of, untraced

_BASIC = (int, slice, type(None), type(Ellipsis))
_MASKS = (torch.bool, torch.uint8)


def assign(
    x: torch.Tensor,
    index: Any,
    value: Any,
    get: Callable[..., Any],
    put: Callable[..., Any],
) -> Any:
    """``put(x, index, value)``; ``get`` and ``put`` are the methods of torch."""
    if not isinstance(value, torch.Tensor) or (rank_of(value) == 0 and value.is_cpu):
        return put(x, index, value)
    parts = tuple(map(_with_list, index if isinstance(index, tuple) else (index,)))
    if all(map(_is_basic, parts)):
        return _assign_to_view(x, index, value, get, put)
    with untraced():
        starts_with_1 = rank_of(value) > 0 and value.shape[0] == 1
        rank = rank_of(get(x, index)) if starts_with_1 else 0
    found = _split(parts, rank_of(x)) if starts_with_1 else None
    if found is None:
        return put(x, index, value)
    basic, tensors = found
    whole = all(isinstance(part, slice) and part == slice(None) for part in basic)
    torch.ops.aten.index_put_(x if whole else get(x, basic), tensors, _with_rank(value, rank))
    return None


def _assign_to_view(
    x: torch.Tensor,
    index: Any,
    value: torch.Tensor,
    get: Callable[..., Any],
    put: Callable[..., Any],
) -> Any:
    with untraced():
        shape = get(x, index).shape
        is_as_large = shape == value.shape
    if is_as_large:
        return put(x, index, value)
    get(x, index).copy_(_with_rank(value, len(shape)))
    return None


def _with_rank(value: torch.Tensor, rank: int) -> torch.Tensor:
    """``value`` without leading dimensions of 1 until it has at most ``rank``."""
    while rank_of(value) > rank:
        value = value.squeeze(0)
    return value


def _with_list(part: Any) -> Any:
    """``part`` of an index, as a tensor if it is a list of ints."""
    is_list = isinstance(part, list) and bool(part) and all(type(one) is int for one in part)
    return torch.tensor(part) if is_list else part


def _is_basic(part: Any) -> bool:
    """Whether ``part`` of an index leads to a view."""
    if isinstance(part, torch.Tensor):
        return rank_of(part) == 0 and dtype_of(part) not in _MASKS
    return isinstance(part, _BASIC) and not isinstance(part, bool)


def _split(parts: tuple[Any, ...], rank: int) -> tuple[tuple[Any, ...], list[Any]] | None:
    """The index of a view, and the tensors that index the view's dimensions; ``None`` for rarer forms."""
    basic: list[Any] = []
    tensors: list[torch.Tensor | None] = []
    taken = sum(map(_taken, parts))
    for position, part in enumerate(parts):
        if part is Ellipsis:
            basic += [slice(None)] * (rank - taken)
            tensors += [None] * (rank - taken)
        elif _is_basic(part):
            basic.append(part)
            if part is None or isinstance(part, slice):
                tensors.append(None)
        elif isinstance(part, torch.Tensor) and rank_of(part):
            if _taken(part) > 1 and position + 1 < len(parts):
                return None
            basic += [slice(None)] * _taken(part)
            tensors.append(part)
        else:
            return None
    return tuple(basic), tensors


def _taken(part: Any) -> int:
    """How many dimensions ``part`` of an index is for."""
    if part is None or part is Ellipsis:
        return 0
    is_mask = isinstance(part, torch.Tensor) and dtype_of(part) in _MASKS
    return rank_of(part) if is_mask else 1
