# SPDX-License-Identifier: Apache-2.0
"""Products in fp64, some rows at a time: operands and result are held in fewer bits or elsewhere.

    made = compute(torch.ops.aten.bmm.default, (a, b), wide=torch.float32)      # None: this call has no parts

Operands are tensors or ``WideAtUse``. At most about ``wide_at_use.PART`` bytes of them are in fp64 at a time; the
result is in ``wide``.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from blade.verification import wide_at_use
from blade.verification.wide_at_use import WideAtUse

aten = torch.ops.aten


def compute(target: Any, args: Sequence[Any], wide: torch.dtype) -> Any:
    """Return the result of ``target``, or ``None`` where it has no parts with these arguments."""
    if (in_parts := _IN_PARTS.get(target)) is None:
        return None
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if not all(t.is_floating_point() and t.numel() for t in tensors):
        return None
    return in_parts(wide, *args)


def in_fp64(value: Any) -> Any:
    """Return a tensor of floats in fp64; other values as they are."""
    if isinstance(value, WideAtUse):
        return value.source.double()
    is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_real else value


def _parts(size: int, elements: int) -> Iterator[slice]:
    """Cut ``size`` rows, which have ``elements`` together."""
    step = max(1, size * wide_at_use.PART // (8 * elements))
    for low in range(0, size, step):
        yield slice(low, min(low + step, size))


def _bmm(wide: torch.dtype, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    made = torch.empty((*a.shape[:2], b.shape[2]), dtype=wide, device=a.device)
    for part in _parts(a.shape[0], a.numel() + b.numel() + made.numel()):
        made[part] = torch.bmm(in_fp64(a[part]), in_fp64(b[part]))
    return made


def _mm(wide: torch.dtype, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    made = torch.empty((a.shape[0], b.shape[1]), dtype=wide, device=a.device)
    if a.numel() < b.numel():
        left = in_fp64(a)
        for part in _parts(b.shape[1], b.numel() + made.numel()):
            made[:, part] = left @ in_fp64(b[:, part])
        return made
    right = in_fp64(b)
    for part in _parts(a.shape[0], a.numel() + made.numel()):
        made[part] = in_fp64(a[part]) @ right
    return made


def _addmm(wide: torch.dtype, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _mm(wide, a, b).add_(in_fp64(bias))


def _convolution(wide: torch.dtype, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    weight, bias, *how = rest
    weight, bias = in_fp64(weight), in_fp64(bias)
    shapes = (None if t is None else torch.empty_like(t, device="meta") for t in (weight, bias))
    like = aten.convolution.default(
        torch.empty(x.shape, dtype=torch.float64, device="meta"), *shapes, *how
    )
    made = torch.empty(like.shape, dtype=wide, device=x.device)
    for part in _parts(x.shape[0], x.numel() + made.numel()):
        made[part] = aten.convolution.default(in_fp64(x[part]), weight, bias, *how)
    return made


def _convolution_backward(
    wide: torch.dtype, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *how: Any
) -> tuple[torch.Tensor | None, ...]:
    weight = in_fp64(weight)
    [of_x, *_] = how[-1]
    made = torch.empty(x.shape, dtype=wide, device=x.device) if of_x else None
    sums: list[torch.Tensor | None] = [None, None]
    for part in _parts(x.shape[0], 2 * x.numel() + gradient.numel()):
        found = aten.convolution_backward.default(
            in_fp64(gradient[part]), in_fp64(x[part]), weight, *how
        )
        if made is not None:
            made[part] = found[0]
        for k, one in enumerate(found[1:]):
            sums[k] = one if sums[k] is None or one is None else sums[k] + one
    return made, *(None if one is None else one.to(wide) for one in sums)


_IN_PARTS: dict[Any, Callable[..., Any]] = {
    aten.bmm.default: _bmm,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
