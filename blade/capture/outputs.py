# SPDX-License-Identifier: Apache-2.0
"""Outputs of a traced module: tensors and nested tuples of tensors, made from the outputs of forward.

A tensor stays a tensor; a tuple or list becomes a tuple of the same nesting; a mapping or dataclass
(transformers' ``ModelOutput`` is both) becomes the flat tuple of its tensors in field order. ``None`` is
dropped.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from blade.errors import InputError


class NotTensors(InputError):
    """The output holds a value that tracing cannot return."""


def tensors_of(output: Any, where: str = "the output") -> Any:
    """Return ``output`` as a tensor or a nested tuple of tensors; raises ``NotTensors``."""
    if isinstance(output, torch.Tensor):
        return output
    if (fields := _fields(output)) is not None:
        return tuple(_flat(fields, where))
    if isinstance(output, (tuple, list)):
        items = enumerate(output)
        return tuple(tensors_of(item, f"{where}[{i}]") for i, item in items if item is not None)
    raise NotTensors(
        f"model: {where} of forward is a {type(output).__name__}; tensors and tuples, lists, dicts or "
        "dataclasses of tensors can be captured by tracing. Return tensors, or make forward scriptable. "
        "(For a transformers model with a cache pass use_cache=False.)"
    )


def expect_dense(output: Any) -> None:
    """Raise ``InputError`` for tensors without dense elements, which no op compares."""
    for tensor in pytree.tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and (
            tensor.layout is not torch.strided
            or tensor.is_nested
            or tensor.dtype is torch.complex32
        ):
            what = "is nested" if tensor.is_nested else f"has the layout {tensor.layout}"
            what = "is complex32" if tensor.dtype is torch.complex32 else what
            raise InputError(
                f"model: a tensor that forward returns {what}; graphs return dense (strided) tensors that can "
                "be compared: return one of those, and convert it outside of the model."
            )


def is_plain(output: Any) -> bool:
    """Whether tracing returns ``output`` as it is: a tensor, or a nested tuple of tensors."""
    if type(output) is tuple:
        return len(output) > 0 and all(map(is_plain, output))
    return isinstance(output, torch.Tensor)


def _fields(output: Any) -> Iterable[tuple[Any, Any]] | None:
    if isinstance(output, Mapping):
        return output.items()
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [(f.name, getattr(output, f.name)) for f in dataclasses.fields(output)]
    return None


def _flat(fields: Iterable[tuple[Any, Any]], where: str) -> Iterable[torch.Tensor]:
    for name, value in fields:
        if value is not None:
            yield from _leaves(tensors_of(value, f"{where}[{name!r}]"))


def _leaves(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    for item in value:
        yield from _leaves(item)
