# SPDX-License-Identifier: Apache-2.0
"""Attention of rows that see no key, as torch defines it.

    with rows_with_keys(*inputs):
        want = original(*inputs)

For such a row ``scaled_dot_product_attention`` returns zeros in every kernel but cuDNN's, which serves 16-bit
attention with a mask on CUDA: it returns a softmax over the masked keys (torch 2.11, H200: the mask is added
as the dtype's least number). Torch chooses the kernel, so the choice is no part of the model, and left
padding under a causal mask makes such rows. So engines are compared with the other kernels.

The memory-efficient kernel reads queries, keys and values 16 bytes at a time wherever they begin (torch 2.11:
a slice of 16-bit values that begins at an odd address stops the device): such slices go to the kernel made of
products.
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
def rows_with_keys(*inputs: Any) -> Iterator[None]:
    """Disable cuDNN's attention if a tensor anywhere in ``inputs`` is on CUDA."""
    cuda = torch.backends.cuda
    if not any(map(_is_there, pytree.tree_leaves(inputs))) or not cuda.cudnn_sdp_enabled():
        yield
        return
    cuda.enable_cudnn_sdp(False)
    try:
        with AlignedAttentionMode():
            yield
    finally:
        cuda.enable_cudnn_sdp(True)


class AlignedAttentionMode(TorchDispatchMode):
    """Replaces memory-efficient attention of unaligned tensors by products, unless gradients need it."""

    supports_higher_order_operators = True  # they run unchanged

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
    """Compute attention by products; ``None`` if the sums of exponentials or random numbers are needed."""
    if has_sums or dropout:
        return None
    rest = {"dropout_p": 0.0, "is_causal": is_causal, "scale": scale}
    answer, _ = torch.ops.aten._scaled_dot_product_attention_math(query, key, value, bias, **rest)
    nothing, number = query.new_empty(0, dtype=torch.float32), torch.zeros((), dtype=torch.int64)
    return answer, nothing, number, number.clone()


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether each row begins at a multiple of the bytes read at once."""
    steps = [s for size, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
    places = [tensor.data_ptr(), *(step * tensor.element_size() for step in steps)]
    return all(place % _READ_AT_ONCE == 0 for place in places)


def _is_there(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda
