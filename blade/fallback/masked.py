# SPDX-License-Identifier: Apache-2.0
"""Attention of rows that may see nothing, as torch defines it.

    with defined_rows(*inputs):
        want = original(*inputs)

For such a row ``scaled_dot_product_attention`` gives zeros, by each of its kernels but cuDNN's, which on CUDA serves
halves with a mask: there it is a softmax over what is masked (torch 2.11, H200: the mask is added as the least
number of the type). Which kernel serves is torch's choice and no part of the model, and whoever pads on the left of a
causal mask has such rows. So an engine is held against the other kernels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree


@contextmanager
def defined_rows(*inputs: Any) -> Iterator[None]:
    """Without cuDNN's attention if a tensor anywhere in ``inputs`` is on CUDA."""
    cuda = torch.backends.cuda
    turned = any(map(_is_there, pytree.tree_leaves(inputs))) and cuda.cudnn_sdp_enabled()
    if turned:
        cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        if turned:
            cuda.enable_cudnn_sdp(True)


def _is_there(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda
