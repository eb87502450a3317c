# SPDX-License-Identifier: Apache-2.0
"""What is known once an engine is loaded, computed then: weights cast, permuted, side by side.

    %3 = concat %wq %wk %wv                     %3 = packed %wq %wk %wv {pack}
    %4 = cast (permute %w)              ->      %4 = packed (permute %w) {pack}

A ``packed`` value has memory of its own, row-major; one launch per piece copies (and converts) it there, and
again only when somebody wrote to the constant. So no call does work on weights.
"""

from collections.abc import Iterator, Sequence

import torch

from blade.backends.disc.constants import Part, parts_in
from blade.backends.disc.gpu.pointwise import POINTERS
from blade.backends.disc.gpu.unit import Unit, named
from blade.backends.disc.ir import Builder, Graph, Value, numel
from blade.backends.disc.rebuild import rebuild
from blade.backends.disc.steps import Fill, Packed
from blade.backends.disc.views import collapse

AXES = 4  # of a piece, after merging
BLOCK = 1024  # elements of a program
_TEXT = """\
import triton
import triton.language as tl


@triton.jit
def kernel(source, result, offset, d1, d2, d3, s0, s1, s2, s3, first, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rest = i
    place = offset + (rest % d3) * s3
    rest = rest // d3
    place += (rest % d2) * s2
    rest = rest // d2
    place += (rest % d1) * s1 + (rest // d1) * s0
    value = tl.load(source + place, i < count)
    tl.store(result + first + i, value.to(result.dtype.element_ty), i < count)
"""
_SIZES = "offset d1 d2 d3 s0 s1 s2 s3 first count".split()


def precompute(graph: Graph) -> Graph:
    """``graph`` with copies, casts and concatenations of constants made once per loaded engine."""

    def step(b: Builder, v: Value, args: list[Value]) -> Value | None:
        if v.op == "concat" and v.attrs["axis"] == 0:
            return packed(b, args, v)
        if v.op == "cast" and "output" not in v.attrs:
            return packed(b, args, v)
        return None

    return rebuild(graph, step)


def packed(b: Builder, pieces: Sequence[Value], like: Value) -> Value | None:
    """``pieces`` along axis 0, as ``like`` has them, computed once; ``None`` if not all are constants."""
    if not like.shape or any(p.dtype != like.dtype for p in pieces if p.op in ("cast", "packed")):
        return None  # rounded twice
    sources = [s for p in pieces for s in (p.args if p.op in ("cast", "packed") else (p,))]
    kinds = {s.dtype for s in sources if s.op != "fill"}
    if len(kinds) != 1 or not (kinds | {like.dtype}) <= POINTERS.keys():
        return None
    parts = parts_in(sources)
    fills = [_fill(part, like) for part in parts or ()]
    found = tuple(f for f in fills if f is not None)
    if not found or len(found) != len(fills):
        return None
    unit = pack_unit(next(iter(kinds)), like.dtype)
    pack = Packed(unit.name, like.dtype, int(numel(like.shape)), found)
    return b.make("packed", sources, like.shape, like.dtype, pack=pack)


def is_known(v: Value) -> bool:
    """Whether ``v`` is a view of a constant, or that converted."""
    source = v.args[0] if v.op == "cast" else v
    return source.op != "fill" and parts_in((source,)) is not None


def pack_units(graph: Graph) -> Iterator[Unit]:
    """The code that ``graph``'s packed values need."""
    for v in graph.values:
        if v.op == "packed":
            yield pack_unit(next(s.dtype for s in v.args if s.op != "fill"), v.dtype)


def pack_unit(source: torch.dtype, result: torch.dtype) -> Unit:
    """Copies up to four axes of ``source``'s elements, converted, to row-major ``result``."""
    pointers = (("source", POINTERS[source]), ("result", POINTERS[result]))
    signature = (*pointers, *((name, "i64") for name in _SIZES))
    return named("pack", _TEXT, signature, (("BLOCK", BLOCK),))


def _fill(part: Part, whole: Value) -> Fill | None:
    """The run that copies ``part`` of ``whole``; ``None`` if it has too many axes."""
    rest = whole.shape[1:]
    dims, columns = collapse((part.size, *rest), [part.strides])
    sizes = [1] * (AXES - len(dims)) + [int(d) for d in dims]
    steps = [0] * (AXES - len(dims)) + [int(s) for s in columns[0]]
    if len(sizes) > AXES:
        return None
    row = int(numel(rest))
    count = part.size * row
    ints = (part.offset, *sizes[1:], *steps, part.first * row, count)
    return Fill(part.constant, -(-count // BLOCK), ints)
