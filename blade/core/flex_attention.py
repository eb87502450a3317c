# SPDX-License-Identifier: Apache-2.0
"""``torch.nn.attention.flex_attention`` as ops that backends know.

    attend(q, k, v, lambda score, b, h, i, j: score + bias[h, i - j], None, scale)
    ->  _safe_softmax(q @ k.T * scale + bias[h, i - j]) @ v

The modification of scores is called once, with all scores and with indices that broadcast against them, where torch
calls it for each score under ``vmap``. That is the same for what computes elementwise, and for tensors that are read
at as many indices as they have dimensions; others raise ``NotImplementedError``.

Blocks that a block mask leaves out are masked, as in torch's own implementation without fusion.
"""

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Modify = Callable[..., torch.Tensor]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Modify | None = None,
    mask_mod: Modify | None = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Attention of ``query`` (B, H, M, E) to ``key`` (B or 1, a divisor of H, N, E) and ``value`` (..., N, F).

    ``score_mod(score, b, h, i, j)`` returns what replaces a score, ``mask_mod(b, h, i, j)`` whether it counts.
    ``is_causal`` says that ``mask_mod`` is ``i >= j``. Rows in which nothing counts are zero.
    """
    if bool(key.shape[0] != query.shape[0]):  # a tensor while torch traces
        key, value = (t.expand(query.shape[0], *t.shape[1:]) for t in (key, value))
    is_grouped = bool(key.shape[1] != query.shape[1])
    places = _places(query, key)
    mask = None if mask_mod is None or is_causal else _called(mask_mod, places)
    if score_mod is None:
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
        )
    if is_causal:
        mask = places[2] >= places[3]
    if is_grouped:
        sharing = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(sharing, 1) for t in (key, value))
    scores = query @ key.transpose(-2, -1)
    wide = torch.float64 if scores.dtype is torch.float64 else torch.float32
    scores = scores.to(wide) * (1 / sqrt(query.shape[-1]) if scale is None else scale)
    modified = _called(score_mod, (scores, *places)).to(wide).expand_as(scores)
    if mask is not None:
        modified = torch.where(mask, modified, -float("inf"))
    weights: torch.Tensor = torch.ops.aten._safe_softmax(modified, -1)
    return weights.to(query.dtype) @ value


def _places(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The indices of batch, head, query and key, each along its dimension of the scores."""
    sizes = (*query.shape[:3], key.shape[2])
    counted = [torch.arange(size, device=query.device) for size in sizes]
    shapes = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
    return tuple(one.view(shape) for one, shape in zip(counted, shapes, strict=True))


def _called(modify: Modify, given: Sequence[torch.Tensor]) -> torch.Tensor:
    with _WholeIndices():
        found = modify(*given)
    return found if found.dim() == 4 else found.expand(1, 1, 1, 1)


class _WholeIndices(TorchFunctionMode):
    """Refuse to read part of a tensor at an index, which broadcasting would get wrong: ``bias[b][h]``."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") == "__getitem__":
            tensor, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if any(isinstance(one, torch.Tensor) for one in indices) and not (
                len(indices) == tensor.dim() and all(map(_is_index, indices))
            ):
                raise NotImplementedError(
                    f"flex_attention reads a tensor of {tensor.dim()} dimensions at {len(indices)} indices: give it "
                    "one index for each dimension, bias[b, h] instead of bias[b][h]"
                )
        return func(*args, **(kwargs or {}))


def _is_index(one: object) -> bool:
    return isinstance(one, (torch.Tensor, int)) and not isinstance(one, bool)
