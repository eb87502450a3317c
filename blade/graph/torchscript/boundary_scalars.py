# SPDX-License-Identifier: Apache-2.0
"""Passes plain numbers across a boundary as 0-d tensors where type promotion is not affected.

``y * n`` with an int known only at run time (a loop counter, an ``item()``, an argument) is
``aten::mul.Scalar``; a cluster takes ``n`` as a 0-d int64 tensor and computes ``aten::mul.Tensor``. A 0-d
tensor promotes like a Python number only beside a tensor that has dimensions and is of the number's
category or a higher one: ``int32[3] * 2.5`` is float32, but times a 0-d float64 tensor it is float64.
A node that uses a number in any other way (sizes, axes) stays outside of clusters.
"""

import torch

from blade.core.cluster import ValueInfo
from blade.graph.torchscript.program import Program

_A = torch.ops.aten

_NAMES = (
    "add sub mul div eq ne lt le gt ge remainder fmod rsub "
    "bitwise_and bitwise_or bitwise_xor masked_fill"
).split()

TENSOR_OVERLOADS: dict[torch._ops.OpOverload, torch._ops.OpOverload] = {
    _A.floor_divide.Scalar: _A.floor_divide.default,
    **{getattr(_A, name).Scalar: getattr(_A, name).Tensor for name in _NAMES},
}
"""Overload with a ``Scalar`` operand -> the overload that takes a tensor under the same name."""

OPERANDS = ("other", "value")
"""Names of that operand."""

_DTYPES = {"IntType": torch.int64, "FloatType": torch.float64, "BoolType": torch.bool}


def number_dtype(program: Program, value: int) -> torch.dtype | None:
    """Dtype of the 0-d tensor for ``value``; ``None`` if it is no int, float or bool."""
    return _DTYPES.get(program.values[value].type().kind())


def tensor_info_of(program: Program, value: int) -> ValueInfo:
    """The ``ValueInfo`` of a number that crosses a boundary."""
    return ValueInfo("tensor", number_dtype(program, value), torch.device("cpu"), 0)


def tensor_form(overload: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The overload that takes a 0-d tensor; ``overload`` must have one."""
    return TENSOR_OVERLOADS[overload]


def promotes_alike(beside: ValueInfo, number: torch.dtype) -> bool:
    """Whether a 0-d tensor of dtype ``number`` beside ``beside`` promotes like the plain number."""
    if beside.dtype is None or not beside.rank:
        return False
    below = _category(number) <= _category(beside.dtype)
    return below or (number is torch.int64 and beside.dtype is torch.bool)


def _category(dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1
