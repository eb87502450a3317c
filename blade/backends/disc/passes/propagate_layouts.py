# SPDX-License-Identifier: Apache-2.0
"""Layout propagation: permutations move through the ops between two convolutions until they cancel.

    propagate(graph) -> graph

First every permutation sinks towards the results: an op on permuted operands is computed on the original
values, and its result is permuted instead. A permutation that meets its inverse disappears, so values are
computed in the memory order of the convolutions around them. A remaining permutation that would need a
copy, before a convolution or at an output, is hoisted above the op before it (hoist_permutes.py).
"""

from collections.abc import Mapping, Sequence

from blade.backends.disc.ir.graph import (
    LEAVES,
    Graph,
    IrBuilder,
    Rule,
    Value,
    numel,
    plain,
    rewrite,
)
from blade.backends.disc.ir.kernel import POINTWISE
from blade.backends.disc.ir.simplify import RULES
from blade.backends.disc.ir.views import blocks, view_of
from blade.backends.disc.passes.hoist_permutes import hoist_permutes, inverse


def propagate(graph: Graph, transposed: bool = False) -> Graph:
    """``graph`` with as few permutations of large values as these rules achieve.

    ``transposed``: products read transposed matrices as they lie.
    """
    if not any(v.op == "permute" for v in graph.values):
        return graph
    return hoist_permutes(rewrite(graph, _SINKING), _VIEWS, transposed)


def permute_of_broadcast(b: IrBuilder, v: Value) -> Value | None:
    """Permute the operand of a broadcast, which is smaller, and adjust its axes."""
    inner = v.args[0]
    if inner.op != "broadcast":
        return None
    places = [v.attrs["perm"].index(axis) for axis in inner.attrs["axes"]]
    order = sorted(range(len(places)), key=lambda k: places[k])
    core = b.permute(inner.args[0], order)
    return b.make("broadcast", (core,), v.shape, v.dtype, axes=tuple(sorted(places)))


def permute_of_unit_axes(b: IrBuilder, v: Value) -> Value | None:
    """A permutation that only moves axes of size 1 is a reshape."""
    inner = v.args[0]
    moved = [p for p in v.attrs["perm"] if inner.shape[p] != 1]
    return b.reshape(inner, v.shape) if moved == sorted(moved) else None


def permute_of_copy(b: IrBuilder, v: Value) -> Value | None:
    """A permutation of a reshape that copies, as it merges axes which do not lie side by side: copy in its order."""
    inner = v.args[0]
    if inner.op != "reshape" or inner.args[0].op != "permute":
        return None
    pairs = blocks(inner.args[0].shape, inner.shape)
    if not pairs or any(len(made) != 1 for _, made in pairs):
        return None
    merged = {made[0]: axes for axes, made in pairs}
    order = [axis for k in v.attrs["perm"] for axis in merged[k]]
    return b.reshape(b.permute(inner.args[0], order), v.shape)


def sink_pointwise(b: IrBuilder, v: Value) -> Value | None:
    perm = _leading(v.args)
    if perm is None:
        return None
    back = inverse(perm)
    operands = [b.permute(a, back) for a in v.args]
    shape = [v.shape[k] for k in back]
    return b.permute(b.make(v.op, operands, shape, v.dtype, **v.attrs), perm)


def sink_concat(b: IrBuilder, v: Value) -> Value | None:
    perm = _leading(v.args)
    if perm is None:
        return None
    back = inverse(perm)
    operands = [b.permute(a, back) for a in v.args]
    shape = [v.shape[k] for k in back]
    joined = b.make("concat", operands, shape, v.dtype, axis=perm[v.attrs["axis"]])
    return b.permute(joined, perm)


def sink_reduce(b: IrBuilder, v: Value) -> Value | None:
    inner = v.args[0]
    if inner.op != "permute":
        return None
    perm = inner.attrs["perm"]
    return b.permute(
        b.reduce(v.attrs["kind"], inner.args[0], [perm[a] for a in v.attrs["axes"]]), perm
    )


def reduce_of_copy(b: IrBuilder, v: Value) -> Value | None:
    """Reduce where they lie the elements that a reshape would copy, as it merges axes of which some are reduced."""
    wide = v.args[0]
    copied = wide.args[0] if wide.op == "cast" else wide
    if copied.op != "reshape" or copied.args[0].op != "permute" or view_of(copied) is not None:
        return None
    source = copied.args[0]
    pairs = blocks(source.shape, copied.shape)
    if not pairs or any(len(made) != 1 for _, made in pairs):
        return None
    merged = {made[0]: axes for axes, made in pairs}
    axes = [axis for k in v.attrs["axes"] for axis in merged[k]]
    elements = b.cast(source, wide.dtype)
    return b.reshape(b.reduce(v.attrs["kind"], elements, axes), v.shape)


