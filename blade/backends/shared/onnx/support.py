# SPDX-License-Identifier: Apache-2.0
"""Nodes that ONNX expresses with torch's own values: a table of tested ops.

    why_not_onnx(node, "onnxruntime", (torch.float32, ...))     # None, or the Reason

The answer needs no import or export. An op is in the table if torch's exporter (with ``exporter.reduce``)
translates it and its op sample passed verification in a library, with NaN, infinities, tiny numbers and sizes
of 1 among the inputs. Excluded are, for instance, maxima and pooling, which ignore NaN in ONNX, and functions
that lose precision near 0.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from blade.backends.shared.onnx.arguments import ARGUMENTS
from blade.core.cluster import OpNode, ValueInfo
from blade.core.reason import Code, Reason, Stage

OPS = frozenset(
    """
    __and__.Tensor __or__.Tensor __xor__.Tensor _convolution.default _convolution.deprecated _log_softmax.default
    _native_batch_norm_legit_no_training.default _safe_softmax.default _softmax.default _unsafe_view.default
    _upsample_nearest_exact2d.vec abs.default acos.default acosh.default adaptive_avg_pool1d.default
    adaptive_avg_pool2d.default add.Scalar add.Tensor addcdiv.default addcmul.default addmm.default addmv.default
    addr.default alias.default all.default all.dim all.dims any.default any.dim any.dims arange.default asin.default
    asinh.default atan.default atanh.default atleast_1d.default atleast_2d.default atleast_3d.default
    avg_pool2d.default batch_norm.default bilinear.default binary_cross_entropy.default
    binary_cross_entropy_with_logits.default bitwise_and.Scalar bitwise_and.Tensor bitwise_left_shift.Tensor
    bitwise_not.default bitwise_or.Tensor bitwise_right_shift.Scalar_Tensor bitwise_right_shift.Tensor_Scalar
    bitwise_xor.Tensor bmm.default broadcast_tensors.default bucketize.Tensor cat.default ceil.default
    channel_shuffle.default chunk.default clamp.Tensor clamp_max.Tensor clamp_min.Tensor clone.default
    col2im.default contiguous.default conv1d.default conv2d.default cos.default cosh.default count_nonzero.default
    cross.default cross_entropy_loss.default deg2rad.default detach.default diff.default div.Scalar div.Tensor
    dot.default dropout.default einsum.default embedding.default eq.Scalar eq.Tensor erf.default erfc.default
    exp.default exp2.default expand.default flatten.using_ints flip.default fliplr.default flipud.default
    floor.default fmod.Scalar fmod.Tensor frac.default full.default gather.default ge.Scalar ge.Tensor gelu.default
    glu.default group_norm.default gt.Scalar gt.Tensor hardshrink.default hardsigmoid.default hardswish.default
    hardtanh.default hstack.default huber_loss.default im2col.default index.Tensor index_add.default
    index_put.default index_select.default instance_norm.default isinf.default isnan.default kl_div.default
    l1_loss.default layer_norm.default le.Scalar le.Tensor leaky_relu.default lerp.Scalar lerp.Tensor
    lift_fresh.default linear.default log.default log10.default log2.default log_softmax.int logical_and.default
    logical_not.default logical_or.default logical_xor.default lt.Scalar lt.Tensor mT.default masked_fill.Scalar
    masked_fill.Tensor matmul.default max.other maximum.default mean.default mean.dim min.other minimum.default
    mish.default mm.default mse_loss.default mul.Scalar mul.Tensor mv.default nan_to_num.default
    native_layer_norm.default ne.Scalar ne.Tensor neg.default new_full.default new_ones.default new_zeros.default
    nll_loss_nd.default numpy_T.default ones.default ones_like.default outer.default pad.default permute.default
    pixel_shuffle.default pixel_unshuffle.default poisson_nll_loss.default positive.default pow.Tensor_Scalar
    pow.Tensor_Tensor prelu.default prod.default prod.dim_int rad2deg.default reciprocal.default
    reflection_pad2d.default relu.default relu6.default remainder.Scalar remainder.Scalar_Tensor repeat.default
    repeat_interleave.self_int replication_pad2d.default reshape.default roll.default rot90.default round.decimals
    round.default rsqrt.default rsub.Scalar scaled_dot_product_attention.default scatter.src scatter.value
    scatter_add.default select.int select_scatter.default sigmoid.default silu.default sin.default sinc.default
    sinh.default slice.Tensor slice_scatter.default smooth_l1_loss.default soft_margin_loss.default softmax.int
    softplus.default softshrink.default sqrt.default square.default squeeze.dim stack.default sub.Scalar sub.Tensor
    sum.default sum.dim_IntList t.default tan.default tanh.default threshold.default tile.default to.device to.dtype
    to.dtype_layout to.other transpose.int trapezoid.dx tril.default triu.default trunc.default type_as.default
    unfold.default unsqueeze.default upsample_nearest2d.vec view.default view_copy.default vstack.default
    where.Scalar where.ScalarOther where.ScalarSelf where.self xlogy.Tensor zeros.default zeros_like.default
    """.split()
)
"""Overloads of ``aten``."""


def why_not_onnx(
    node: OpNode,
    backend: str,
    dtypes: Sequence[torch.dtype],
    is_served: Callable[[torch.device], bool] = lambda device: device.type == "cpu",
) -> Reason | None:
    """``None`` if ``node`` can be exported, and all its tensors have one of ``dtypes`` and a device that
    ``is_served`` accepts."""

    def no(code: Code, why: str) -> Reason:
        detail = f"{node.target} stays TorchScript: {why}."
        return Reason(Stage.SUPPORT, code, backend, node.name, detail)

    for value in tensors((*node.args, *node.kwargs.values(), *node.outputs)):
        if value.dtype is None or value.rank is None or value.device is None:
            return no(Code.UNKNOWN_TYPE, "a tensor of it has no known dtype or rank")
        if value.dtype not in dtypes:
            return no(Code.UNSUPPORTED_DTYPE, f"{backend} is given no {value.dtype}")
        if not is_served(value.device):
            return no(Code.UNSUPPORTED_DEVICE, f"{backend} is not used on {value.device} here")
    name = str(node.target)
    if not name.startswith("aten.") or name.removeprefix("aten.") not in OPS:
        return no(Code.UNSUPPORTED_OP, "no translation of it to ONNX is known to keep its values")
    check = ARGUMENTS.get(name.removeprefix("aten."))
    if check is not None and (why := check(node)) is not None:
        return no(Code.UNSUPPORTED_OP, why)
    return None


def tensors(values: Sequence[Any]) -> Iterator[ValueInfo]:
    """The tensors among ``values`` and inside its lists."""
    for value in values:
        if isinstance(value, ValueInfo):
            if value.kind == "tensor":
                yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)
