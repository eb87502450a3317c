# SPDX-License-Identifier: Apache-2.0
"""Attention of rows that may see nothing, as torch defines it.

    with defined_rows(*inputs):
        want = original(*inputs)

For such a row ``scaled_dot_product_attention`` gives zeros, by each of its kernels but cuDNN's, which on CUDA serves
halves with a mask: there it is a softmax over what is masked (torch 2.11, H200: the mask is added as the least
number of the type). Which kernel serves is torch's choice and no part of the model, and whoever pads on the left of a
causal mask has such rows. So an engine is held against the other kernels.

Of these the memory-efficient one reads queries, keys and values 16 bytes at a time wherever they begin (torch 2.11: a
slice of halves that begins at an odd place stops the device): such slices go to the one that is made of products.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default
_READ_AT_ONCE = 16  # bytes


@contextmanager
def defined_rows(*inputs: Any) -> Iterator[None]:
    """Without cuDNN's attention if a tensor anywhere in ``inputs`` is on CUDA."""
    cuda = torch.backends.cuda
    if not any(map(_is_there, pytree.tree_leaves(inputs))) or not cuda.cudnn_sdp_enabled():
        yield
        return
    cuda.enable_cudnn_sdp(False)
    try:
        with Aligned():
            yield
    finally:
        cuda.enable_cudnn_sdp(True)


class Aligned(TorchDispatchMode):
    """Memory-efficient attention of what does not begin where it reads is made of products; gradients need its own."""

    supports_higher_order_operators = True  # which run as they are

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _EFFICIENT and not all(map(is_aligned, args[:3])):
            found = _by_products(*args, **(kwargs or {}))
            if found is not None:
                return found
            args = (*(x.contiguous().clone() for x in args[:3]), *args[3:])
        return func(*args, **(kwargs or {}))


def _by_products(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    has_sums: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...] | None:
    """As the efficient one answers; ``None`` where its sums of exponentials or its random numbers are asked for."""
    if has_sums or dropout:
        return None
    rest = {"dropout_p": 0.0, "is_causal": is_causal, "scale": scale}
    answer, _ = torch.ops.aten._scaled_dot_product_attention_math(query, key, value, bias, **rest)
    nothing, number = query.new_empty(0, dtype=torch.float32), torch.zeros((), dtype=torch.int64)
    return answer, nothing, number, number.clone()


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether each of its rows begins at a multiple of what is read at once."""
    steps = [s for size, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
    places = [tensor.data_ptr(), *(step * tensor.element_size() for step in steps)]
    return all(place % _READ_AT_ONCE == 0 for place in places)


def _is_there(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda
