# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of op samples: what training adds, as AOTAutograd has it.

Losses, normalization by the batch's statistics, gradients, and functional writes into a part of a tensor.
These ops are for graphs that autograd made: TorchScript's tracer has no form for some of their arguments,
and some do not check the sizes that they are given.
"""

import torch
from op_samples import FLOATS, HALVES, TABLE, f32, index, mask, row, spec

aten = torch.ops.aten
_BEFORE = len(TABLE)

# Gradients of activations: of two tensors of one shape, in every dtype

_ACTIVATIONS = {
    "threshold_backward": lambda g, x: aten.threshold_backward(g, x, 0),
    "hardtanh_backward": lambda g, x: aten.hardtanh_backward(g, x, -1, 1.5),
    "leaky_relu_backward": lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False),
    "sigmoid_backward": lambda g, x: aten.sigmoid_backward(g, x),
    "tanh_backward": lambda g, x: aten.tanh_backward(g, x),
    "hardsigmoid_backward": lambda g, x: aten.hardsigmoid_backward(g, x * 2),
    "hardswish_backward": lambda g, x: aten.hardswish_backward(g, x * 2),
    "softplus_backward": lambda g, x: aten.softplus_backward(g, x * 3, 2, 5),
    "elu_backward": lambda g, x: aten.elu_backward(g, 1.5, 1.25, 0.5, False, x),
    "elu_backward of results": lambda g, x: aten.elu_backward(g, 1.5, 1.25, 0.5, True, x),
    "silu_backward": lambda g, x: aten.silu_backward(g, x),
    "gelu_backward": lambda g, x: aten.gelu_backward(g, x),
    "gelu_backward tanh": lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
    "mish_backward": lambda g, x: aten.mish_backward(g, x),
    "log_sigmoid_backward": lambda g, x: aten.log_sigmoid_backward(g, x, (-x.abs()).exp()),
}
for _name, _op in _ACTIVATIONS.items():
    row(
        _name,
        lambda *xs, op=_op: [op(g, x) for g, x in zip(xs[::2], xs[1::2], strict=True)],
        *[s for d in FLOATS[:3] for s in (spec("a b", d), spec("a b", d))],
    )
row(
    "gelu_backward of a wide range",
    lambda g, x: aten.gelu_backward(g, x * 8),
    f32("a b"),
    f32("a b"),
)
row(
    "activation of a broadcast gradient",
    lambda g, x: aten.tanh_backward(g.expand_as(x), x),
    f32("a 1"),
    f32("a b"),
)
row("log_sigmoid_forward", lambda x: aten.log_sigmoid_forward(x), f32("a b", -9, 9))
row(
    "prelu_backward",
    lambda g, x, w: aten._prelu_kernel_backward(g, x, w),
    f32("a b"),
    f32("a b"),
    f32("a b"),
)
row(
    "prelu kernel",
    lambda x, w: aten._prelu_kernel(x, w.reshape(1, -1, 1)),
    f32("a b c"),
    f32("b"),
)
row("glu_backward", lambda g, x: aten.glu_backward(g, x, 1), f32("a 4 b"), f32("a 8 b"))
row(
    "dropout_backward",
    lambda g, m: aten.native_dropout_backward(g, m, 1.25),
    f32("a b"),
    mask("a b"),
)

# Softmax

row(
    "softmax_backward",
    lambda g, x: (
        aten._softmax_backward_data(g, x.softmax(-1), -1, x.dtype),
        aten._softmax_backward_data(g, x.softmax(0), 0, x.dtype),
        aten._softmax_backward_data(g, x.softmax(1), 1, x.dtype),
    ),
    f32("a b c"),
    f32("a b c"),
)
row(
    "softmax_backward of halves",
    lambda g, x: aten._softmax_backward_data(g, x, -1, x.dtype),
    spec("a b", torch.bfloat16),
    spec("a b", torch.bfloat16, 0, 1),
)
row(
    "log_softmax_backward",
    lambda g, x: (
        aten._log_softmax_backward_data(g, x.log_softmax(-1), -1, x.dtype),
        aten._log_softmax_backward_data(g, x.log_softmax(1), 1, x.dtype),
    ),
    f32("a b c"),
    f32("a b c"),
)

# Normalization


def _layer_norm(x: torch.Tensor, axes: int) -> tuple[torch.Tensor, torch.Tensor]:
    over = list(range(x.dim() - axes, x.dim()))
    mean = x.mean(over, True)
    return mean, torch.rsqrt((x - mean).square().mean(over, True) + 1e-5)


row(
    "native_layer_norm_backward",
    lambda g, x, w, b: aten.native_layer_norm_backward(
        g, x, [24], *_layer_norm(x, 1), w, b, [True, True, True]
    ),
    f32("a b 24"),
    f32("a b 24"),
    f32("24"),
    f32("24"),
)
row(
    "native_layer_norm_backward dynamic",
    lambda g, x, w, b: aten.native_layer_norm_backward(
        g, x, list(x.shape[1:]), *_layer_norm(x, 2), w, b, [True, True, True]
    ),
    f32("a b c"),
    f32("a b c"),
    f32("b c"),
    f32("b c"),
    # of one element, whose variance is 0: g * w without its mean, over the root of eps
    fused=lambda g, x, w, b: (
        (w.numel() == 1) * torch.finfo(g.dtype).eps / 2 * (g * w).abs().amax() / 1e-5**0.5
    ),
)
row(
    "native_layer_norm_backward in part",
    lambda g, x, w: (
        aten.native_layer_norm_backward(
            g, x, [24], *_layer_norm(x, 1), w, None, [False, True, False]
        )[1],
        aten.native_layer_norm_backward(
            g, x, [24], *_layer_norm(x, 1), None, None, [True, False, False]
        )[0],
    ),
    f32("a b 24"),
    f32("a b 24"),
    f32("24"),
)
row(
    "native_group_norm",
    lambda x, w, b: aten.native_group_norm(
        x, w, b, x.shape[0], 6, x.shape[2] * x.shape[3], 3, 1e-5
    ),
    f32("a 6 c d"),
    f32("6"),
    f32("6"),
    refuses=0,
)
row(
    "native_group_norm_backward",
    lambda g, x, w: aten.native_group_norm_backward(
        g,
        x,
        x.reshape(x.shape[0], 3, 2 * x.shape[2] * x.shape[3]).mean(-1),
        (x.reshape(x.shape[0], 3, 2 * x.shape[2] * x.shape[3]).square().mean(-1) + 1e-5).rsqrt(),
        *(w, x.shape[0], 6, x.shape[2] * x.shape[3], 3, [True, True, True]),
    ),
    f32("a 6 c d"),
    f32("a 6 c d"),
    f32("6"),
    refuses=0,
)


def _filled(x: torch.Tensor) -> torch.Tensor:
    """``x``, if it has elements: without any, some of torch's code ends the process."""
    if x.numel() == 0:
        raise ValueError("no elements")
    return x