def sink_slice(b: IrBuilder, v: Value) -> Value | None:
    inner = v.args[0]
    if inner.op != "permute":
        return None
    perm = inner.attrs["perm"]
    back = inverse(perm)
    part = b.make(
        "slice",
        inner.args,
        [v.shape[k] for k in back],
        v.dtype,
        starts=tuple(v.attrs["starts"][k] for k in back),
        steps=tuple(v.attrs["steps"][k] for k in back),
    )
    return b.permute(part, perm)


def slice_of_copy(b: IrBuilder, v: Value) -> Value | None:
    """Slice before a reshape that copies, where the slice is whole steps of the first axis that the reshape merges, and
    is not copied.
    """
    copied = v.args[0]
    sliced = [k for k, d in enumerate(copied.shape) if v.shape[k] != d]
    if copied.op != "reshape" or len(sliced) != 1 or view_of(copied) is not None:
        return None
    (axis,) = sliced
    source = copied.args[0]
    merged = next((old for old, made in blocks(source.shape, copied.shape) if made == [axis]), None)
    if merged is None:
        return None
    step, start = numel([source.shape[k] for k in merged[1:]]), v.attrs["starts"][axis]
    numbers = (step, start, v.shape[axis])
    if v.attrs["steps"][axis] != 1 or not all(
        isinstance(n, int) and n % step == 0 for n in numbers
    ):
        return None
    part = b.slice(source, merged[0], start // step, 1, plain(v.shape[axis] // step))
    made = b.reshape(part, v.shape)
    return None if view_of(made) is None else made


def sink_reshape(b: IrBuilder, v: Value) -> Value | None:
    """Sink below a reshape that only splits and merges axes adjacent before the permutation too."""
    found = _unpermuted(b, v.args[0])
    if found is None:
        return None
    source, perm = found
    old = v.args[0].shape
    pairs = blocks(old, v.shape)
    if not pairs:
        return None
    present = [k for k, d in enumerate(source.shape) if d != 1]
    runs = [[present.index(perm[k]) for k in axes if old[k] != 1] for axes, _ in pairs]
    if any(run != list(range(run[0], run[0] + len(run))) for run in runs):
        return None
    order = sorted(range(len(pairs)), key=lambda k: runs[k][0])
    stored = [axis for k in order for axis in pairs[k][1]]  # the result's axes in memory order
    return b.permute(b.reshape(source, [v.shape[a] for a in stored]), inverse(stored))


def _unpermuted(b: IrBuilder, v: Value) -> tuple[Value, Sequence[int]] | None:
    """(value, perm) such that ``v`` is that permutation of the value.

    Axes that a broadcast adds follow the axis before them: a pixel and its repetitions.
    """
    if v.op == "permute":
        return v.args[0], v.attrs["perm"]
    if v.op != "broadcast" or v.args[0].op != "permute":
        return None
    core, axes = v.args[0], v.attrs["axes"]
    ends = [*axes[1:], len(v.shape)]
    order = inverse(core.attrs["perm"])
    stored = [*range(axes[0]), *(a for k in order for a in range(axes[k], ends[k]))]
    places = tuple(stored.index(axes[k]) for k in order)
    shape = [v.shape[a] for a in stored]
    return b.make("broadcast", core.args, shape, v.dtype, axes=places), inverse(stored)


def _leading(operands: Sequence[Value]) -> Sequence[int] | None:
    """The permutation of most full-size operands; ``None`` if it is the identity.

    Computed results count before operands from outside. The choice depends only on how the operands lie
    relative to each other: for the same operands without that permutation it is the identity.
    """
    known: dict[tuple[int, ...], list[int]] = {}
    for place, a in enumerate(operands):
        if a.op not in LEAVES and a.op != "broadcast":
            perm = a.attrs["perm"] if a.op == "permute" else tuple(range(len(a.shape)))
            known.setdefault(perm, []).append(place)
    if not known:
        return None

    def weight(perm: tuple[int, ...]) -> tuple[int, int, int]:
        inside = sum(not _is_outside(operands[k]) for k in known[perm])
        return inside, len(known[perm]), -known[perm][0]

    best = max(known, key=weight)
    return None if best == tuple(range(len(best))) else best


def _is_outside(v: Value) -> bool:
    while v.is_layout:
        v = v.args[0]
    return v.op in ("input", "const")


_VIEWS: Mapping[str, Sequence[Rule]] = {
    **RULES,
    "permute": [*RULES["permute"], permute_of_broadcast, permute_of_unit_axes, permute_of_copy],
}
_SINKING: Mapping[str, Sequence[Rule]] = {
    **_VIEWS,
    **{op: [*RULES[op], sink_pointwise] for op in POINTWISE},
    "reduce": [*RULES.get("reduce", ()), sink_reduce, reduce_of_copy],
    "slice": [*RULES["slice"], sink_slice, slice_of_copy],
    "reshape": [*RULES["reshape"], sink_reshape],
    "concat": [*RULES["concat"], sink_concat],
}
