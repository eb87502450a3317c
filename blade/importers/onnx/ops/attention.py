# SPDX-License-Identifier: Apache-2.0
"""Attention, of the standard and of ONNX Runtime's own domain."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from blade.importers.onnx.emit.dtypes import torch_dtype
from blade.importers.onnx.emit.emitter import Emitter, number_text
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.table import MICROSOFT, NodeView, row
from blade.importers.onnx.emit.values import HostNumber, TensorValue, Value


@dataclass(frozen=True)
class _Heads:
    """q, k and v as texts [batch, heads, length, size], and what is known of them."""

    q: str
    k: str
    v: str
    groups: int
    dtype: torch.dtype
    size: HostNumber


@row("Attention")
def attention(
    e: Emitter,
    node: NodeView,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None = None,
    past_key: Value | None = None,
    past_value: Value | None = None,
    lengths: Value | None = None,
) -> tuple[TensorValue, ...]:
    q_heads, kv_heads = node.int("q_num_heads", 0), node.int("kv_num_heads", 0)
    is_flat = e.rank(q) == 3
    texts = []
    for value, heads in ((q, q_heads), (k, kv_heads), (v, kv_heads)):
        texts.append(split_heads(e, value, heads) if is_flat else e.tensor(value))
    past = "0"
    if past_key is not None and past_value is not None:
        past = f"{e.tensor(past_key)}.size(2)"
        for n, one in ((1, past_key), (2, past_value)):
            texts[n] = e.let(f"torch.cat([{e.tensor(one)}, {texts[n]}], 2)", name="present").text
    groups = _groups(e, q, k, q_heads, kv_heads, is_flat)
    size = e.size(q, 2) if is_flat else e.size(q, 3)
    if is_flat:
        size = size // q_heads if isinstance(size, int) else e.number(f"{size} // {q_heads}")
    parts = _Heads(texts[0], texts[1], texts[2], groups, e.dtype(q), size)
    bias = _bias(e, node, parts, mask, lengths, past)
    y, scores = _attend(e, node, parts, bias)
    if is_flat:
        y = f"{y}.transpose(1, 2).flatten(2)"
    made = TensorValue(y, e.dtype(q), (*(e.sizes(q) or ())[:-1], None))
    present = [TensorValue(one, e.dtype(q), (None,) * 4) for one in (parts.k, parts.v)]
    results = (made, *present, TensorValue(scores, e.dtype(q), (None,) * 4))
    return results[: len(node.outputs)]


def split_heads(e: Emitter, value: Value, heads: int) -> str:
    """[batch, length, heads * size] as [batch, heads, length, size]."""
    width = e.size(value, 2)
    size = str(width // heads) if isinstance(width, int) else "-1"
    batch, length = e.size(value, 0), e.size(value, 1)
    text = f"{e.tensor(value)}.reshape([{batch}, {length}, {heads}, {size}]).transpose(1, 2)"
    return e.let(text, name="heads").text


def _groups(e: Emitter, q: Value, k: Value, q_heads: int, kv_heads: int, is_flat: bool) -> int:
    """How many heads of q share one of k."""
    if is_flat:
        return q_heads // kv_heads
    own, other = e.size(q, 1), e.size(k, 1)
    if not isinstance(own, int) or not isinstance(other, int):
        if own == other:
            return 1
        raise NotImported("The number of heads is not known.")
    return own // other


def _bias(
    e: Emitter, node: NodeView, heads: _Heads, mask: Value | None, lengths: Value | None, past: str
) -> str | None:
    """What is added to the scores, 0 or -inf where positions are masked; ``None``: nothing."""
    parts = []
    if mask is not None:
        text = e.tensor(mask)
        if node.version >= 24:
            text = f"run.as_wide({text}, {heads.k}.size(2))"
        if e.dtype(mask) is torch.bool:
            text = f"run.mask_bias({text}, {heads.q})"
        parts.append(text)
    causal = bool(node.int("is_causal", 0))
    left, right = node.int("left_window_size", -1), node.int("right_window_size", -1)
    ends = "None" if lengths is None else e.tensor(lengths)
    if causal:
        right = 0 if right < 0 else min(right, 0)
    if left >= 0 or right >= 0:
        given = f"{heads.q}, {heads.k}.size(2), {past}, {ends}, {left}, {right}"
        parts.append(f"run.window_bias({given})")
    if lengths is not None:
        parts.append(f"run.length_bias({ends}, {heads.k}.size(2), {heads.q})")
    return e.let(" + ".join(parts), name="bias").text if parts else None


def _attend(e: Emitter, node: NodeView, heads: _Heads, bias: str | None) -> tuple[str, str]:
    """The text of the result, and of what ``qk_matmul_output_mode`` asks for."""
    k, v = heads.k, heads.v
    if heads.groups > 1:
        k = e.let(f"{k}.repeat_interleave({heads.groups}, 1)", name="k").text
        v = e.let(f"{v}.repeat_interleave({heads.groups}, 1)", name="v").text
    scale = node.attributes.get("scale")
    cap, mode = node.float("softcap", 0.0), node.int("qk_matmul_output_mode", 0)
    precision = node.int("softmax_precision", 0)
    is_plain = not cap and not node.wants(3) and heads.dtype is torch.float32
    if is_plain and precision in (0, 1):
        given = f"{heads.q}, {k}, {v}, {bias or 'None'}, 0.0, False"
        text = f"torch.ops.aten.scaled_dot_product_attention({given}, scale={_scale(scale)})"
        return e.let(text, name="attended").text, ""
    if scale:
        factor = number_text(math.sqrt(float(scale)))
    elif isinstance(heads.size, int):
        factor = number_text(heads.size**-0.25)
    else:
        factor = f"math.pow({heads.size}, -0.25)"
    text = f"torch.matmul({heads.q} * {factor}, ({k} * {factor}).transpose(-1, -2))"
    outputs = [e.let(text, name="scores").text]
    if cap:
        limit = number_text(cap)
        text = f"torch.tanh({outputs[0]} / {limit}) * {limit}"
        outputs.append(e.let(text, name="scores").text)
    else:
        outputs.append(outputs[0])
    text = outputs[1] if bias is None else f"{outputs[1]} + {bias}"
    outputs.append(e.let(text, name="scores").text)
    wide = torch_dtype(precision) if precision else heads.dtype
    weights = f"run.safe_softmax({outputs[2]}.to({wide}), {bias or 'None'}).to({heads.dtype})"
    outputs.append(e.let(weights, name="weights").text)
    return e.let(f"torch.matmul({outputs[3]}, {v})", name="attended").text, outputs[mode]


def _scale(scale: float | None) -> str:
    return number_text(float(scale)) if scale else "None"


@row("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(
    e: Emitter,
    node: NodeView,
    q: Value,
    k: Value | None = None,
    v: Value | None = None,
    bias: Value | None = None,
    padding: Value | None = None,
    added: Value | None = None,
    past_key: Value | None = None,
    past_value: Value | None = None,
) -> TensorValue:
    if k is None or v is None or e.rank(q) != 3 or e.rank(k) != 3 or e.rank(v) != 3:
        raise NotImported("Queries, keys and values are packed.")
    if past_key is not None or past_value is not None or node.wants(1) or padding is not None:
        raise NotImported("It has a cache, or a mask of keys.")
    heads, scale = node.int("num_heads", 1), node.attributes.get("scale")
    values: list[Value] = [q, k, v]
    if bias is not None:
        parts = [e.name("bias") for _ in values]
        widths = ", ".join(str(e.size(one, 2)) for one in values)
        e.line(f"{', '.join(parts)} = torch.split({e.tensor(bias)}, [{widths}], 0)")
        values = [
            e.let(f"{e.tensor(one)} + {part}", e.dtype(one), e.sizes(one))
            for one, part in zip(values, parts)
        ]
    q, k, v = values
    texts = [split_heads(e, one, heads) for one in values]
    mask = "None" if added is None else e.tensor(added)
    given = f"{', '.join(texts)}, {mask}, 0.0, {bool(node.int('unidirectional', 0))}"
    if added is not None and node.int("unidirectional", 0):
        raise NotImported("A bias, and a causal mask.")
    made = f"torch.ops.aten.scaled_dot_product_attention({given}, scale={_scale(scale)})"
    return TensorValue(
        f"{made}.transpose(1, 2).flatten(2)", e.dtype(q), (*(e.sizes(q) or ())[:-1], None)
    )


@row("Attention", domain=MICROSOFT)
def packed_attention(
    e: Emitter,
    node: NodeView,
    x: Value,
    w: Value,
    bias: Value | None = None,
    mask: Value | None = None,
    past: Value | None = None,
    added: Value | None = None,
) -> TensorValue:
    """Projections to q, k and v by one matrix; ``mask`` is [batch, length] of 0 and 1, or lengths."""
    if past is not None or node.wants(1) or node.attributes.get("qkv_hidden_sizes"):
        raise NotImported("It has a cache, or sizes of its own.")
    heads, scale = node.int("num_heads", 1), node.attributes.get("scale")
    text = f"torch.matmul({e.tensor(x)}, {e.tensor(w)})"
    text += "" if bias is None else f" + {e.tensor(bias)}"
    packed = e.let(text, name="packed").text
    parts = [e.name(one) for one in ("q", "k", "v")]
    e.line(f"{', '.join(parts)} = torch.chunk({packed}, 3, -1)")
    width = e.size(w, 1)
    third = width // 3 if isinstance(width, int) else None
    sizes = (*(e.sizes(x) or (None, None))[:2], third)
    texts = [split_heads(e, TensorValue(one, e.dtype(x), sizes), heads) for one in parts]
    biases = [] if added is None else [e.tensor(added)]
    if mask is not None:
        biases.append(_key_mask(e, node, mask, texts[0]))
    if node.int("unidirectional", 0):
        biases.append(f"run.window_bias({texts[0]}, {texts[1]}.size(2), 0, None, -1, 0)")
    total = e.let(" + ".join(biases), name="bias").text if biases else "None"
    given = f"{', '.join(texts)}, {total}, 0.0, False"
    made = f"torch.ops.aten.scaled_dot_product_attention({given}, scale={_scale(scale)})"
    return TensorValue(f"{made}.transpose(1, 2).flatten(2)", e.dtype(x), sizes)


def _key_mask(e: Emitter, node: NodeView, mask: Value, like: str) -> str:
    """Which keys are seen, as a bias of the finite ``mask_filter_value``."""
    fill = number_text(node.float("mask_filter_value", -10000.0))
    if e.rank(mask) == 2:
        seen = f"{e.tensor(mask)}.unsqueeze(1).unsqueeze(2)"
    elif e.rank(mask) == 1 and e.dims(mask) is not None:
        steps = f"torch.arange({like}.size(2), device={like}.device)"
        seen = f"({steps} < {e.tensor(mask)}.reshape([-1, 1, 1, 1]))"
    else:
        raise NotImported("The mask has another form.")
    return f"(1.0 - {seen}.to({like}.dtype)) * {fill}"


@row("CausalConvWithState")
def causal_conv_with_state(
    e: Emitter,
    node: NodeView,
    x: Value,
    w: Value,
    bias: Value | None = None,
    past: Value | None = None,
) -> tuple[TensorValue, ...]:
    kept, text = e.size(w, 2), e.tensor(x)
    if past is None:
        made = f"torch.constant_pad_nd({text}, [{kept} - 1, 0])"
    else:
        made = f"torch.cat([{e.tensor(past)}, {text}], 2)"
    padded = e.let(made, name="padded").text
    shift = "None" if bias is None else e.tensor(bias)
    y = f"torch.conv1d({padded}, {e.tensor(w)}, {shift}, [1], [0], [1], {e.size(x, 1)})"
    if node.text("activation", "none") != "none":
        y = f"torch.ops.aten.silu({y})"
    state = f"{padded}.narrow(2, {padded}.size(2) - ({kept} - 1), {kept} - 1)"
    results = (
        TensorValue(y, e.dtype(x), e.sizes(x)),
        TensorValue(state, e.dtype(x), (*(e.sizes(x) or ())[:2], None)),
    )
    return results[: len(node.outputs)]