row(
    "batch_norm training",
    lambda x, w, b, m, v: aten._native_batch_norm_legit_functional(x, w, b, m, v, True, 0.1, 1e-5),
    f32("a 6 c d", -1, 3),
    f32("6"),
    f32("6"),
    f32("6", 0.5, 2),
    f32("6", 0.5, 2),
)
row(
    "batch_norm training of rows",
    lambda x, w, b, m, v: aten._batch_norm_with_update_functional(x, w, b, m, v, 0.1, 1e-5),
    f32("a 6", -1, 3),
    f32("6"),
    f32("6"),
    f32("6", 0.5, 2),
    f32("6", 0.5, 2),
)
row(
    "batch_norm by running statistics",
    lambda x, w, b, m, v: aten._native_batch_norm_legit_functional(x, w, b, m, v, False, 0.1, 1e-5),
    f32("a 6 c"),
    f32("6"),
    f32("6"),
    f32("6", 0.5, 2),
    f32("6", 0.5, 2),
)
row(
    "batch_norm without running statistics",
    lambda x, w, b: aten._native_batch_norm_legit.no_stats(_filled(x), w, b, True, 0.1, 1e-5),
    f32("a b c", -1, 3),
    f32("b"),
    f32("b"),
)


def _channels(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    over = [0, *range(2, x.dim())]
    mean = x.mean(over, True)
    return mean.flatten(), torch.rsqrt((x - mean).square().mean(over) + 1e-5)


row(
    "native_batch_norm_backward",
    lambda g, x, w: aten.native_batch_norm_backward(
        g, _filled(x), w, None, None, *_channels(x), True, 1e-5, [True, True, True]
    ),
    f32("a 6 c d"),
    f32("a 6 c d"),
    f32("6"),
)
row(
    "native_batch_norm_backward by running statistics",
    lambda g, x, w, m, v: aten.native_batch_norm_backward(
        g, _filled(x), w, m, v, None, None, False, 1e-5, [True, True, True]
    ),
    f32("a 6 c"),
    f32("a 6 c"),
    f32("6"),
    f32("6", 0.5, 2),
    f32("6", 0.5, 2),
)
row(
    "batch_norm_backward",
    lambda g, x, w, m, v: aten.batch_norm_backward(
        g, _filled(x), w, m, v, *_channels(x), True, 1e-5, [True, True, True], x.new_zeros(0).byte()
    ),
    f32("a 6 c"),
    f32("a 6 c"),
    f32("6"),
    f32("6", 0.5, 2),
    f32("6", 0.5, 2),
)

# Losses

for _reduction, _name in enumerate(("none", "mean", "sum")):
    row(
        f"mse_loss {_name}",
        lambda x, y, r=_reduction: (
            aten.mse_loss(x, y, r),
            aten.mse_loss_backward(x if r == 0 else x.sum() * 0.1, x, y, r),
        ),
        f32("a b"),
        f32("a b"),
    )
    row(
        f"smooth_l1_loss {_name}",
        lambda x, y, r=_reduction: (
            aten.smooth_l1_loss(x, y, r, 0.5),
            aten.smooth_l1_loss_backward(x if r == 0 else x.sum() * 0.1, x, y, r, 0.5),
        ),
        f32("a b"),
        f32("a b"),
    )
    row(
        f"huber_loss {_name}",
        lambda x, y, r=_reduction: (
            aten.huber_loss(x, y, r, 0.5),
            aten.huber_loss_backward(x if r == 0 else x.sum() * 0.1, x, y, r, 0.5),
        ),
        f32("a b"),
        f32("a b"),
    )
    row(
        f"binary_cross_entropy {_name}",
        lambda x, y, w, r=_reduction: (
            aten.binary_cross_entropy(x, y, w, r),
            aten.binary_cross_entropy(x, y, None, r),
            aten.binary_cross_entropy_backward(x if r == 0 else x.sum() * 0.1, x, y, w, r),
        ),
        f32("a b", 0.1, 0.9),
        f32("a b", 0.1, 0.9),
        f32("a b", 0.5, 2),
    )
    row(
        f"binary_cross_entropy_with_logits {_name}",
        lambda x, y, w, p, r=_reduction: (
            aten.binary_cross_entropy_with_logits(x, y, w, p, r),
            aten.binary_cross_entropy_with_logits(x, y, None, None, r),
        ),
        f32("a b", -9, 9),
        f32("a b", 0.1, 0.9),
        f32("a b", 0.5, 2),
        f32("b", 0.5, 2),
    )
    row(
        f"nll_loss {_name}",
        lambda x, t, w, r=_reduction: (
            *aten.nll_loss_forward(x, t, None, r, -100),
            *aten.nll_loss_forward(x, t, w, r, 2),
        ),
        f32("a 7", -5, -0.1),
        index("a", 7),
        f32("7", 0.5, 2),
        called=True,
    )
    row(
        f"nll_loss_backward {_name}",
        lambda x, t, w, c, r=_reduction: (
            aten.nll_loss_backward(x[:, 0] if r == 0 else c, x, t, None, r, -100, c),
            aten.nll_loss_backward(x[:, 0] if r == 0 else c, x, t, w, r, 2, c),
        ),
        f32("a 7"),
        index("a", 7),
        f32("7", 0.5, 2),
        f32("", 3, 9),
    )
row(
    "nll_loss2d",
    lambda x, t, w: aten.nll_loss2d_forward(x, t, w, 1, 2),
    f32("a 7 c d", -5, -0.1),
    index("a c d", 7),
    f32("7", 0.5, 2),
    called=True,
)
row(
    "nll_loss2d_backward",
    lambda x, t, w, c: aten.nll_loss2d_backward(c, x, t, w, 1, 2, c),
    f32("a 7 c d"),
    index("a c d", 7),
    f32("7", 0.5, 2),
    f32("", 3, 9),
)
row(
    "cross entropy and its gradient",
    lambda x, t, c: aten._log_softmax_backward_data(
        aten.nll_loss_backward(c, x, t, None, 1, -100, c), x.log_softmax(1), 1, x.dtype
    ),
    f32("a 50"),
    index("a", 50),
    f32("", 3, 9),
)

row(
    "convert_element_type",
    lambda x: (
        torch.ops.prims.convert_element_type(x, torch.float64),
        torch.ops.prims.convert_element_type(x * 5, torch.int64),
    ),
    f32("a b"),
)

# Functional writes into a part, gradients of views

row(
    "slice_backward",
    lambda g: (
        aten.slice_backward(g, [g.shape[0], 9, g.shape[2]], 1, 2, 6, 1),
        aten.slice_backward(g, [g.shape[0], 9, g.shape[2]], 1, -4, 2**62, 1),
        aten.slice_backward(g, [g.shape[0], 4, g.shape[2]], 1, 0, 2**62, 1),
    ),
    f32("a 4 c"),
)
row(
    "slice_backward dynamic",
    lambda g, x: aten.slice_backward(g[:, 1:], list(x.shape), 1, 1, 2**62, 1) * x,
    f32("a b"),
    f32("a b"),
    refuses=0,
)
row(
    "slice_backward with steps",
    lambda g: aten.slice_backward(g, [g.shape[0], 8], 1, 0, 8, 2),
    f32("a 4"),
    called=True,
)
row(
    "slice_scatter",
    lambda x, y: (aten.slice_scatter(x, y, 1, 2, 6) * 2, aten.slice_scatter(x, y[:, :1], 1, -1)),
    f32("a 9 c"),
    f32("a 4 c"),
)
row(
    "select_backward",
    lambda g: (
        aten.select_backward(g, [g.shape[0], 5, g.shape[1]], 1, 0),
        aten.select_backward(g, [g.shape[0], 5, g.shape[1]], 1, -2),
        aten.select_backward(g, [1, *g.shape], 0, 0),
    ),
    f32("a c"),
)
row(
    "select_scatter at places",
    lambda x, y: (aten.select_scatter(x, y, 1, 3) + 1, aten.select_scatter(x, y, 1, -1)),
    f32("a 5 c"),
    f32("a c"),
)
row(
    "diagonal_backward", lambda g: aten.diagonal_backward(g, [4, 4], 0, 0, 1), f32("4"), called=True
)
row(
    "unfold_backward",
    lambda g: aten.unfold_backward(g, [g.shape[0], 8], 1, 3, 2),
    f32("a 3 3"),
    called=True,
)
row(
    "scatter_add",
    lambda x, i, y: x.scatter_add(1, i, y),
    f32("a 6"),
    index("a b", 6),
    f32("a b"),
    called=True,
)
row(
    "index_add to rows",
    lambda x, i, y: x.index_add(0, i, y),
    f32("6 b"),
    index("a", 6),
    f32("a b"),
    called=True,
)
row(
    "index_put accumulate",
    lambda x, i, y: aten.index_put(x, [i], y, True),
    f32("6 b"),
    index("a", 6),
    f32("a b"),
    called=True,
)
row(
    "index_put of pixels",
    lambda x, i, j, y: aten.index_put(x, [None, i[:, None], j - 6], y, True),
    f32("b 6 6"),
    index("a", 6),
    index("c", 6),
    f32("b a c"),
    called=True,
)
row(
    "embedding_dense_backward",
    lambda g, i: aten.embedding_dense_backward(g, i, 6, 2, False),
    f32("a b c"),
    index("a b", 6),
    called=True,
)

# Images

row(
    "convolution_backward",
    lambda g, x, w: aten.convolution_backward(
        g, x, w, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
    ),
    f32("a 4 c d", 0.1, 2),
    f32("a 3 c d"),
    f32("4 3 3 3"),
)
row(
    "convolution_backward in part",
    lambda g, x, w: (
        aten.convolution_backward(
            g, x, w, [4], [2, 2], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]
        )[1],
        aten.convolution_backward(
            g, x, w, [4], [2, 2], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False]
        )[0],
        aten.convolution_backward(
            g, x, w, [4], [2, 2], [1, 1], [1, 1], False, [0, 0], 1, [False, False, True]
        )[2],
    ),
    f32("a 4 5 4"),
    f32("a 3 9 8"),
    f32("4 3 3 3"),
    called=True,
)
row(
    "max_pool2d_with_indices",
    lambda x: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1]),
    f32("a 3 c d"),
    called=True,
)
row(
    "max_pool2d_with_indices_backward",
    lambda g, x: aten.max_pool2d_with_indices_backward(
        g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, aten.max_pool2d_with_indices(x, [2, 2])[1]
    ),
    f32("a 3 4 5"),
    f32("a 3 8 10"),
    called=True,
)
row(
    "avg_pool2d_backward",
    lambda g, x: aten.avg_pool2d_backward(g, x, [2, 2], [2, 2], [0, 0], False, True, None),
    f32("a 3 4 5"),
    f32("a 3 8 10"),
    called=True,
)
row(
    "adaptive_avg_pool2d_backward",
    lambda g, x: (
        aten._adaptive_avg_pool2d(x, [1, 1]),
        aten._adaptive_avg_pool2d_backward(g, x),
    ),
    f32("a 3 1 1"),
    f32("a 3 c d"),
)
row(
    "upsample_nearest2d_backward",
    lambda g: aten.upsample_nearest2d_backward(g, [8, 10], [g.shape[0], 3, 4, 5], None, None),
    f32("a 3 8 10"),
)
row(
    "upsample_nearest2d_backward by fractions",
    lambda g: aten.upsample_nearest2d_backward(g, [8, 10], [g.shape[0], 3, 5, 7], None, None),
    f32("a 3 8 10"),
    called=True,
)

