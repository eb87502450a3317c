# SPDX-License-Identifier: Apache-2.0
"""Ops on complex numbers: no kernel computes with them, so they are calls of torch's ops in the program.

    %2 c64[s0, 9] = call %1 {target=aten.fft_rfft}      %3 = call %2 %w {target=aten.mul.Tensor}

Views of complex tensors stay views; what splits one into two real numbers copies them.
"""

from dataclasses import replace
from typing import Any

import torch

from blade.backends.disc.frontend.ops.table import Lowering, ResultType, lowers
from blade.backends.disc.ir.graph import Value, contiguous_strides

aten = torch.ops.aten

VIEWS = frozenset(
    "_unsafe_view alias broadcast_to chunk clone contiguous detach expand expand_as flatten hsplit lift_fresh "
    "lift_fresh_copy movedim moveaxis narrow numpy_T permute ravel reshape reshape_as select slice split "
    "split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unsqueeze view view_as "
    "view_copy vsplit".split()
)
"""Names of ops whose rows make nothing but views of complex operands."""


def is_complex(*values: Any) -> bool:
    """Whether a value, a result's type, or a list of them among ``values`` is complex."""
    return any(
        is_complex(*v)
        if isinstance(v, (list, tuple))
        else isinstance(v, Value | ResultType) and v.dtype.is_complex
        for v in values
    )


def has_views_only(target: torch._ops.OpOverload) -> bool:
    """Whether the row of ``target`` may serve complex operands."""
    return target.overloadpacket.__name__ in (*VIEWS, *_ROWS)


@lowers(aten.view_as_real.default)
def view_as_real(lo: Lowering, x: Value) -> Value:
    made: Value = lo.call(aten.view_as_real_copy.default, [x])
    return made


@lowers(aten.view_as_complex.default)
def view_as_complex(lo: Lowering, x: Value) -> Value:
    made: Value = lo.call(aten.view_as_complex_copy.default, [x])
    return made


@lowers(aten.real.default)
def real(lo: Lowering, x: Value) -> Value:
    return _part(lo, x, 0) if x.dtype.is_complex else x


@lowers(aten.imag.default)
def imag(lo: Lowering, x: Value) -> Value:
    return _part(lo, x, 1)


def _part(lo: Lowering, x: Value, index: int) -> Value:
    shape = (*x.shape, 2)
    pairs = replace(lo, results=(ResultType(shape, lo.dtype, contiguous_strides(shape)),))
    whole = view_as_real(pairs, x)
    return lo.b.reshape(lo.b.slice(whole, len(x.shape), index, 1, 1), x.shape)


@lowers(aten._conj.default, aten.conj.default)
def conj(lo: Lowering, x: Value) -> Value:
    if not x.dtype.is_complex:  # of a real tensor it is that tensor
        return x
    made: Value = lo.call(aten.conj_physical.default, [x])
    return made


@lowers(aten.resolve_conj.default, aten.resolve_neg.default)
def resolved(lo: Lowering, x: Value) -> Value:
    return x


_ROWS = (
    "view_as_real",
    "view_as_complex",
    "real",
    "imag",
    "_conj",
    "conj",
    "resolve_conj",
    "resolve_neg",
)
