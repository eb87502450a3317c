# SPDX-License-Identifier: Apache-2.0
"""Symbolic sizes, and the fake tensors that have them, for writing graphs.

    env = UnspecializedShapeEnv()
    mode = UnspecializedFakeMode(env)
    with mode: aten.convolution.default(x, ...)     # env.guards: channels match, the kernel fits; no library's choice

To find the strides of a convolution's result, torch's shape function asks which library would compute it
(NNPACK is for batches below 16, oneDNN for inputs above 20480 elements). Sizes and values do not depend on
it, so these questions are answered for the sample and leave no guard, range or equality. Questions about
the sizes themselves are asked first and stay.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.symbol import SymT, symbol_is_type

aten = torch.ops.aten


class UnspecializedShapeEnv(ShapeEnv):
    """Every size is a symbol, 0 and 1 included, and sizes that are equal in the sample stay different.

    A guard names the function of torch that asked. torch finds it by importing its exporter and Inductor,
    which takes half a second; here a list of files is skipped instead.
    """

    def __init__(self) -> None:
        super().__init__(specialize_zero_one=False, duck_shape=False)

    def _get_user_frame(self) -> FrameType | None:
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename in _plumbing():
            frame = frame.f_back
        return frame


@functools.cache
def _plumbing() -> frozenset[str]:
    root = os.path.dirname(torch.__file__)
    return frozenset({__file__, *(os.path.join(root, *name.split("/")) for name in _PLUMBING)})


_PLUMBING = (
    "__init__.py",
    "_compile.py",
    "_dynamo/eval_frame.py",
    "_library/custom_ops.py",
    "_library/fake_impl.py",
    "_logging/_internal.py",
    "_logging/structured.py",
    "_subclasses/fake_tensor.py",
    "_subclasses/meta_utils.py",
    "fx/_symbolic_trace.py",
    "fx/experimental/recording.py",
    "fx/experimental/sym_node.py",
    "fx/experimental/symbolic_shapes.py",
    "fx/interpreter.py",
)


class UnspecializedFakeMode(FakeTensorMode):
    """Fake tensors over ``UnspecializedShapeEnv``."""

    def __init__(self, sizes: ShapeEnv) -> None:
        super().__init__(shape_env=sizes)

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _CHOOSE_A_LIBRARY or self.shape_env is None:
            return super().dispatch(func, types, args, kwargs or {})
        if func in _CHECK_SIZES:
            with in_kernel_invocation_manager(self):  # only the shape function
                func(*args, **(kwargs or {}))
        with self.shape_env.suppress_guards():
            return super().dispatch(func, types, args, kwargs or {})


_CHECK_SIZES = frozenset({aten.convolution.default})
_CHOOSE_A_LIBRARY = frozenset(
    {
        *_CHECK_SIZES,
        aten.convolution_backward.default,  # results have the sizes of the differentiated tensors
    }
)


def is_late(symbol: Any) -> bool:
    """Whether ``symbol`` is a size that depends on elements, which no input has: torch's unbacked symbols."""
    return isinstance(symbol, sympy.Symbol) and symbol_is_type(symbol, SymT.UNBACKED_INT)


def is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
