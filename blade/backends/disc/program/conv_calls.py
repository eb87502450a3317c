# SPDX-License-Identifier: Apache-2.0
"""Instructions for channels-last ops without generated code: the ATen op on permuted views.

For [N, C, *spatial] with channels-last strides torch uses its channels-last kernels and returns a result
in the same layout. One spatial axis becomes two, as torch supports the format only from there.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from blade.backends.disc.ir.convolution import (
    CLAMPS,
    operands,
    output_padding,
    to_channels_first,
)
from blade.backends.disc.ir.graph import Shape, Value, contiguous_strides
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.views import StridedView, view_of
from blade.program.dtypes import DTYPES

if TYPE_CHECKING:
    from blade.backends.disc.program.writer import ProgramWriter


def write_conv(writer: "ProgramWriter", value: Value) -> None:
    """aten::convolution, then the residual and the activation in place."""
    given, a = operands(value), value.attrs
    assert "trailing" not in a, value
    flat = len(value.shape) == 3
    extra: list[Dim] = [0] * len(a["stride"])
    if a["transposed"]:
        extra = output_padding(value, value.shape, given.x.shape)
    result = _result(writer, value)
    words = [
        f"t:{_channels_first(writer, given.x)}",
        f"t:{_kernel(writer, given.weight)}",
        "n" if given.bias is None else f"t:{writer.seen(given.bias)}",
        _ints([1] * flat + [*a["stride"]], writer),
        _ints([0] * flat + [*a["padding"]], writer),
        _ints([1] * flat + [*a["dilation"]], writer),
        f"b:{int(a['transposed'])}",
        _ints([0] * flat + [*extra], writer),
        f"i:{a['groups']}",
    ]
    writer.emit([f"call aten::convolution {len(words)} {' '.join(words)} 1 {result}"])
    if given.residual is not None:
        added = _channels_first(writer, given.residual)
        writer.emit([f"call aten::add.out 4 t:{result} t:{added} i:1 t:{result} 0"])
    if a["activation"] is not None:
        low, high = CLAMPS[a["activation"]]
        end = "n" if high is None else f"i:{high}"
        writer.emit([f"call aten::clamp.out 4 t:{result} i:{low} {end} t:{result} 0"])


def write_weight_gradient(writer: "ProgramWriter", value: Value) -> None:
    """The one result of aten::convolution_backward that is wanted."""
    (grad, x, weight), a = value.args, value.attrs
    flat = len(value.shape) == 3
    words = [
        *(f"t:{_channels_first(writer, image)}" for image in (grad, x)),
        f"t:{_kernel(writer, weight)}",
        "n",
        _ints([1] * flat + [*a["stride"]], writer),
        _ints([0] * flat + [*a["padding"]], writer),
        _ints([1] * flat + [*a["dilation"]], writer),
        f"b:{int(a['transposed'])}",
        _ints([0] * flat + [*a["output_padding"]], writer),
        f"i:{a['groups']}",
        "lb:0,1,0",
    ]
    result = _result(writer, value)
    writer.emit([f"call aten::convolution_backward {len(words)} {' '.join(words)} 2 - {result}"])


def write_spatial(writer: "ProgramWriter", value: Value) -> None:
    """The ATen op named by ``value``."""
    tensors = [_channels_first(writer, a) for a in value.args]
    writer.dispatch(value, tensors, [str(_result(writer, value))])


def _ints(values: Sequence[Dim], writer: "ProgramWriter") -> str:
    words = [str(v) if isinstance(v, int) else f"r{writer.registers.of(v)}" for v in values]
    return "li:" + ",".join(words)


def _result(writer: "ProgramWriter", value: Value) -> int:
    """The slot for ATen's result; ``value``'s own slot is a view of it."""
    shape, strides = _permuted(value.shape, contiguous_strides(value.shape))
    sizes = [*writer.numbers(shape), *writer.numbers(strides)]
    result = writer.add_slot(f"dyn {DTYPES[value.dtype]} {len(shape)} {' '.join(sizes)}")
    own = [*writer.numbers(value.shape), *writer.numbers(contiguous_strides(value.shape))]
    zero = writer.registers.of(0)
    text = f"view {result} {len(value.shape)} {' '.join(own)} {zero}"
    writer.slot_of[value.id] = writer.add_slot(text)
    return result


def _channels_first(writer: "ProgramWriter", value: Value) -> int:
    """``value``, stored row-major as [N, *spatial, C], as a view [N, C, *spatial]."""
    view = view_of(value)
    assert view is not None, value
    shape, strides = _permuted(value.shape, view.strides)
    return writer.view(StridedView(view.base, strides, view.offset), shape)


def _permuted(shape: Shape, strides: Shape) -> tuple[Shape, Shape]:
    if len(shape) == 3:  # [N, L, C] -> [N, 1, L, C]
        shape = (shape[0], 1, *shape[1:])
        strides = (strides[0], strides[0], *strides[1:])
    order = to_channels_first(len(shape))
    return tuple(shape[k] for k in order), tuple(strides[k] for k in order)


def _kernel(writer: "ProgramWriter", weight: Value) -> int:
    view = view_of(weight)
    assert view is not None, weight
    if len(weight.shape) != 3:
        return writer.seen(weight)
    (out, depth, size), (a, b, c) = weight.shape, view.strides
    high = size * c  # as of a kernel that lies so: oneDNN and cuDNN read the order of axes from it
    return writer.view(StridedView(view.base, (a, b, high, c), view.offset), (out, depth, 1, size))
