# SPDX-License-Identifier: Apache-2.0
"""Attention of rows that may see nothing, as torch defines it.

    with defined_rows(*inputs):
        want = original(*inputs)

For such a row ``scaled_dot_product_attention`` gives zeros, by each of its kernels but cuDNN's, which on CUDA serves
halves with a mask: there it is a softmax over what is masked (torch 2.11, H200: the mask is added as the least
number of the type). Which kernel serves is torch's choice and no part of the model, and whoever pads on the left of a
causal mask has such rows. So an engine is held against the other kernels.

Of these the memory-efficient one reads queries, keys and values 16 bytes at a time wherever they begin (torch 2.11: a
slice of halves that begins at an odd place stops the device), so that it gets copies of such slices.
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
    """What memory-efficient attention reads begins where it can."""

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
        if func is _EFFICIENT:
            args = (*map(aligned, args[:3]), *args[3:])
        return func(*args, **(kwargs or {}))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy where it begins between two multiples of what is read at once."""
    return tensor if tensor.data_ptr() % _READ_AT_ONCE == 0 else tensor.contiguous().clone()


def _is_there(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda
