# SPDX-License-Identifier: Apache-2.0
"""Computation on constants when an engine is loaded: casts, permutations and concatenations of weights.

    %3 = concat %wq %wk %wv                     %3 = packed %wq %wk %wv {pack}
    %4 = cast (permute %w)              ->      %4 = packed (permute %w) {pack}

A ``packed`` value has its own row-major memory. One launch per piece copies (and converts) the constant
there, and repeats only after a write to the constant. So calls do no work on weights.
"""

from collections.abc import Iterator, Sequence

import torch

from blade.backends.disc.gpu.compile.triton_unit import TritonUnit, named_unit
from blade.backends.disc.gpu.emit.pointwise import POINTERS
from blade.backends.disc.ir.constant_parts import ConstantPart, parts_in
from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Value,
    numel,
)
from blade.backends.disc.ir.rewrite import rewrite_values
from blade.backends.disc.ir.views import collapse
from blade.backends.disc.program.instructions import Fill, PackedBuffer

AXES = 4  # axes of a piece after merging, at most
BLOCK = 1024  # elements per program
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


def precompute_constants(graph: Graph) -> Graph:
    """``graph`` with copies, casts and concatenations of constants computed once per loaded engine."""

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        if v.op == "concat" and v.attrs["axis"] == 0:
            return packed(b, args, v)
        if v.op == "cast" and "output" not in v.attrs:
            return packed(b, args, v)
        return None

    return rewrite_values(graph, step)


def packed(b: IrBuilder, pieces: Sequence[Value], like: Value) -> Value | None:
    """``like``, the ``pieces`` along axis 0, computed once; ``None`` if not all pieces are constants."""
    if not like.shape or any(p.dtype != like.dtype for p in pieces if p.op in ("cast", "packed")):
        return None  # it would be rounded twice
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
    pack = PackedBuffer(unit.name, like.dtype, int(numel(like.shape)), found)
    return b.make("packed", sources, like.shape, like.dtype, pack=pack)


def is_known(v: Value) -> bool:
    """Is ``v`` a view of a constant, or a cast of one?"""
    source = v.args[0] if v.op == "cast" else v
    return source.op != "fill" and parts_in((source,)) is not None


def pack_units(graph: Graph) -> Iterator[TritonUnit]:
    """The code that fills the packed values of ``graph``."""
    for v in graph.values:
        if v.op == "packed":
            yield pack_unit(next(s.dtype for s in v.args if s.op != "fill"), v.dtype)


def pack_unit(source: torch.dtype, result: torch.dtype) -> TritonUnit:
    """The kernel that copies up to four axes of ``source`` elements, converted, to row-major ``result``."""
    pointers = (("source", POINTERS[source]), ("result", POINTERS[result]))
    signature = (*pointers, *((name, "i64") for name in _SIZES))
    return named_unit("pack", _TEXT, signature, (("BLOCK", BLOCK),))


def _fill(part: ConstantPart, whole: Value) -> Fill | None:
    """The fill that copies ``part`` of ``whole``; ``None`` if it has too many axes."""
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
