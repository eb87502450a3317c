# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of op samples: layers with weights, pooling, resampling, quantization."""

import torch
import torch.nn.functional as F
from op_samples import f32, index, mask, row, spec
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

# Recurrent layers. Their weights are constants: with others of unfit sizes, torch ends the process.


def _weights(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.rand(s, generator=generator) - 0.5 for s in shapes]


def _layer(gates: int, *more: tuple[int, ...], inputs: int = 4) -> list[torch.Tensor]:
    """Weights of a layer of 5 units (and further ones)."""
    return _weights((5 * gates, inputs), (5 * gates, 5), (5 * gates,), (5 * gates,), *more)


def _as(x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Where ``x`` is; a tracer finds them there."""
    with _disable_current_modes():
        placed = [w.to(x.device) for w in weights]
    return [w.to(x.dtype) for w in placed]


def _state(x: torch.Tensor, layers: int, axis: int = 1, units: int = 5) -> torch.Tensor:
    return x.new_full((layers, x.shape[axis], units), 0.25)


_CELLS = {gates: _layer(gates) for gates in (1, 3, 4)}
_WIDE = _layer(4, inputs=10)
_PROJECTED = _weights((20, 4), (20, 3), (3, 5))
row(
    "lstm",
    lambda x: torch.lstm(
        x, (_state(x, 1), _state(x, 1) * 2), _as(x, _CELLS[4]), True, 1, 0.0, False, False, False
    ),
    f32("a b 4"),
)
row(
    "lstm both ways",
    lambda x: torch.lstm(
        x,
        (_state(x, 4, 0), _state(x, 4, 0)),
        _as(x, _CELLS[4] * 2 + _WIDE * 2),
        *(True, 2, 0.0, False, True, True),
    ),
    f32("a b 4"),
)
row(
    "lstm projected",
    lambda x: torch.lstm(
        x,
        (_state(x, 1, 1, 3), _state(x, 1)),
        _as(x, _PROJECTED),
        *(False, 1, 0.0, False, False, False),
    ),
    f32("a b 4"),
)
for _name, _op, _gates in (
    ("gru", torch.gru, 3),
    ("rnn_tanh", torch.rnn_tanh, 1),
    ("rnn_relu", torch.rnn_relu, 1),
):
    row(
        _name,
        lambda x, op=_op, gates=_gates: op(
            x, _state(x, 1, 0), _as(x, _CELLS[gates]), True, 1, 0.0, False, False, True
        ),
        f32("a b 4"),
    )
row(
    "rnn cells",
    lambda x, h, w, u, b: (torch.rnn_tanh_cell(x, h, w, u, b, b), torch.rnn_relu_cell(x, h, w, u)),
    f32("a 4"),
    f32("a 5"),
    f32("5 4"),
    f32("5 5"),
    f32("5"),
    called=True,
)

# Transformer layers, as their fast path calls them

row(
    "encoder layer",
    lambda x, w, b, p, q, v, c, u, d: (
        aten._transformer_encoder_layer_fwd(
            x, 8, 2, w, b, p, q, True, False, 1e-5, q, q, q, q, v, c, u, d
        ),
        aten._transformer_encoder_layer_fwd(
            x, 8, 2, w, b, p, q, False, True, 1e-5, q, q, q, q, v, c, u, d
        ),
    ),
    f32("a b 8"),
    f32("24 8", -0.5, 0.5),
    f32("24"),
    f32("8 8", -0.5, 0.5),
    f32("8"),
    f32("6 8", -0.5, 0.5),
    f32("6"),
    f32("8 6", -0.5, 0.5),
    f32("8"),
)
_ATTENTION = _weights((24, 8), (24,), (8, 8), (8,))
row(
    "native attention",
    lambda x: (
        *aten._native_multi_head_attention(x, x, x, 8, 2, *_as(x, _ATTENTION)),
        *aten._native_multi_head_attention(x, x, x, 8, 2, *_as(x, _ATTENTION), None, True, False),
        aten._native_multi_head_attention(x, x, x, 8, 2, *_as(x, _ATTENTION), None, False)[0],
    ),
    f32("a b 8"),
    called=True,
    refuses=0,
)
row(
    "grouped product",  # experts: rows up to offs[i] are multiplied by the i-th matrix
    lambda x, w: (
        aten._grouped_mm(x * 2, w, torch.arange(1, 4, dtype=torch.int32) * x.shape[0] // 3) + 1
    ),
    f32("a 8"),
    f32("3 8 12"),
    called=True,
)
row(
    "native attention mask",
    lambda x, m: aten._native_multi_head_attention(
        x, x, x, 8, 2, *_as(x, _ATTENTION), m.logical_and(m.logical_not()), True, True, 1
    ),
    f32("a b 8"),
    mask("a b"),
    called=True,
    refuses=0,
)
row(
    "attention float mask scale",
    lambda q, k, v, m: (
        F.scaled_dot_product_attention(q, k, v, m, scale=0.7),
        F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0], m[:, 0]),
        F.scaled_dot_product_attention(q, k, v, m[:, :, :1]),
    ),
    f32("a 2 b 4"),
    f32("a 2 c 4"),
    f32("a 2 c 3"),
    f32("a 1 b c"),
    refuses=0,
)
row(
    "attention dtypes",
    lambda q, k, r: (
        F.scaled_dot_product_attention(q, k, k),
        F.scaled_dot_product_attention(r, r, r, is_causal=True),
    ),
    spec("a 2 b 4", torch.float64),
    spec("a 2 c 4", torch.float64),
    spec("a 2 b 4", torch.bfloat16),
    called=True,
)

# Pooling

row(
    "max_pool1d dynamic",
    lambda x: (
        F.max_pool1d(x, 2),
        F.max_pool1d(x, 3, 2, 1),
        F.max_pool1d(x, 3, 1, 0, 2, ceil_mode=True),
        *F.max_pool1d(x, 2, return_indices=True),
    ),
    f32("a 3 b"),
    called=True,
    b=9,
)
row(
    "max_pool with indices",
    lambda x: (
        *F.max_pool2d(x, 2, return_indices=True),
        *F.max_pool2d(x, (3, 2), (2, 1), (1, 0), return_indices=True, ceil_mode=True),
        F.max_pool2d(x[0], 2),
        F.max_pool2d(x, 2, dilation=2),
    ),
    f32("a 3 c d"),
    called=True,
    c=8,
    d=9,
)
row(
    "max_pool3d",
    lambda x: (F.max_pool3d(x, 2), *F.max_pool3d(x, 2, 1, return_indices=True)),
    f32("a 3 b c d"),
    called=True,
)
row(
    "avg_pool",
    lambda x, y: (
        F.avg_pool1d(x, 2),
        F.avg_pool1d(x, 3, 2, 1, True, False),
        F.avg_pool3d(y, 2),
        F.avg_pool3d(y, 2, 1, divisor_override=3),
    ),
    f32("a 3 b"),
    f32("a 2 b c d"),
    called=True,
    b=8,
    c=5,
    d=6,
)
row(
    "avg_pool2d divisor",
    lambda x: (F.avg_pool2d(x, (2, 3), ceil_mode=True), F.avg_pool2d(x, 2, divisor_override=3)),
    f32("a 3 c d"),
    c=8,
    d=9,
)
row(
    "lp_pool",
    lambda x: (F.lp_pool2d(x, 2, 2), F.lp_pool1d(x[..., 0], 2.0, 3, 2)),
    f32("a 3 c d", 0.2, 2),
    called=True,
    c=8,
    d=9,
)
row(
    "adaptive_max_pool",
    lambda x: (
        F.adaptive_max_pool2d(x, 2),
        *F.adaptive_max_pool2d(x, (2, 3), return_indices=True),
        *F.adaptive_max_pool1d(x[..., 0], 2, return_indices=True),
        F.adaptive_max_pool3d(x, (1, 2, 2)),
    ),
    f32("a 3 c d"),
    called=True,
    c=8,
    d=9,
)
row(
    "adaptive_avg_pool to sizes",
    lambda x: (
        F.adaptive_avg_pool2d(x, (None, 2)),
        F.adaptive_avg_pool2d(x, (x.shape[2] // 2, 1)),
        F.adaptive_avg_pool3d(x, (1, 2, 2)),
    ),
    f32("a 3 c d"),
    called=True,
    c=8,
    d=9,
)

# Convolution


def _constant(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``weight`` as a constant in the dtype of ``x``: the conversion is not traced."""
    with _disable_current_modes():
        return weight.to(x.device, x.dtype)


_NARROW = _weights((6, 3, 3, 3), (3, 1, 3, 3), (5, 5, 4), (2, 1, 3, 2, 3))
_FLAGS = (False, False, True)  # cuDNN's benchmark and determinism, then whether it may be used
row(
    "conv2d same",
    lambda x, w: (
        F.conv2d(x, w, padding="same"),
        F.conv2d(x, w, padding="same", dilation=2),
        F.conv2d(x, w, padding="valid"),
        F.conv2d(x[0], w, padding=1),
    ),
    f32("a 4 c d"),
    f32("6 4 3 3"),
    c=8,
    d=9,
)
row(
    "conv of halves",
    lambda x, w, y, v: (F.conv2d(x, w, padding=1), F.conv1d(y, v, stride=2)),
    spec("a 4 c d", torch.bfloat16),
    spec("6 4 3 3", torch.bfloat16),
    spec("a 4 b", torch.float64),
    spec("6 4 3", torch.float64),
    called=True,
    c=8,
    d=9,
    b=7,
)
row(
    "conv of halves, odd",
    lambda x, y, z: (
        F.conv2d(x, _constant(x, _NARROW[0]), padding=1),
        F.conv2d(x, _constant(x, _NARROW[1]), groups=3, stride=2),
        F.conv1d(y, _constant(y, _NARROW[2]), padding=2),
        F.conv_transpose1d(y, _constant(y, _NARROW[2]), None, 2, 1),
        F.conv3d(z, _constant(z, _NARROW[3]), padding=1, groups=2),
    ),
    spec("a 3 c d", torch.bfloat16),
    spec("a 5 b", torch.bfloat16),
    spec("a 2 b c d", torch.bfloat16),
    c=8,
    d=9,
    b=7,
)
row(
    "conv1d depthwise",
    lambda x, w, b: (F.conv1d(x, w, b, groups=4, padding=2), F.conv1d(x, w, None, 2, 0, 2, 4)),
    f32("a 4 b"),
    f32("4 1 3"),
    f32("4"),
    b=9,
)
row(
    "conv3d more",
    lambda x, w, b: (
        F.conv3d(x, w, b, stride=2, padding=1),
        F.conv3d(x, w, padding="same"),
        F.conv3d(x, w, b, dilation=(1, 2, 1), padding=(0, 2, 1)),
    ),
    f32("a 2 b c d"),
    f32("3 2 3 3 3"),
    f32("3"),
)
row(
    "convolution as torch.jit writes it",
    lambda x, w, b: (
        torch.convolution(x, w, b, [2, 1], [1, 0], [1, 2], False, [0, 0], 2),
        torch._convolution(x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 2, *_FLAGS, True),
        torch._convolution(x, w, None, [1, 1], [0, 2], [1, 1], False, [0, 0], 2, *_FLAGS),
    ),
    f32("a 4 c d"),
    f32("6 2 3 3"),
    f32("6"),
    c=8,
    d=9,
)
row(
    "convolution padded by name",
    lambda x, w, v, y, u: (
        torch._convolution_mode(x, w, None, [1, 1], "same", [1, 2], 1),
        torch._convolution_mode(x, v, None, [1, 1], "same", [1, 1], 4),
        torch._convolution_mode(x, w, None, [2, 1], "valid", [1, 1], 1),
        torch._convolution_mode(y, u, None, [1], "same", [1], 1),
    ),
    f32("a 4 c d"),
    f32("6 4 3 3"),
    f32("8 1 2 4"),
    f32("a 4 b"),
    f32("6 4 5"),
    c=8,
    d=9,
)
row(
    "conv_transpose1d",
    lambda x, w, b: (
        F.conv_transpose1d(x, w, b),
        F.conv_transpose1d(x, w, b, 2, 1, 1),
        F.conv_transpose1d(x, w[:, :1], None, 2, groups=4),
    ),
    f32("a 4 b"),
    f32("4 3 3"),
    f32("3"),
    called=True,
    b=5,
)
row(
    "conv_transpose2d more",
    lambda x, w, b: (
        F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
        F.conv_transpose2d(x, w, dilation=2),
        F.conv_transpose2d(x, w, groups=2),
    ),
    f32("a 4 c d"),
    f32("4 3 3 3"),
    f32("3"),
    called=True,
)
_KERNELS = _weights((3, 4, 4), (3, 4, 3, 4), (3, 4, 2, 2, 2))
row(
    "conv_transpose of constants",
    lambda x, y, z, b: (
        F.conv_transpose1d(x, _constant(x, _KERNELS[0]), b, 2, 1),
        F.conv_transpose2d(y, _constant(x, _KERNELS[1]), b, (2, 1), 1, (1, 0), 1, (1, 2)).relu(),
        F.conv_transpose2d(y[0], _constant(x, _KERNELS[1]), None, 2, 1),
        F.conv_transpose3d(z, _constant(x, _KERNELS[2]), b, 2),
        torch.convolution(x, _constant(x, _KERNELS[0]), b, [3], [2], [1], True, [1], 1),
    ),
    f32("a 3 b"),
    f32("a 3 c d"),
    f32("a 3 b c d"),
    f32("4"),
    b=5,
    c=4,
    d=6,
)
row(
    "conv_transpose3d",
    lambda x, w: F.conv_transpose3d(x, w, stride=2),
    f32("a 2 b c d"),
    f32("2 3 2 2 2"),
    called=True,
)

# Resampling

row(
    "upsample sizes",
    lambda x: (
        F.interpolate(x, size=(x.shape[2] * 2, x.shape[3] + 1)),
        F.interpolate(x, size=(5, 7), mode="nearest-exact"),
        F.interpolate(x, size=(5, 7), mode="bilinear", antialias=True),
        F.interpolate(x, size=(9, 7), mode="bicubic", align_corners=True),
        F.interpolate(x, size=(2, 3), mode="area"),
    ),
    f32("a 3 c d"),
    called=True,
)
row(
    "upsample by sizes alone",
    lambda x: (
        aten.upsample_nearest2d(x, [x.shape[2] * 2, x.shape[3] * 2]),
        aten.upsample_nearest2d(x, [5, 7]),
        aten.upsample_bilinear2d(x, [5, x.shape[3] + 1], True),
        aten.upsample_bilinear2d(x, [17, 7], False, 1.5, 2.0),
        aten.upsample_bicubic2d(x, [x.shape[2] * 2, 5], True),
        aten.upsample_bicubic2d(x, [9, 7], False, 1.5, 2.0),
    ),
    f32("a 3 c d"),
)
row(
    "upsample scales",
    lambda x: (
        F.interpolate(x, scale_factor=1.7),
        F.interpolate(x, scale_factor=(0.6, 2.5), mode="bilinear"),
        F.interpolate(x, scale_factor=1.5, mode="bilinear", align_corners=True),
        F.interpolate(x, scale_factor=(2, 3), mode="bicubic"),
        F.interpolate(x, scale_factor=1.3, mode="bilinear", recompute_scale_factor=True),
        F.interpolate(x, scale_factor=0.7, mode="nearest-exact"),
    ),
    f32("a 3 c d"),
    called=True,
    c=5,
    d=6,
)
row(
    "upsample ranks",
    lambda x, y: (
        F.interpolate(x, scale_factor=2.0),
        F.interpolate(x, size=7, mode="linear"),
        F.interpolate(x, scale_factor=1.5, mode="linear"),
        F.interpolate(y, scale_factor=2.0),
        F.interpolate(y, size=(3, 4, 5), mode="trilinear"),
        F.interpolate(y, scale_factor=(1.0, 1.5, 2.0), mode="trilinear"),
    ),
    f32("a 3 b"),
    f32("a 2 b c d"),
    called=True,
    b=4,
    c=4,
    d=6,
)
row(
    "grid_sample more",
    lambda x, g: (
        F.grid_sample(x, g, align_corners=True),
        F.grid_sample(x, g, mode="nearest", padding_mode="border", align_corners=True),
        F.grid_sample(x, g, mode="bicubic", padding_mode="reflection", align_corners=False),
    ),
    f32("a 3 c d"),
    f32("a 4 b 2", -0.9, 0.9),
    called=True,
    refuses=0,
)
row(
    "affine_grid",
    lambda t, x: torch.affine_grid_generator(t, x.shape, False),
    f32("a 2 3"),
    f32("a 3 c d"),
    called=True,
)
row(
    "im2col more",
    lambda x: (F.unfold(x, (2, 3), padding=1), F.unfold(x, 3, dilation=2, padding=2, stride=2)),
    f32("a 3 c d"),
    refuses=0,
)
row(
    "col2im",
    lambda x: F.fold(x, (4, 5), (2, 2)),
    f32("a 12 12"),
    called=True,
    refuses=0,
)

# Padding

row(
    "pad modes 2d",
    lambda x: (
        F.pad(x, (1, 2, 2, 1), mode="reflect"),
        F.pad(x, (1, 2, 0, 3), mode="replicate"),
        F.pad(x, (1, 2, 2, 1), mode="circular"),
        F.pad(x, (0, 1, -1, 2, 1, 0), value=2.0),
        aten.reflection_pad2d(x, [1, 1, 1, 1]),
        aten.replication_pad2d(x, [1, 0, 1, 0]),
    ),
    f32("a 3 c d"),
    called=True,
)
row(
    "pad modes 3d",
    lambda x: (
        F.pad(x, (1, 2, 2, 1, 1, 1), mode="reflect"),
        F.pad(x, (1, 2, 0, 3, 1, 0), mode="replicate"),
    ),
    f32("a 2 b c d"),
    called=True,
)

# Embeddings

row(
    "embedding_bag modes",
    lambda i, o, w, s: (
        F.embedding_bag(i, w, o, mode="max"),
        F.embedding_bag(i, w, o, mode="sum", per_sample_weights=s),
        F.embedding_bag(i, w, o, mode="mean", padding_idx=2),
        F.embedding_bag(i, w, o, mode="sum", include_last_offset=True),
    ),
    index("8", 9),
    index("4", 1),
    f32("9 b"),
    f32("8"),
    called=True,
)
row(
    "embedding_bag weights",
    lambda i, w, s: (
        F.embedding_bag(i, w, mode="sum", per_sample_weights=s),
        F.embedding_bag(i, w, mode="max"),
        F.embedding_bag(i, w, mode="sum", padding_idx=0),
    ),
    index("a 5", 9),
    f32("9 6"),
    f32("a 5"),
    called=True,
)
row(
    "embedding_bag offsets",
    lambda i, w, o: F.embedding_bag(i, w, torch.arange(o.shape[0] + 1) * 2, mode="sum"),
    index("20", 9),
    f32("9 6"),
    f32("a"),
    called=True,
)
row(
    "embedding int32",
    lambda i, w: F.embedding(i, w, scale_grad_by_freq=True),
    spec("a b", torch.int32, 0, 8),
    f32("9 6"),
    called=True,
)

# Quantization

row(
    "fake_quantize",
    lambda x, s, z: (
        torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 255),
        torch.fake_quantize_per_tensor_affine(x, s[0], z[0], -128, 127),
        torch.fake_quantize_per_channel_affine(x, s, z, 1, 0, 255),
    ),
    f32("a 4 c"),
    f32("4", 0.05, 0.2),
    spec("4", torch.int32, 0, 5),
    called=True,
)

# Losses and distances

row(
    "losses",
    lambda x, y, t: (
        F.l1_loss(x, y, reduction="none"),
        F.smooth_l1_loss(x, y),
        F.huber_loss(x, y, reduction="sum"),
        F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction="none"),
        F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        F.cross_entropy(x, t),
        F.nll_loss(x.log_softmax(-1), t, reduction="sum"),
        F.soft_margin_loss(x, y.sign()),
        F.poisson_nll_loss(x, y.exp()),
    ),
    f32("a 8"),
    f32("a 8"),
    index("a", 8),
    called=True,
)
row(
    "distances",
    lambda x, y: (
        F.pairwise_distance(x, y),
        torch.cdist(x[None], y[None], p=1.0),
        torch.dist(x, y),
        F.cosine_similarity(x, y, 0),
        F.pairwise_distance(x, y, p=1.0, keepdim=True),
    ),
    f32("a b"),
    f32("a b"),
    called=True,
)
row(
    "rrelu",
    lambda x: (F.rrelu(x), F.feature_alpha_dropout(x, 0.5, False)),
    f32("a b"),
    called=True,
)
