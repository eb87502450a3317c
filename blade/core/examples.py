# SPDX-License-Identifier: Apache-2.0
"""What a module was optimized with, but for the contents of tensors: text that travels with it.

    text = text_of_samples(samples)        # '[[{"tensor": ["int64", "cpu", [2, 16], 0.0]}, {"constant": null}]]'
    samples_from(text)[0]                  # (tensor of int64[2, 16], filled with its lowest element, None)

A sample has an entry per argument of the module: a tensor, a constant, or tuples, lists and dicts of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from blade.core.dtypes import COMPUTED

_CONSTANTS = (type(None), bool, int, float, str)


def text_of_samples(samples: Sequence[Sequence[Any]]) -> str | None:
    """Describe ``samples``; ``None`` if one of them holds anything else."""
    try:
        return json.dumps([[_described(entry) for entry in sample] for sample in samples])
    except TypeError:
        return None


def samples_from(text: str) -> list[tuple[Any, ...]]:
    """The samples, whose tensors hold one number throughout; raises ``ValueError`` for any other text."""
    try:
        return [tuple(_made(entry) for entry in sample) for sample in json.loads(text)]
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(f"no description of samples: {error!r}") from error


def _described(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return {"tensor": [name, str(value.device), list(value.shape), _lowest(value)]}
    if isinstance(value, _CONSTANTS):
        return {"constant": value}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _described(item) for key, item in value.items()}}
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_described(item) for item in value]}
    raise TypeError(type(value))


def _lowest(tensor: torch.Tensor) -> float:
    """An element that is likely to be valid: an index has to be small, a length has not to be 0."""
    if not tensor.numel() or tensor.is_complex():
        return 0.0
    plain = tensor if tensor.dtype in COMPUTED else tensor.to(torch.float64)
    low = float(plain.min().to(torch.float64))
    return low if abs(low) < 2**53 else 0.0  # neither NaN nor infinity, and exact in JSON


def _made(described: Mapping[str, Any]) -> Any:
    [(kind, held)] = described.items()
    if kind == "tensor":
        dtype, device, sizes, low = held
        filled = torch.full(sizes, low, dtype=torch.float64, device=device)
        return filled.to(getattr(torch, dtype))
    if kind == "constant":
        return held
    if kind == "dict":
        return {key: _made(item) for key, item in held.items()}
    return {"tuple": tuple, "list": list}[kind](_made(item) for item in held)
