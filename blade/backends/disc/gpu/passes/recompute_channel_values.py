# SPDX-License-Identifier: Apache-2.0
"""Per-channel values that depend only on constants are recomputed in the kernels that read them.

    %3 = rsqrt %var                         %3 = broadcast %var
    %4 = broadcast %3               ->      %4 = rsqrt %3
    %5 = mul %x %4                          %5 = mul %x %4

The statistics of a batch norm are constants. A separate launch for a few hundred numbers takes longer than
recomputing them at every point of a kernel that is bound by memory.
"""

from blade.backends.disc.ir.graph import Graph, IrBuilder, Value
from blade.backends.disc.ir.rewrite import rewrite_values

_MOST = 8  # ops, at most: about the time of a load from memory


def recompute_channel_values(graph: Graph) -> Graph:
    """``graph`` with broadcasts of such values replaced by computations on broadcasts."""
    counts: dict[int, int | None] = {}
    for v in graph.values:
        counts[v.id] = _ops(v, counts)
    few = {k for k, n in counts.items() if n is not None and 0 < n <= _MOST}

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.op != "broadcast" or v.args[0].id not in few:
            return None
        return _Recomputation(b, v, few).value(v.args[0], args[0])

    return rewrite_values(graph, step)


def _ops(v: Value, counts: dict[int, int | None]) -> int | None:
    """The number of ops that compute ``v`` from constants; ``None``: it depends on other values."""
    if v.op in ("const", "packed", "fill"):
        return 0
    if v.is_layout and v.op != "broadcast":
        inner = counts[v.args[0].id]
        return 0 if inner == 0 else None
    if not v.is_pointwise:
        return None
    below = [counts[a.id] for a in v.args]
    known = [n for n in below if n is not None]
    return (v.op != "cast") + sum(known) if len(known) == len(below) else None


class _Recomputation:
    """Recomputes the operand of the broadcast ``v`` at all points of ``v``."""

    def __init__(self, b: IrBuilder, v: Value, few: set[int]) -> None:
        self.b, self.few = b, few
        self.shape, self.axes = v.shape, v.attrs["axes"]

    def value(self, old: Value, new: Value) -> Value:
        """The broadcast of ``new``, the rewritten ``old``; both have the shape of the operand."""
        if old.op == "fill":
            return self.b.make("fill", (), self.shape, old.dtype, **old.attrs)
        if old.id not in self.few:
            return self.b.make("broadcast", (new,), self.shape, new.dtype, axes=self.axes)
        args = [self.value(a, b) for a, b in zip(old.args, new.args, strict=True)]
        return self.b.make(old.op, args, self.shape, old.dtype, **old.attrs)
