# SPDX-License-Identifier: Apache-2.0
"""``attention`` by a kernel of ATen's: which of them compute the same, and how a program calls them.

    kernels(value, facts) -> ("flash", "cudnn")        those that take these operands as they lie

Both are for halves without a bias. FlashAttention reads heads of keys that several heads of queries share; cuDNN
plans anew for every shape, which takes as long as thousands of calls, and so is for sizes that are known.
cuDNN attends to masked keys in rows that see nothing: without a bias there are none. Where queries and keys are not
as many, the two do not agree on what is causal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from blade.backends.disc.facts import Facts
from blade.backends.disc.ir import Shape, Value, contiguous_strides, numel
from blade.backends.disc.kernel import Dim
from blade.backends.disc.views import View, reshape_strides, view_of
from blade.exchange.dtypes import DTYPES

if TYPE_CHECKING:
    from blade.backends.disc.program import Writer

HALVES = (torch.float16, torch.bfloat16)
DEEPEST = {"flash": 256, "cudnn": 128}
_VECTOR = 8  # elements that a kernel reads at once, from multiples of as many


@dataclass(frozen=True)
class Heads:
    """An operand as [batch, length, heads, depth], in the memory it lies in."""

    view: View
    shape: Shape

    def by_head(self) -> "Heads":
        """The same as [batch, heads, length, depth]."""
        order = (0, 2, 1, 3)
        strides = tuple(self.view.strides[k] for k in order)
        shape = tuple(self.shape[k] for k in order)
        return Heads(View(self.view.base, strides, self.view.offset), shape)


def kernels(value: Value, facts: Facts) -> tuple[str, ...]:
    """Those that compute ``value``; none that would raise, copy an operand or answer something else."""
    attrs = value.attrs
    operands = operands_of(value)
    if len(value.args) != 3 or value.dtype not in HALVES or operands is None:
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


def operands_of(value: Value) -> tuple[Heads, Heads, Heads] | None:
    """Queries, keys and values; ``None`` where their leading axes are not a batch and heads."""
    found = [_heads(x, k > 0) for k, x in enumerate(value.args[:3])]
    q, k, v = found
    return None if q is None or k is None or v is None else (q, k, v)


def _heads(x: Value, shared: bool) -> Heads | None:
    """``shared``: by heads of queries, along the last leading axis, if there are three."""
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
    return Heads(View(view.base, strides, view.offset), (lead[0], length, lead[1], depth))


def _is_readable(x: Heads, facts: Facts) -> bool:
    *steps, column = x.view.strides
    even = all(facts.divides(_VECTOR, d) for d in (*steps, x.view.offset))
    return column == 1 and even and 0 not in steps


def result_of(value: Value) -> Heads:
    """The result, which is row-major."""
    batch, length, *heads, depth = value.shape
    shape = (batch, length, numel(heads), depth)
    return Heads(View(value, contiguous_strides(shape)), shape)


def write_sdpa(writer: "Writer", value: Value, kernel: str) -> None:
    """The instructions for ``value`` by ``kernel``: a call, and a copy to where its readers look."""
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


def _size(writer: "Writer", dim: Dim) -> str:
    return f"i:{dim}" if isinstance(dim, int) else f"r:{writer.registers.of(dim)}"


def run_sdpa(
    operands: Sequence[torch.Tensor], out: torch.Tensor, value: Value, kernel: str
) -> None:
    """What these instructions do, of tensors [batch, length, heads, depth]."""
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
