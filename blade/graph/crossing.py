# SPDX-License-Identifier: Apache-2.0
"""Plain numbers that cross a boundary: as 0-d tensors, where nobody can tell the difference.

``y * n`` with an int that only the run knows (a loop counter, an ``item()``, an argument) is
``aten::mul.Scalar``; a cluster takes ``n`` as a 0-d int64 tensor and computes ``aten::mul.Tensor``. A 0-d
tensor promotes like a Python number only beside a tensor that has dimensions and is of the number's
category or a higher one: ``int32[3] * 2.5`` is float32, but times a 0-d float64 tensor it is float64.
Numbers that are anything else than such an operand (sizes, axes) keep their node outside.
"""

import torch

from blade.backends.base import ValueInfo
from blade.graph.program import Program

_A = torch.ops.aten

_NAMES = (
    "add sub mul div eq ne lt le gt ge remainder fmod rsub "
    "bitwise_and bitwise_or bitwise_xor masked_fill"
).split()

FORMS: dict[torch._ops.OpOverload, torch._ops.OpOverload] = {
    _A.floor_divide.Scalar: _A.floor_divide.default,
    **{getattr(_A, name).Scalar: getattr(_A, name).Tensor for name in _NAMES},
}
"""Overload with a ``Scalar`` operand -> the one that takes a tensor for it, under the same name."""

OPERANDS = ("other", "value")
"""What that operand is called."""

_DTYPES = {"IntType": torch.int64, "FloatType": torch.float64, "BoolType": torch.bool}


def number_dtype(program: Program, value: int) -> torch.dtype | None:
    """Dtype of the 0-d tensor that stands for ``value``; ``None`` if it is no int, float or bool."""
    return _DTYPES.get(program.values[value].type().kind())


def as_tensor(program: Program, value: int) -> ValueInfo:
    """What a backend is told of a number that crosses."""
    return ValueInfo("tensor", number_dtype(program, value), torch.device("cpu"), 0)


def tensor_form(overload: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The overload that takes the 0-d tensor; ``overload`` must have one."""
    return FORMS[overload]


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
