# SPDX-License-Identifier: Apache-2.0
"""Attention by ATen's kernels: which of them compute a given ``attention``, and how a program calls them.

    kernels(value, facts) -> ("flash", "cudnn")        kernels that take the operands without copies

Both take 16-bit operands without a bias. FlashAttention supports grouped queries. cuDNN builds a plan per
shape, which takes as long as thousands of calls, and is only used for known sizes. In fully masked rows
cuDNN attends to masked keys; without a bias there are none. If queries and keys differ in number, the two
disagree on the meaning of causal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from blade.backends.disc.ir.graph import (
    Shape,
    Value,
    contiguous_strides,
    numel,
)
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.ir.views import StridedView, reshape_strides, view_of
from blade.core.dtypes import HALVES
from blade.program.dtypes import DTYPES

if TYPE_CHECKING:
    from blade.backends.disc.program.writer import ProgramWriter

DEEPEST = {"flash": 256, "cudnn": 128}
_VECTOR = 8  # elements per read; strides and offsets are multiples of this


@dataclass(frozen=True)
class HeadsView:
    """An operand as a view [batch, length, heads, depth] of its memory."""

    view: StridedView
    shape: Shape

    def by_head(self) -> "HeadsView":
        """The same as [batch, heads, length, depth]."""
        order = (0, 2, 1, 3)
        strides = tuple(self.view.strides[k] for k in order)
        shape = tuple(self.shape[k] for k in order)
        return HeadsView(StridedView(self.view.base, strides, self.view.offset), shape)


def kernels(value: Value, facts: SizeRelations) -> tuple[str, ...]:
    """Kernels that compute ``value`` without raising, copying an operand or giving another result."""
    attrs = value.attrs
    operands = operands_of(value)
    if len(value.args) != 3 or value.dtype not in HALVES or operands is None or attrs["cap"]:
        return ()
    q, k, v = operands
    depth = q.shape[-1]
    if v.shape[-1] != depth or not isinstance(depth, int) or depth % _VECTOR:
        return ()
    if attrs["causal"] and not facts.equal(q.shape[1], k.shape[1]):
        return ()
    if not all(_is_readable(x, facts) for x in operands):
        return ()
    known = all(isinstance(d, int) for x in operands for d in x.shape)
    same = q.shape[2] == k.shape[2]
    taken = {"flash": True, "cudnn": known and same}
    return tuple(name for name, takes in taken.items() if takes and depth <= DEEPEST[name])


def operands_of(value: Value) -> tuple[HeadsView, HeadsView, HeadsView] | None:
    """Queries, keys and values; ``None`` unless their leading axes are a batch and heads."""
    found = [_heads(x, k > 0) for k, x in enumerate(value.args[:3])]
    q, k, v = found
    return None if q is None or k is None or v is None else (q, k, v)


def _heads(x: Value, shared: bool) -> HeadsView | None:
    """``shared``: ``x`` may repeat heads along the last of three leading axes, for grouped queries."""
    view = view_of(x)
    if view is None:
        return None
    *lead, length, depth = x.shape
    *steps, row, column = view.strides
    if len(lead) == 3 and shared and steps[-1] == 0:
        lead, steps = lead[:-1], steps[:-1]
    elif len(lead) == 3:
        merged = reshape_strides(tuple(lead[1:]), tuple(steps[1:]), (numel(lead[1:]),))
        if merged is None:
            return None
        lead, steps = [lead[0], numel(lead[1:])], [steps[0], merged[0]]
    if len(lead) != 2:
        return None
    strides = (steps[0], row, steps[1], column)
    return HeadsView(
        StridedView(view.base, strides, view.offset), (lead[0], length, lead[1], depth)
    )


def _is_readable(x: HeadsView, facts: SizeRelations) -> bool:
    *steps, column = x.view.strides
    even = all(facts.divides(_VECTOR, d) for d in (*steps, x.view.offset))
    return column == 1 and even and 0 not in steps


def result_of(value: Value) -> HeadsView:
    """The result, in row-major order."""
    batch, length, *heads, depth = value.shape
    shape = (batch, length, numel(heads), depth)
    return HeadsView(StridedView(value, contiguous_strides(shape)), shape)


def write_sdpa(writer: "ProgramWriter", value: Value, kernel: str) -> None:
    """The instructions for ``value`` by ``kernel``: a call, and a copy to the value's own buffer."""
    operands = operands_of(value)
    assert operands is not None, value
    result = result_of(value)
    if kernel == "cudnn":
        operands = tuple(x.by_head() for x in operands)  # type: ignore[assignment]
        result = result.by_head()
    slots = " ".join(f"t:{writer.view(x.view, x.shape)}" for x in operands)
    causal, scale = int(value.attrs["causal"]), f"f:{value.attrs['scale']!r}"
    words = [*writer.numbers(result.shape), *writer.numbers(result.view.strides)]
    found = writer.add_slot(" ".join(["dyn", DTYPES[value.dtype], "4", *words]))
    if kernel == "flash":
        lengths = " ".join(_size(writer, x.shape[1]) for x in operands[:2])
        arguments = f"11 {slots} n n {lengths} f:0.0 b:{causal} b:0 {scale}"
        writer.emit([f"call aten::_flash_attention_forward {arguments} 1 {found}"])
    else:
        arguments = f"9 {slots} n b:0 f:0.0 b:{causal} b:0 {scale}"
        writer.emit([f"call aten::_scaled_dot_product_cudnn_attention {arguments} 1 {found}"])
    writer.emit([f"call aten::copy_ 3 t:{writer.view(result.view, result.shape)} t:{found} b:0 0"])


def _size(writer: "ProgramWriter", dim: Dim) -> str:
    return f"i:{dim}" if isinstance(dim, int) else f"r:{writer.registers.of(dim)}"


def run_sdpa(
    operands: Sequence[torch.Tensor], out: torch.Tensor, value: Value, kernel: str
) -> None:
    """Run what these instructions do, on tensors [batch, length, heads, depth]."""
    q, k, v = operands
    causal, scale = bool(value.attrs["causal"]), float(value.attrs["scale"])
    if kernel == "flash":
        sizes = (None, None, q.shape[1], k.shape[1])
        op = torch.ops.aten._flash_attention_forward.default
        found = op(q, k, v, *sizes, 0.0, causal, False, scale=scale)[0]
    else:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        call = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        found = call(q, k, v, None, False, 0.0, causal, False, scale=scale)[0].transpose(1, 2)
    out.copy_(found)