# Attention


def _attention_and_gradient(
    g: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, ...]:
    q = _filled(q)
    how = {"attn_mask": mask}
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, **how)
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = back(g, q, k, v, out, lse, 0.0, causal, **how)
    # with a single key the exact gradient is 0, of sums that round as large ones do
    return (out, lse, *(x + y for x, y in zip(found, (q, k, v), strict=True)))


row(
    "flash attention and its gradient",
    lambda g, q, k, v: _attention_and_gradient(g, q, k, v, causal=True),
    *[f32("a 2 b 8", 0.25, 1) for _ in range(4)],
)
row(
    "flash attention with a mask, and its gradient",
    _attention_and_gradient,
    *[f32("a 2 b 8", 0.25, 1) for _ in range(4)],
    f32("b b"),
)
row(
    "flash attention in float64 and its gradient",
    _attention_and_gradient,
    *[spec("a 2 b 8", torch.float64) for _ in range(4)],
    called=True,
)

# Reductions over leading axes: gradients of what was broadcast

row(
    "sum to a bias",
    lambda g, x: (g.sum(0), (g * x).sum(0, True), g.sum([0], dtype=torch.float64)),
    f32("a b"),
    f32("a b"),
)
row(
    "sum to channels",
    lambda g, x: (g.sum([0, 2, 3]), (g * x).sum([0, 2, 3])),
    f32("a b c d"),
    f32("a b c d"),
)
row(
    "sum of all but one",
    lambda g: (g.sum([0, 1]), g.sum([0, 2]), g.sum([1, 2]), g.sum()),
    f32("a b c"),
)
row(
    "sum to a bias of halves",
    lambda *gs: [g.sum(0) for g in gs],
    *[spec("a b", d) for d in HALVES],
)
row("sum of many rows", lambda g: (g.sum(0), g.t().sum(-1)), f32("a 70"), a=1500)
row("sum of many", lambda g: (g.sum(), g.square().sum([0, 1])), f32("a b"), a=300, b=70)

# Products with transposed operands: gradients of linear layers

row(
    "gradients of a product",
    lambda g, x, w: (g @ w.t(), x.t() @ g, g.t() @ x, aten.mm(x, w)),
    f32("a c"),
    f32("a b"),
    f32("b c"),
)
row(
    "gradients of a batched product",
    lambda g, x, w: (g @ w.mT, x.mT @ g, aten.bmm(x, w)),
    f32("a b d"),
    f32("a b c"),
    f32("a c d"),
)

row("copy", lambda x, y: aten.copy(x, y) * 2, f32("a 6"), f32("6"))

SAMPLES = tuple(TABLE[_BEFORE:])
