# SPDX-License-Identifier: Apache-2.0
"""What is computed of constants alone, per channel, is computed where it is read.

    %3 = rsqrt %var                         %3 = broadcast %var
    %4 = broadcast %3               ->      %4 = rsqrt %3
    %5 = mul %x %4                          %5 = mul %x %4

The statistics of a batch norm are constants: a launch of its own for a few hundred numbers takes longer than to
compute them again at every point of a kernel that waits for memory.
"""

from blade.backends.disc.ir import Builder, Graph, Value
from blade.backends.disc.rebuild import rebuild

_MOST = 8  # ops: about what a load from memory takes


def compute_where_read(graph: Graph) -> Graph:
    """``graph`` with broadcasts of such values as computations on broadcasts."""
    counts: dict[int, int | None] = {}
    for v in graph.values:
        counts[v.id] = _ops(v, counts)
    few = {k for k, n in counts.items() if n is not None and 0 < n <= _MOST}

    def step(b: Builder, v: Value, args: list[Value]) -> Value | None:
        if v.op != "broadcast" or v.args[0].id not in few:
            return None
        return _Spread(b, v, few).value(v.args[0], args[0])

    return rebuild(graph, step)


def _ops(v: Value, counts: dict[int, int | None]) -> int | None:
    """How many ops make ``v`` of constants; ``None``: it depends on more."""
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


class _Spread:
    """Makes what ``v`` is broadcast from at all of its points."""

    def __init__(self, b: Builder, v: Value, few: set[int]) -> None:
        self.b, self.few = b, few
        self.shape, self.axes = v.shape, v.attrs["axes"]

    def value(self, old: Value, new: Value) -> Value:
        """``new`` is what ``old`` became; both have the shape that is broadcast."""
        if old.op == "fill":
            return self.b.make("fill", (), self.shape, old.dtype, **old.attrs)
        if old.id not in self.few:
            return self.b.make("broadcast", (new,), self.shape, new.dtype, axes=self.axes)
        args = [self.value(a, b) for a, b in zip(old.args, new.args, strict=True)]
        return self.b.make(old.op, args, self.shape, old.dtype, **old.attrs)
