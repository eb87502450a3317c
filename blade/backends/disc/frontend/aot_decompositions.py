# SPDX-License-Identifier: Apache-2.0
"""Decompositions that AOTAutograd applies for DISC, and ops that autograd sees in another form.

    with known_gradients():
        aot_autograd(fw_compiler=..., decompositions=decompositions())

The list is short on purpose: ops with a row in the table (ops/) are lowered there, in a form that fuses,
and the graph stays small, which makes tracing and partitioning faster. Listed here are only ops that draw
random numbers besides computing, ops over lists of tensors, and rare ops that decompose into pointwise ops.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp import decomposition_table as torchs
from torch._decomp.decompositions import get_scale_value, upsample_compute_output_size
from torch._prims_common import suggest_memory_format

from blade.backends.disc.frontend.foreach import FOREACH
from blade.graph.shapes.shape_functions import has_wide_statistics

aten = torch.ops.aten
Decomposition = Callable[..., Any]


def native_dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    """Split dropout into a random mask, which stays an op, and a product, which fuses.

    The mask is drawn as in eager mode, so the same seed drops the same elements. On a GPU eager draws and
    multiplies in one kernel, so there the op stays whole.
    """
    if x.is_cuda:
        return NotImplemented
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = aten.bernoulli.p(torch.empty_like(x, dtype=torch.bool), 1 - p)
    return x * mask * (1 / (1 - p)), mask


def _of_wider(op: torch._ops.OpOverload, wide: int, *parameters: int) -> Decomposition:
    """``op``, a norm of 16-bit values or its gradient, with operands in float32 where its statistics are.

    torch's shape functions say that these have 16 bits. ``wide``: how many operands, the last of which is the values;
    ``parameters``: positions of weight and bias.
    """

    def decomposed(*args: Any) -> Any:
        x = args[wide - 1]
        if not has_wide_statistics(x, *(args[k] for k in parameters)):
            return NotImplemented
        made, *others = op(*(a.float() for a in args[:wide]), *args[wide:])
        return (None if made is None else made.to(x.dtype), *others)

    return decomposed


_NORMS = (
    (aten._native_batch_norm_legit_no_training.default, 1, 1, 2),
    (aten.native_layer_norm.default, 1, 2, 3),
    (aten.native_layer_norm_backward.default, 2, 5, 6),
    (aten.native_group_norm.default, 1, 1, 2),
    (aten.native_group_norm_backward.default, 2, 4),
)

DECOMPOSITIONS: Mapping[torch._ops.OpOverload, Decomposition] = {
    aten.native_dropout.default: native_dropout,
    **{op: _of_wider(op, *places) for op, *places in _NORMS},
    **FOREACH,
    **{
        op: torchs[op]
        for op in (
            # a mask, which takes half as much to save as what it is of, or less
            aten.threshold_backward.default,
            # rare: pointwise with a reduction
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
            # masks and constants from sizes
            aten.eye.default,
            aten.eye.m,
            aten.fill.Scalar,
            aten.fill.Tensor,
            # outer products, and norms of columns
            aten._weight_norm_interface.default,
            aten.addr.default,
        )
    },
}
"""ATen overload -> its decomposition."""


def decompositions() -> dict[torch._ops.OpOverload, Decomposition]:
    """``DECOMPOSITIONS``, and one for Inductor's ``prims.fma`` (scaled sums in optimizers) if it is
    loaded.
    """
    table = dict(DECOMPOSITIONS)
    if hasattr(torch.ops.prims, "fma"):  # defined when Inductor is imported
        table[torch.ops.prims.fma.default] = _fma
    return table


def _fma(a: Any, b: Any, c: Any) -> Any:
    return a * b + c


def _upsample_nearest2d(x: Any, output_size: Any, scale_factors: Any) -> Any:
    """The overload with given sizes; torch decomposes the one with scales into gathers and scattered sums."""
    size, scales = _size_and_scales(x, output_size, scale_factors)
    return aten.upsample_nearest2d.default(x, size, *scales)


def _upsample_bilinear2d(x: Any, output_size: Any, corners: bool, scale_factors: Any) -> Any:
    """The overload with given sizes, whose gradient is one op, as of ``_upsample_nearest2d``."""
    size, scales = _size_and_scales(x, output_size, scale_factors)
    return aten.upsample_bilinear2d.default(x, size, corners, *scales)


def _size_and_scales(x: Any, output_size: Any, scale_factors: Any) -> tuple[Any, list[Any]]:
    """The size of the resampled image, and the scale of each axis, ``None`` if there are none."""
    size = upsample_compute_output_size(x.size(), output_size, scale_factors)
    scales = [get_scale_value(scale_factors, k) for k in range(2)] if scale_factors else [None] * 2
    return size, scales


def _adaptive_avg_pool2d(x: Any, output_size: Any) -> Any:
    """Pooling to one pixel as a mean; torch's `as_strided` behind it, for axes of size 1, has a gradient by memory."""
    if all(size == 1 for size in output_size):
        return x.mean((-2, -1), keepdim=True)
    return aten._adaptive_avg_pool2d.default(x, output_size)


_SEEN_BY_AUTOGRAD: Mapping[torch._ops.OpOverload, Callable[..., Any] | None] = {
    aten.upsample_nearest2d.vec: _upsample_nearest2d,
    aten.upsample_nearest2d.default: None,
    aten.upsample_bilinear2d.vec: _upsample_bilinear2d,
    aten.upsample_bilinear2d.default: None,
    aten.adaptive_avg_pool2d.default: _adaptive_avg_pool2d,
}
"""Op -> the Python function that autograd sees instead, or ``None`` for the op itself."""


def _upsample_bilinear2d_backward(
    grad: Any, output_size: Any, input_size: Any, corners: bool, *_: float | None
) -> Any:
    shape = grad.new_empty(input_size)
    return shape.contiguous(memory_format=suggest_memory_format(grad))


_SHAPES: Mapping[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.upsample_bilinear2d_backward.default: _upsample_bilinear2d_backward,
}
"""Op -> its result's shape and layout; torch's own takes no symbolic sizes."""


@contextmanager
def known_gradients() -> Iterator[None]:
    """A context in which autograd sees ops as functions whose gradients DISC knows.

    torch registers decompositions of some in Python, below any table: `upsample_nearest2d` as an index per axis, with
    an accumulating `index_put` as its gradient, which is no longer recognizable as resampling.
    """
    keys = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
    before = {op: dict(op.py_kernels) for op in (*_SEEN_BY_AUTOGRAD, *_SHAPES)}
    try:
        for op, seen in _SEEN_BY_AUTOGRAD.items():
            for key in keys:
                op.py_kernels.pop(key, None)
                if seen is not None:
                    op.py_kernels[key] = seen
        for op, shape in _SHAPES.items():
            op.py_kernels[DispatchKey.Meta] = shape
        _forget(before)
        yield
    finally:
        for op, kernels in before.items():
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
        _forget(before)


def _forget(ops: Iterable[torch._ops.OpOverload]) -> None:
    for op in ops:
        op._dispatch_cache.clear()
