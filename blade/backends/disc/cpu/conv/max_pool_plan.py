# SPDX-License-Identifier: Apache-2.0
"""The call for max pooling of images as generated code.

pool_call(value, target) -> (NativeCall, code) | None        None: ATen computes it
"""

import sympy
import torch

from blade.backends.disc.cpu.conv import max_pool as pool
from blade.backends.disc.cpu.conv.depthwise import RUN, DepthwiseTaps
from blade.backends.disc.ir.graph import Value, plain
from blade.backends.disc.program.instructions import NativeCall
from blade.backends.disc.target.cpu import CpuTarget

_DTYPES = (torch.float32, torch.bfloat16)
_WIDEST = 7  # widest window along w for which code is generated


def pool_call(
    value: Value, target: CpuTarget
) -> tuple[NativeCall, tuple[tuple[str, str], ...]] | None:
    """The call for ``value``, a `spatial` op of the IR, if it is a maximum over windows."""
    if value.attrs["target"] is not torch.ops.aten.max_pool2d.default:
        return None
    x, channels = value.args[0], value.shape[-1]
    _, kernel, stride, padding, dilation, *_ = value.attrs["template"]
    kernel, padding, dilation = (_both(v) for v in (kernel, padding, dilation))
    stride = _both(stride) or kernel
    numbers = (*kernel, *stride, *padding, *dilation, channels)
    if value.dtype not in _DTYPES or not all(isinstance(n, int) for n in numbers):
        return None
    if dilation != (1, 1) or kernel[1] > _WIDEST:
        return None
    taps = DepthwiseTaps(kernel[1], stride[1], 1)
    run = RUN * target.lanes
    images, height, width, _ = value.shape
    call = NativeCall(
        pool.name(taps, value.dtype),
        plain(sympy.sympify(images) * height * -(-channels // run)),
        plain(sympy.sympify(width) * kernel[0] * kernel[1] * min(channels, run)),
        0,
        (x, value),
        (channels, *x.shape[1:3], height, width, kernel[0], stride[0], *padding),
    )
    return call, ((pool.name(taps, value.dtype), pool.pool_text(taps, value.dtype, target)),)


def _both(given: object) -> tuple[int, ...]:
    """One value per axis; a single number holds for both."""
    values = tuple(given) if isinstance(given, (list, tuple)) else (given, given)
    return values * 2 if len(values) == 1 else values
