# SPDX-License-Identifier: Apache-2.0
"""How attention of the IR calls the generated kernels: strides, sizes, scratch, units."""

import struct

import sympy
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.cpu import attention_gradient as gradient
from blade.backends.disc.cpu import attention_kernel as kernel
from blade.backends.disc.cpu.attention_block import BLOCK_KEYS
from blade.backends.disc.cpu.attention_tiles import key_rows
from blade.backends.disc.cpu.target import Target
from blade.backends.disc.ir import Shape, Value, numel, plain
from blade.backends.disc.kernel import Dim
from blade.backends.disc.steps import NativeCall
from blade.backends.disc.views import view_of


def attention_call(value: Value, target: Target) -> NativeCall:
    """The call that computes ``value``, an ``attention`` or ``flash_attention``.

    Its operands are addressable, their rows contiguous.
    """
    q, k, v = value.args[:3]
    bias = value.args[3] if len(value.args) == 4 else None
    lead, queries, depth = q.shape[:-2], q.shape[-2], q.shape[-1]
    keys, columns = v.shape[-2:]
    q_lead, k_lead, v_lead = (_strides(x)[:-2] for x in (q, k, v))
    bias_strides = (0,) * len(q.shape) if bias is None else _strides(bias)
    logs = value.op == "flash_attention"
    out, out_row = _packed_strides(value) if logs else _result_strides(value)
    numbers: dict[str, Dim] = {
        "queries": queries,
        "keys": keys,
        "depth": depth,
        "columns": columns,
        "causal": int(value.attrs["causal"]),
        "undefined": int(value.attrs.get("undefined", False)),
        "scale": _bits(value.attrs["scale"]),
        "bias_kind": 0 if bias is None else 2 if value.attrs.get("replaces") else 1,
        "q_row": _strides(q)[-2],
        "k_row": _strides(k)[-2],
        "v_row": _strides(v)[-2],
        "o_row": out_row,
        "bias_query": bias_strides[-2],
        "bias_key": bias_strides[-1],
    }
    named = {"q": q_lead, "k": k_lead, "v": v_lead, "bias": bias_strides[:-2], "o": out}
    numbers |= _padded("n", lead, 1)
    for name, strides in named.items():
        numbers |= _padded(f"{name}_", strides, 0)
    size = kernel.block_queries(target)
    work = sympy.Min(queries, size) * keys * (sympy.sympify(depth) + columns)
    names = kernel.ARGUMENTS
    if logs:
        names = (*names, kernel.LOGS_AT)
        numbers[kernel.LOGS_AT] = numel((*lead, queries, columns))
    return NativeCall(
        kernel.NAME_WITH_LOGS if logs else kernel.NAME,
        plain(numel(lead) * FloorDiv(sympy.sympify(queries) + size - 1, size)),
        plain(FloorDiv(work, 16) + 1),
        _scratch(queries, keys, depth, columns, target),
        (q, k, v, q if bias is None else bias, value),
        tuple(numbers[name] for name in names),
    )


def gradient_call(value: Value, target: Target) -> NativeCall:
    """The call that computes ``value``, a ``flash_attention_gradient``."""
    g, q, k, v, logs, delta = value.args[:6]
    bias = value.args[6] if len(value.args) == 7 else None
    batch, heads, queries, depth = q.shape
    keys, columns = v.shape[-2:]
    strides = {name: _strides(x) for name, x in zip("gqkv", (g, q, k, v), strict=True)}
    strides["bias"] = (0, 0, 0, 0) if bias is None else _strides(bias)
    numbers: dict[str, Dim] = {
        "batch": batch,
        "heads": heads,
        "queries": queries,
        "keys": keys,
        "depth": depth,
        "columns": columns,
        "causal": int(value.attrs["causal"]),
        "scale": _bits(value.attrs["scale"]),
        "has_bias": int(bias is not None),
        **{f"{name}_batch": s[0] for name, s in strides.items()},
        **{f"{name}_head": s[1] for name, s in strides.items()},
        **{f"{name}_row": s[2] for name, s in strides.items() if name != "bias"},
        "bias_query": strides["bias"][2],
        "bias_key": strides["bias"][3],
    }
    size = gradient.lanes_of_unit(target)
    blocks = sum(FloorDiv(sympy.sympify(n) + size - 1, size) for n in (queries, keys))
    work = 2 * size * sympy.Max(queries, keys) * (sympy.sympify(depth) + columns)
    padded = sum(_in_vectors(n, target) for n in (depth, columns))
    return NativeCall(
        gradient.NAME,
        plain(sympy.sympify(batch) * heads * blocks),
        plain(FloorDiv(work, 16) + 1),
        plain(4 * gradient.scratch_floats(target, depth, columns, padded)),
        (g, q, k, v, g if bias is None else bias, logs, delta, value),
        tuple(numbers[name] for name in gradient.ARGUMENTS),
    )


def _bits(number: float) -> int:
    """The pattern of a float."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def _strides(x: Value) -> Shape:
    view = view_of(x)
    assert view is not None, x
    return tuple(0 if d == 1 else s for d, s in zip(x.shape, view.strides, strict=True))


def _result_strides(value: Value) -> tuple[Shape, Dim]:
    """Of the leading axes in the operands' order, and of a query: heads lie within a query's row."""
    strides, heads = _strides(value)[:-1], value.attrs["heads"]
    place = len(strides) - 1 - heads
    return (*strides[:place], *strides[place + 1 :]), strides[place]


def _packed_strides(value: Value) -> tuple[Shape, Dim]:
    """The same of results [B, L, H, E]."""
    _, heads, queries, _ = value.args[0].shape
    columns = value.args[2].shape[-1]
    row = plain(sympy.sympify(heads) * columns)
    return (plain(sympy.sympify(queries) * row), columns), row


def _padded(name: str, dims: Shape, missing: int) -> dict[str, Dim]:
    full = (*[missing] * (kernel.LEAD - len(dims)), *dims)
    return {f"{name}{k}": d for k, d in enumerate(full)}


def _in_vectors(floats: Dim, target: Target) -> sympy.Expr:
    """The next multiple of the lanes."""
    return FloorDiv(sympy.sympify(floats) + target.lanes - 1, target.lanes) * target.lanes


def _scratch(queries: Dim, keys: Dim, depth: Dim, columns: Dim, target: Target) -> Dim:
    """Bytes for either way: blocks of scores, sums and queries, or one row of scores."""
    width = kernel.block_queries(target)
    rows = sympy.Min(keys, BLOCK_KEYS) + key_rows(target)[0]
    padded = _in_vectors(columns, target)
    block = (rows + depth + padded + 4) * width
    # a second block of queries finds the head's keys and values copied
    again = sympy.Min(1, FloorDiv(sympy.sympify(queries) + width - 1, width) - 1)
    copied = sympy.Min(keys, kernel.PACKED_KEYS[1]) * (depth + columns) * sympy.Max(0, again)
    return plain(4 * sympy.Max(block + copied, sympy.sympify(keys) + 2 * target.lanes + 16))
