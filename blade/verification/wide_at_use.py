# SPDX-License-Identifier: Apache-2.0
"""Narrow tensors that read as float64 or float32: an op that uses one widens it, in parts where the op has parts.

    weight = WideAtUse(linear.weight)           # weight.dtype is float64, its memory is the narrow tensor's
    product = torch.mm(x.double(), weight.t())  # in float64; at most ``PART`` bytes of the weight at a time
    attend(query, key, value)                   # attention in float64 whose scores take ``PART`` bytes at a time

A copy of all weights in float64 takes four times the memory of a model in 16 bits, and the scores of attention
grow with the square of the length.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from blade.process.shared_switch import SharedSwitch

PART = 64 << 20
"""Most bytes in float64 of one part of a weight, or of the scores of attention."""

NARROW = (torch.float32, torch.float16, torch.bfloat16)

aten = torch.ops.aten
# A lookup reads few rows of a table and loses nothing in a narrow one.
LOOKUPS = (aten.embedding.default, aten.index_select.default)
_VIEWS = frozenset(
    (
        *(aten.t.default, aten.transpose.int, aten.permute.default, aten.detach.default),
        *(aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.alias.default),
        *(aten.squeeze.dim, aten.expand.default, aten.slice.Tensor, aten.select.int),
    )
)


class WideAtUse(torch.Tensor):
    """A tensor of a ``wide`` dtype whose memory is that of a narrow one; nothing may write to it."""

    source: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, narrow: torch.Tensor, wide: torch.dtype = torch.float64) -> "WideAtUse":
        assert narrow.dtype in NARROW, narrow.dtype
        made: WideAtUse = torch.Tensor._make_wrapper_subclass(
            cls,
            narrow.shape,
            strides=narrow.stride(),
            storage_offset=narrow.storage_offset(),
            dtype=wide,
            device=narrow.device,
        )
        made.source = narrow.detach()
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"WideAtUse({self.source.dtype}, {tuple(self.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "WideAtUse":
        return self  # it is constant

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _VIEWS:
            return WideAtUse(func(args[0].source, *args[1:], **kwargs), args[0].dtype)
        if func in LOOKUPS and isinstance(args[0], WideAtUse):
            found = func(args[0].source, *pytree.tree_map(widened, args[1:]), **kwargs)
            return widened(found, args[0].dtype)
        if (in_parts := _PRODUCTS.get(func)) is not None and not kwargs:
            return in_parts(*args)
        if func._schema.is_mutable and _is_written(func, args, kwargs):
            raise NotImplementedError(f"{func} writes to a weight")
        leaves = pytree.tree_leaves((args, kwargs))
        wide = next(leaf.dtype for leaf in leaves if isinstance(leaf, WideAtUse))
        args, kwargs = pytree.tree_map(lambda value: widened(value, wide), (args, kwargs))
        return func(*args, **kwargs)


def widened(value: Any, wide: torch.dtype = torch.float64) -> Any:
    """Return ``value``, if it is ``WideAtUse``, as a tensor with memory of its own; a narrower tensor in ``wide``."""
    if isinstance(value, WideAtUse):
        return value.source.to(value.dtype)
    return value.to(wide) if is_narrow(value, wide) else value


def is_narrow(value: Any, wide: torch.dtype) -> bool:
    """Whether ``value`` is a float tensor that ``wide`` widens."""
    is_float = isinstance(value, torch.Tensor) and value.dtype in NARROW
    return is_float and value.dtype.itemsize < wide.itemsize


def wide_bytes(tensor: torch.Tensor, wide: torch.dtype = torch.float64) -> int:
    """Return the bytes that ``tensor`` takes in ``wide``."""
    return wide.itemsize * tensor.numel()


def _is_written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
    written = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    leaves = pytree.tree_leaves([named.get(name) for name in written])
    return any(isinstance(leaf, WideAtUse) for leaf in leaves)


def _parts(size: int, total_bytes: int) -> list[slice]:
    """Cut ``size`` rows, which take ``total_bytes`` together, into parts of at most ``PART`` bytes."""
    step = max(1, size * PART // max(total_bytes, 1))
    return [slice(low, min(low + step, size)) for low in range(0, size, step)]


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not isinstance(b, WideAtUse):
        return _mm(b.t(), a.t()).t()
    a = widened(a, b.dtype)
    if wide_bytes(b, b.dtype) <= PART:
        return torch.mm(a, widened(b))
    made = a.new_empty(a.shape[0], b.shape[1])
    for part in _parts(b.shape[1], wide_bytes(b, b.dtype)):
        torch.mm(a, b.source[:, part].to(b.dtype), out=made[:, part])
    return made


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.mm(a, b)
    return made.add_(widened(bias, made.dtype))


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    largest = max(wide_bytes(x, x.dtype) for x in (a, b) if isinstance(x, WideAtUse))
    shape = a.shape[0], a.shape[1], b.shape[2]
    made = torch.empty(shape, dtype=a.dtype, device=a.device)
    for part in _parts(a.shape[0], largest):
        torch.bmm(widened(a[part], made.dtype), widened(b[part], made.dtype), out=made[part])
    return made


_PRODUCTS: dict[Any, Callable[..., torch.Tensor]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
}


_whole = functional.scaled_dot_product_attention


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``scaled_dot_product_attention``, some rows of queries at a time where all scores exceed ``PART`` bytes."""
    rest: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    rows, keys = query.shape[-2], key.shape[-2]
    parts = _parts(rows, query.element_size() * query[..., 0].numel() * keys)
    if len(parts) < 2 or dropout_p or (is_causal and attn_mask is not None):
        return _whole(query, key, value, attn_mask, dropout_p, is_causal, **rest)
    columns = torch.arange(keys, device=query.device)
    several = []
    for part in parts:
        mask = attn_mask
        if is_causal:
            mask = columns <= columns.new_tensor(range(part.start, part.stop)).unsqueeze(-1)
        elif attn_mask is not None and attn_mask.dim() > 1 and attn_mask.shape[-2] > 1:
            mask = attn_mask[..., part, :]
        several.append(_whole(query[..., part, :], key, value, mask, **rest))
    return torch.cat(several, -2)


@contextmanager
def attention_in_parts() -> Iterator[None]:
    """Make Python code on this thread that calls ``scaled_dot_product_attention`` on float64 call ``attend``.

    Under a mode of torch functions, which would do as well, ``torch.nn`` does not use its fused layers.
    """
    before, _thread.is_inside = _is_inside(), True
    try:
        with _patched:
            yield
    finally:
        _thread.is_inside = before


def _is_inside() -> bool:
    return bool(getattr(_thread, "is_inside", False))


def _put() -> Callable[..., torch.Tensor]:
    before = functional.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        query = args[0] if args else kwargs.get("query")
        is_wide = isinstance(query, torch.Tensor) and query.dtype is torch.float64
        return (attend if is_wide and _is_inside() else before)(*args, **kwargs)

    functional.scaled_dot_product_attention = attention
    return before


def _restore(before: Callable[..., torch.Tensor]) -> None:
    functional.scaled_dot_product_attention = before


_thread = threading.local()
_patched = SharedSwitch(_put, _restore)
