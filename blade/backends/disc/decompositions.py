# SPDX-License-Identifier: Apache-2.0
"""What AOTAutograd is to take apart for DISC, and what it is to leave whole.

    with resampling_kept_whole():
        aot_autograd(fw_compiler=..., decompositions=decompositions())

The list is short on purpose: an op with a row in the table (ops/) is lowered there, in a form that fuses,
from a graph a fraction of the size, which is also faster to trace and to partition. Here are only ops that
draw random numbers beside what they compute, ops over lists of tensors, and rare ones that are pointwise when
written out.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp import decomposition_table as torchs
from torch._decomp.decompositions import get_scale_value, upsample_compute_output_size

from blade.backends.disc.foreach import FOREACH

aten = torch.ops.aten
Decomposition = Callable[..., Any]


def native_dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    """Only the mask is random, and stays an op by itself; the product fuses with what is around it.

    The mask is drawn as eager draws it, so that the same seed drops the same elements: on a GPU that is one
    kernel with the product, which stays as it is.
    """
    if x.is_cuda:
        return NotImplemented
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = aten.bernoulli.p(torch.empty_like(x, dtype=torch.bool), 1 - p)
    return x * mask * (1 / (1 - p)), mask


DECOMPOSITIONS: Mapping[torch._ops.OpOverload, Decomposition] = {
    aten.native_dropout.default: native_dropout,
    **FOREACH,
    **{
        op: torchs[op]
        for op in (
            # pointwise with a reduction, seldom met
            aten.soft_margin_loss.default,
            aten.soft_margin_loss_backward.default,
            aten.logit_backward.default,
            aten.sgn.default,
            aten.isposinf.default,
            aten.isneginf.default,
            aten.xlogy.Scalar_Other,
            aten.xlogy.Scalar_Self,
            aten.heaviside.default,
            aten.logaddexp2.default,
            # masks and numbers from sizes
            aten.eye.default,
            aten.eye.m,
            aten.fill.Scalar,
            aten.fill.Tensor,
            # a product of columns, and their lengths
            aten._weight_norm_interface.default,
            aten.addr.default,
        )
    },
}
"""ATen overload -> what it is made of."""


def decompositions() -> dict[torch._ops.OpOverload, Decomposition]:
    """``DECOMPOSITIONS``, and what Dynamo makes of scaled sums in an optimizer, if it has made any so far."""
    table = dict(DECOMPOSITIONS)
    if hasattr(torch.ops.prims, "fma"):  # of inductor, on whose import it comes into being
        table[torch.ops.prims.fma.default] = _fma
    return table


def _fma(a: Any, b: Any, c: Any) -> Any:
    return a * b + c


def _upsample_nearest2d(x: Any, output_size: Any, scale_factors: Any) -> Any:
    """The op of given sizes: the one with scales is taken apart into gathers and scattered sums by torch."""
    size = upsample_compute_output_size(x.size(), output_size, scale_factors)
    scales = [get_scale_value(scale_factors, k) for k in range(2)] if scale_factors else [None] * 2
    return aten.upsample_nearest2d.default(x, size, *scales)


@contextmanager
def resampling_kept_whole() -> Iterator[None]:
    """Within, autograd sees `upsample_nearest2d` as one op, whose gradient is one op.

    torch registers its decomposition below any table, in Python: an index for each axis, and in the
    gradient an accumulating `index_put`, from which nobody tells the resampling any more.
    """
    ops = (aten.upsample_nearest2d.vec, aten.upsample_nearest2d.default)
    keys = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
    before = {op: dict(op.py_kernels) for op in ops}
    try:
        for op in ops:
            for key in keys:
                op.py_kernels.pop(key, None)
        for key in keys:
            aten.upsample_nearest2d.vec.py_kernels[key] = _upsample_nearest2d
        _forget(ops)
        yield
    finally:
        for op, kernels in before.items():
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
        _forget(ops)


def _forget(ops: tuple[torch._ops.OpOverload, ...]) -> None:
    for op in ops:
        op._dispatch_cache.clear()
