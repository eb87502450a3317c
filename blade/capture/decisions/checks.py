# SPDX-License-Identifier: Apache-2.0
"""The checks that a trace gets: functions of TorchScript that raise unless a value is what it was.

The tracer keeps calls of scripted functions, their branches included, if they return a tensor.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from blade.core import torchscript

_all: list[Callable[[], Any]] = []


def compile_all() -> None:
    """Compile every check, before names that they use are patched."""
    for compiled in _all:
        compiled()


def _scripted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` in TorchScript, compiled when it is first called."""
    compiled = cache(lambda: torchscript.script(function))
    _all.append(compiled)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = compiled()(*args, **kwargs)
        return made

    return call


@_scripted
def same_bool(t: Tensor, want: bool, text: str) -> Tensor:
    if bool(t) != want:
        raise RuntimeError(text)
    return t


@_scripted
def same_int(t: Tensor, want: int, text: str) -> Tensor:
    if int(t) != want:
        raise RuntimeError(text)
    return t


@_scripted
def same_float(t: Tensor, want: float, text: str) -> Tensor:
    if float(t) != want:
        raise RuntimeError(text)
    return t


@_scripted
def is_nan(t: Tensor, text: str) -> Tensor:
    if float(t) == float(t):
        raise RuntimeError(text)
    return t


@_scripted
def same_size(t: Tensor, dim: int, want: int, text: str) -> Tensor:
    if t.size(dim) != want:
        raise RuntimeError(text)
    return t


@_scripted
def same_split(t: Tensor, size: Tensor, dim: int, want: int, text: str) -> Tensor:
    """As many parts of length ``size`` as there were; of length 0 there are none, and no division by it."""
    step = max(int(size), 1)
    if (t.size(dim) + step - 1) // step != want:
        raise RuntimeError(text)
    return t


@_scripted
def same_chunks(t: Tensor, chunks: Tensor, dim: int, want: int, text: str) -> Tensor:
    """As many parts as ``chunk`` returned, without a branch: what follows from sizes is evaluated on symbols."""
    size = max((t.size(dim) + int(chunks) - 1) // int(chunks), 1)
    found = (t.size(dim) + size - 1) // size
    if ((t.size(dim) > 0) & (found != want)) | ((t.size(dim) == 0) & (int(chunks) != want)):
        raise RuntimeError(text)
    return t


@_scripted
def same_elements(t: Tensor, want: Tensor, text: str) -> Tensor:
    if t.dim() != want.dim() or t.dtype != want.dtype or not torch.equal(t, want):
        raise RuntimeError(text)
    return t


@_scripted
def same_layout(t: Tensor, want: bool, text: str) -> Tensor:
    if t.is_contiguous() != want:
        raise RuntimeError(text)
    return t


@_scripted
def same_strides(t: Tensor, want: list[int], text: str) -> Tensor:
    if list(t.stride()) != want:
        raise RuntimeError(text)
    return t


def dense_strides(t: Tensor, order: tuple[int, ...], text: str) -> Tensor:
    """Strides that are products of the sizes behind them, in this ``order`` of the dimensions."""
    made: Tensor = _dense(order)(t, text)
    return made


@cache
def _dense(order: tuple[int, ...]) -> Any:
    terms = [
        f"(t.stride({dim}) == {' * '.join(f't.size({j})' for j in order[k + 1 :]) or '1'})"
        for k, dim in enumerate(order)
    ]
    unit: Any = torch.jit.CompilationUnit(
        f"def dense(t: Tensor, text: str) -> Tensor:\n    if not ({' & '.join(terms)}):\n"
        "        raise RuntimeError(text)\n    return t\n"
    )
    return unit.dense


@_scripted
def same_equal(a: Tensor, b: Tensor, want: bool, text: str) -> Tensor:
    if torch.equal(a, b) != want:
        raise RuntimeError(text)
    return a


@_scripted
def same_allclose(
    a: Tensor,
    b: Tensor,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
    want: bool = True,
    text: str = "",
) -> Tensor:
    if torch.allclose(a, b, rtol, atol, equal_nan) != want:
        raise RuntimeError(text)
    return a


@_scripted
def same_alignment(t: Tensor, mask: Tensor, want: bool, text: str) -> Tensor:
    """Whether the true elements of each row of ``mask`` come first, which nested tensors need."""
    if torch._nested_tensor_from_mask_left_aligned(t, mask) != want:
        raise RuntimeError(text)
    return t
