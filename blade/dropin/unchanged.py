# SPDX-License-Identifier: Apache-2.0
"""Whether weights and attributes are as they were, compared in one call of C++ (``csrc/python/unchanged.cpp``).

    facts = weight_facts(weights)                               # versions and addresses
    unchanged(weights, facts, (vars(m), "scale", 2.0), (vars(m), 14))

The last two are items of dicts, by threes, and the lengths of dicts, by twos. Where that library was not built,
the same is done here.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

Weights = tuple[torch.Tensor, ...]


def python_weight_facts(weights: Weights) -> bytes:
    return repr([_of_weight(one) for one in weights]).encode()


def python_unchanged(
    weights: Weights, facts: bytes, items: tuple[Any, ...], sizes: tuple[Any, ...]
) -> bool:
    return (
        python_weight_facts(weights) == facts
        and all(len(held) == n for held, n in zip(sizes[::2], sizes[1::2]))
        and all(map(_has, items[::3], items[1::3], items[2::3]))
    )


def _of_weight(weight: torch.Tensor) -> tuple[int, int]:
    version = 0 if weight.is_inference() else weight._version
    return version, weight.data_ptr()


def _has(held: dict[str, Any], key: str, value: Any) -> bool:
    now = held.get(key, _MISSING)
    if now is value:
        return True
    try:
        return type(now) is type(value) and bool(now == value)
    except (RuntimeError, ValueError):  # a tensor in a list
        return False


_MISSING = object()


def _compiled() -> Any:
    if importlib.util.find_spec("blade._interrupts") is None:
        return None
    found = importlib.import_module("blade._interrupts")
    return found if hasattr(found, "unchanged") else None


_library = _compiled()
weight_facts: Callable[[Weights], bytes] = (
    python_weight_facts if _library is None else _library.weight_facts
)
unchanged: Callable[[Weights, bytes, tuple[Any, ...], tuple[Any, ...]], bool] = (
    python_unchanged if _library is None else _library.unchanged
)
