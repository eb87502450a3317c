# SPDX-License-Identifier: Apache-2.0
"""Results of ops on fake tensors, with own rules where torch's shape function specializes a size needlessly.

    made = result_of(aten.lstm.input, args, kwargs)      # like target(*args, **kwargs), for every size

A rule computes the shapes from the symbols; torch's shape function serves all other ops. Both run under the
fake mode of their arguments.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_false, sym_and

from blade.core.dtypes import HALVES
from blade.graph.shapes.padding_sizes import is_padded, windows_shortened

aten = torch.ops.aten
Rule = Callable[..., Any]


def result_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of ``target`` for fake arguments."""
    return RULES.get(target, target)(*args, **kwargs)


def _slice(
    x: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> torch.Tensor:
    """Before torch 2.12, torch's function makes up a size if it does not know where the ends are."""
    size = x.shape[dim]
    if not any(isinstance(n, torch.SymInt) for n in (size, start, end)):
        made: torch.Tensor = aten.slice.Tensor(x, dim, start, end, step)
        return made
    low = 0 if start is None else _within(start, size)
    high = size if end is None or guard_or_false(end == sys.maxsize) else _within(end, size)
    if low is None or high is None:
        made = aten.slice.Tensor(x, dim, start, end, step)
        return made
    taken = high - low if guard_or_false(high >= low) else torch.sym_max(high - low, 0)
    sizes, strides = list(x.shape), list(x.stride())
    offset = x.storage_offset() + low * strides[dim]
    sizes[dim] = (taken + step - 1) // step
    strides[dim] = strides[dim] * step
    return x.as_strided(sizes, strides, offset)


def _within(index: Any, size: Any) -> Any:
    """The position that ``index`` means in an axis of this size; ``None`` if no sample tells.

    If the sign of ``index`` is undecided, the sample's sign is used and guarded.
    """
    if guard_or_false(sym_and(index >= 0, index <= size)):
        return index
    if guard_or_false(sym_and(index < 0, index >= -size)):
        return index + size
    if guard_or_false(index >= 0):
        return index if is_padded(size, index) else torch.sym_min(index, size)
    if guard_or_false(index < 0):
        return torch.sym_max(index + size, 0)
    if free_unbacked_symbols((index, size)):
        return None
    return torch.sym_min(index, size) if index >= 0 else torch.sym_max(index + size, 0)  # a guard


def _batch_norm(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """torch's function computes on stand-ins, 0.1 s a call, and reads past the shape's end of a 1-d tensor."""
    if x.dim() < 2:
        raise ValueError(f"batch_norm takes at least 2 dimensions, not {x.dim()}")
    for per_channel in rest[:4]:
        if isinstance(per_channel, torch.Tensor):
            torch._check(x.shape[1] == per_channel.shape[0])
    return torch.empty_like(x)


def _batch_norm_in_training(x: torch.Tensor, weight: torch.Tensor | None, *rest: Any) -> Any:
    made: Sequence[torch.Tensor] = aten._native_batch_norm_legit_functional.default(
        x, weight, *rest
    )
    return with_wide_statistics(made, x, weight)


def with_wide_statistics(
    results: Sequence[torch.Tensor], x: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """``results`` of torch's function for a batch norm in training, with the dtype that statistics have on a CPU.

    It is the weights'; the function says that statistics of 16-bit values have 16 bits.
    """
    if not has_wide_statistics(x, weight):
        return tuple(results)
    y, mean, deviation, *running = results
    wide = (s.new_empty(s.shape, dtype=torch.float32) for s in (mean, deviation))
    return (y, *wide, *running)


def has_wide_statistics(x: torch.Tensor, *parameters: torch.Tensor | None) -> bool:
    """Whether statistics of a norm of 16-bit ``x`` are float32: on a CPU they have its parameters' dtype."""
    wide = any(p is not None and p.dtype == torch.float32 for p in parameters)
    return x.device.type == "cpu" and x.dtype in HALVES and wide


def _roll(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """torch asks whether ``x`` is empty, which nobody knows of a size that depends on elements."""
    if free_unbacked_symbols(x):
        return x.new_empty(x.shape)
    made: torch.Tensor = aten.roll.default(x, *rest)
    return made


def _grid_sampler(x: torch.Tensor, grid: torch.Tensor, *rest: Any) -> torch.Tensor:
    """torch's function runs the decomposition, a hundred ops; for cuDNN's case it has none."""
    torch._check(x.shape[0] == grid.shape[0])
    torch._check(grid.shape[-1] == x.dim() - 2)
    for size in x.shape[2:]:
        torch._check(size > 0)
    return x.new_empty([x.shape[0], x.shape[1], *grid.shape[1:-1]])


def _upsample(x: torch.Tensor, output_size: Sequence[int] | None, *rest: Any) -> torch.Tensor:
    """torch's function runs the decomposition; that of the op with antialiasing, whose result is alike, does not."""
    sizes = output_size
    if sizes is None:
        factors = rest[-1]
        torch._check(len(factors) == 2)
        sizes = [
            n * int(by) if int(by) == by else torch.sym_int(n * by)
            for n, by in zip(x.shape[2:], factors, strict=True)
        ]
    made: torch.Tensor = aten._upsample_bilinear2d_aa.default(x, sizes, False)
    return made


def _layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *_: Any,
) -> torch.Tensor:
    """torch's function runs the decomposition."""
    inner = x.shape[x.dim() - len(normalized_shape) :]
    for shape in (inner, *(p.shape for p in (weight, bias) if p is not None)):
        for size, given in zip(shape, normalized_shape, strict=True):
            torch._check(size == given)
    return x.new_empty(x.shape)


def _kron(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    rank = max(a.dim(), b.dim())
    left, right = ([1] * (rank - t.dim()) + list(t.shape) for t in (a, b))
    sizes = [x * y for x, y in zip(left, right, strict=True)]
    return a.new_empty(sizes, dtype=torch.result_type(a, b))


def _take_along_dim(x: torch.Tensor, index: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    if dim is None:
        return x.new_empty([index.numel()])
    wide, _ = torch.broadcast_tensors(x.select(dim, 0), index.select(dim, 0))
    sizes = list(wide.shape)
    sizes.insert(dim % x.dim(), index.shape[dim])
    return x.new_empty(sizes)


def _cdist(
    a: torch.Tensor, b: torch.Tensor, p: float = 2.0, compute_mode: int | None = None
) -> torch.Tensor:
    """torch's function asks whether there are more than 25 rows, to choose between a product and a loop."""
    torch._check(a.shape[-1] == b.shape[-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty([*batch, a.shape[-2], b.shape[-2]])


def _max_pool1d(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> torch.Tensor:
    window = ([1, k] for k in (_one(kernel_size), _one(stride) if stride else _one(kernel_size)))
    wide = x.unsqueeze(-2)
    shift, spread = [0, _one(padding)], [1, _one(dilation)]
    pooled, _ = aten.max_pool2d_with_indices(wide, *window, shift, spread, ceil_mode)
    return x.new_empty([*x.shape[:-1], pooled.shape[-1]])


def _one(sizes: Sequence[int] | int) -> int:
    return sizes if isinstance(sizes, int) else sizes[0]


def _adaptive_max_pool(spatial: int) -> Rule:
    def rule(x: torch.Tensor, output_size: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        kept = list(x.shape[: x.dim() - spatial])
        sizes = kept + list(output_size) * (spatial // len(output_size))
        return x.new_empty(sizes), x.new_empty(sizes, dtype=torch.int64)

    return rule


def _recurrent(
    x: torch.Tensor,
    hx: Any,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    states = hx if isinstance(hx, (list, tuple)) else [hx]
    # ATen's kernels do not check sizes: where these do not fit they read past the end
    torch._check(x.shape[-1] == params[0].shape[1])
    torch._check(states[0].shape[2] == params[1].shape[1])
    if len(states) == 2:
        torch._check(states[1].shape[2] * 4 == params[1].shape[0])  # cells have 4 gates
    for state in states:
        torch._check(state.shape[0] == num_layers * (2 if bidirectional else 1))
        if x.dim() == 3:
            torch._check(state.shape[1] == x.shape[0 if batch_first else 1])
    # a step's output is the hidden state or its projection
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    output = x.new_empty([*x.shape[:-1], width])
    if batch_first:  # torch computes with time first
        output = x.new_empty([x.shape[1], x.shape[0], width]).transpose(0, 1)
    return output, *(s.new_empty(s.shape) for s in states)


def _recurrent_packed(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: Any,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, ...]:
    return _recurrent(
        data, hx, params, has_biases, num_layers, dropout, train, bidirectional, False
    )


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """On a GPU, torch's function requires the mask to have a row per head instead of one for all."""
    if query.device.type == "cpu" or query.dim() != 4:
        made: torch.Tensor = aten.scaled_dot_product_attention.default(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return made
    batch, heads, length, _ = query.shape
    # a query's heads are adjacent in memory, as fused kernels write them
    return query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)


def _convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    # Before torch 2.12 the op that torch.jit writes has no shape function; the op that it calls has one.
    return windows_shortened(aten.convolution.default(x, weight, bias, *rest[:6]))


def _pool(target: Any) -> Rule:
    def rule(*args: Any) -> torch.Tensor:
        return windows_shortened(target(*args))

    return rule


def _embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[torch.Tensor, ...]:
    bags = offsets.shape[0] - (1 if include_last_offset else 0)
    # Further results are for the backward pass; their sizes are not relied on.
    notes = (offsets.new_empty([0]) for _ in range(3))
    return weight.new_empty([bags, weight.shape[1]]), *notes


def _affine_grid(theta: torch.Tensor, size: Sequence[int], align_corners: bool) -> torch.Tensor:
    return theta.new_empty([size[0], *size[2:], len(size) - 2])


def _gru_cell(x: torch.Tensor, hx: torch.Tensor, *_: Any) -> torch.Tensor:
    """On a GPU it consists of an op without a shape function."""
    return hx.new_empty(hx.shape)


def _like(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _contiguous(
    x: torch.Tensor, *, memory_format: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    """torch asks whether ``x`` is contiguous already, which a window is where no padding is cut off."""
    is_known = not any(isinstance(n, torch.SymInt) for n in (*x.shape, *x.stride()))
    if is_known or memory_format is not torch.contiguous_format:
        made: torch.Tensor = aten.contiguous.default(x, memory_format=memory_format)
        return made
    made = x.new_empty(x.shape)
    is_same = all(guard_or_false(a == b) for a, b in zip(x.stride(), made.stride(), strict=True))
    return x if is_same else made


def _encoder_layer(src: torch.Tensor, *_: Any) -> torch.Tensor:
    return src.new_empty(src.shape)


def _native_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, length = query.shape[:2]
    heads = [] if average_attn_weights else [num_head]
    sizes = [batch, *heads, length, key.shape[1]] if need_weights else [0]
    return query.new_empty(query.shape), query.new_empty(sizes)


def _grouped_mm(
    x: torch.Tensor,
    other: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """torch's function accepts only bfloat16, unlike its kernels. Rows begin at multiples of 16 bytes."""
    dtype = out_dtype or x.dtype
    step = 16 // dtype.itemsize
    groups = (
        [] if x.dim() + other.dim() == 5 else [offs.shape[0] if offs is not None else x.shape[0]]
    )
    sizes = [*groups, x.shape[-2], other.shape[-1]]
    row = (sizes[-1] + step - 1) // step * step
    return x.new_empty_strided(sizes, [*(sizes[-2] * row for _ in groups), row, 1], dtype=dtype)


RULES: dict[Any, Rule] = {
    aten.slice.Tensor: _slice,
    aten.batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit_functional.default: _batch_norm_in_training,
    aten.roll.default: _roll,
    aten.contiguous.default: _contiguous,
    aten.grid_sampler.default: _grid_sampler,
    aten.upsample_nearest2d.vec: _upsample,
    aten.upsample_bilinear2d.vec: _upsample,
    aten.upsample_bicubic2d.vec: _upsample,
    aten.layer_norm.default: _layer_norm,
    aten.relu.default: _like,
    aten.softplus.default: _like,
    aten.kron.default: _kron,
    aten.take_along_dim.default: _take_along_dim,
    aten.cdist.default: _cdist,
    aten.max_pool1d.default: _max_pool1d,
    aten.max_pool2d.default: _pool(aten.max_pool2d.default),
    aten.avg_pool2d.default: _pool(aten.avg_pool2d.default),
    aten.adaptive_max_pool2d.default: _adaptive_max_pool(2),
    aten.adaptive_max_pool3d.default: _adaptive_max_pool(3),
    aten.lstm.input: _recurrent,
    aten.gru.input: _recurrent,
    aten.rnn_tanh.input: _recurrent,
    aten.rnn_relu.input: _recurrent,
    aten.lstm.data: _recurrent_packed,
    aten.gru.data: _recurrent_packed,
    aten.rnn_tanh.data: _recurrent_packed,
    aten.rnn_relu.data: _recurrent_packed,
    aten.scaled_dot_product_attention.default: _attention,
    aten._convolution.default: _convolution,
    aten._convolution.deprecated: _convolution,
    aten.embedding_bag.default: _embedding_bag,
    aten.embedding_bag.padding_idx: _embedding_bag,
    aten.affine_grid_generator.default: _affine_grid,
    aten.gru_cell.default: _gru_cell,
    aten.fake_quantize_per_tensor_affine.default: _like,
    aten.fake_quantize_per_tensor_affine.tensor_qparams: _like,
    aten.fake_quantize_per_channel_affine.default: _like,
    aten._transformer_encoder_layer_fwd.default: _encoder_layer,
    aten._native_multi_head_attention.default: _native_attention,
    aten._grouped_mm.default: _grouped_mm,
}
