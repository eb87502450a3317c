# SPDX-License-Identifier: Apache-2.0
"""Trace ``repeat_interleave`` with a size as its argument correctly.

    with patched_repeat_interleave:
        torch.jit.trace(...)       # x.repeat_interleave(y.shape[1], dim=1)

While torch traces, a size is a CPU tensor, and ``repeat_interleave`` by a tensor is another op, which gathers
rows by the tensor's values. It fails if ``x`` is on a GPU, and the size of its result depends on contents. By
one number the op is ``expand``, which needs no kernel.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch

from blade.core import torchscript
from blade.process.shared_switch import SharedSwitch

_function = torch.repeat_interleave
_method = torch.Tensor.repeat_interleave


def _put() -> None:
    torch.repeat_interleave = _by_size(_function)
    torch.Tensor.repeat_interleave = _by_size(_method)  # type: ignore[method-assign]


def _restore(_: None) -> None:
    torch.repeat_interleave = _function
    del torch.Tensor.repeat_interleave  # torch defines it in a base class


patched_repeat_interleave = SharedSwitch(_put, _restore)
"""Patches ``repeat_interleave`` for threads inside the block; for others it is unchanged."""


def _by_size(original: Callable[..., Any]) -> Callable[..., Any]:
    def repeat_interleave(*args: Any, **kwargs: Any) -> Any:
        if torchscript.is_tracing():
            given = dict(zip(("input", "repeats", "dim"), args), **kwargs)
            x, repeats = given.get("input"), given.get("repeats")
            if isinstance(x, torch.Tensor) and _is_size(repeats):
                return _expanded(x, repeats, given.get("dim"))
        return original(*args, **kwargs)

    return repeat_interleave


def _is_size(repeats: Any) -> TypeGuard[torch.Tensor]:
    if not isinstance(repeats, torch.Tensor):
        return False
    return repeats.dim() == 0 and repeats.is_cpu and repeats.dtype == torch.int64


def _expanded(x: torch.Tensor, repeats: torch.Tensor, dim: int | None) -> torch.Tensor:
    if dim is None:
        x, dim = x.flatten(), 0
    axis = dim % max(x.dim(), 1)
    sizes: list[Any] = [-1] * (x.dim() + 1)
    sizes[axis + 1] = repeats
    several = x.unsqueeze(axis + 1).expand(sizes)
    return several.clone(memory_format=torch.contiguous_format).flatten(axis, axis + 1)
