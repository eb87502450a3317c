# SPDX-License-Identifier: Apache-2.0
"""Launches for an ``attention`` of the IR: tiles by lengths and head size, operands by their strides.

Queries, keys and values are read in place, even inside a merged product; a broadcast bias has stride 0. If
several heads share their keys and have one query each, their queries are packed into one head. Short
sequences need many small blocks of queries, long sequences few large ones. With fewer blocks than
multiprocessors and many keys, several programs split a block's keys (Flash-Decoding, Dao et al. 2023), and
a second launch combines their results. Of many keys under a bias that heads share, as masks are, those that no query of
a block sees are left out: a launch before finds the first and the last that one sees.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Min, Mod

from blade.backends.disc.gpu.attention.template import (
    attention_text,
    bounds_text,
    combine_text,
)
from blade.backends.disc.gpu.attention.tile_table import (
    AttentionTile,
    AttentionTiles,
    padded,
    parts_of,
    tiles,
)
from blade.backends.disc.gpu.compile.triton_unit import LaunchChoice, condition, named_unit
from blade.backends.disc.gpu.emit.library_launch import LibraryLaunch, pointer, starts_aligned
from blade.backends.disc.gpu.emit.specialize_sizes import SpecializedSizes, specialize_sizes
from blade.backends.disc.gpu.emit.tiling import ceil_div
from blade.backends.disc.ir.attention import bias_and_sink
from blade.backends.disc.ir.graph import (
    Shape,
    Value,
    numel,
    plain,
)
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.ir.views import view_of
from blade.backends.disc.program.instructions import ScratchBuffer
from blade.backends.disc.target.gpu import GpuTarget
from blade.core.hidden_keys import NEVER, SEEN

LARGEST_HEAD = 256
FEW_QUERIES = 32
MOST_PARTS = 32  # programs that split a block's keys, at most
FEWEST_KEYS = 512  # keys from which the split pays
SHORT_KEYS = 256
FEW_KEYS = 64
EVEN = 8
BOUNDED_KEYS = 1024  # keys from which it pays to look for those that a query sees
SHARED_BIAS = 4  # heads with one bias from which it does
MUCH = 16 << 20  # bytes of keys and values of few queries from which it does for these
ROWS = 16  # queries whose keys are looked for together,
CHUNK = 512  # so many keys at a time
_HIDDEN = {"NEVER": NEVER, "SEEN": SEEN}
_LOG2E = math.log2(math.e)


def serves(value: Value) -> bool:
    """Is there a kernel for these dtypes and head sizes?"""
    dtypes = {x.dtype for x in value.args[:3]}
    depth, columns = value.args[0].shape[-1], value.args[2].shape[-1]
    known = isinstance(depth, int) and isinstance(columns, int)
    floats = dtypes in ({torch.float16}, {torch.bfloat16}, {torch.float32})
    return known and floats and 0 < depth <= LARGEST_HEAD and 0 < columns <= LARGEST_HEAD


def attention(
    value: Value, target: GpuTarget, facts: SizeRelations, elsewhere: sympy.Basic = sympy.false
) -> list[LibraryLaunch] | None:
    """The launches that compute ``value`` unless ``elsewhere`` holds; ``None`` if no kernel fits."""
    if not serves(value):
        return None
    call = _AttentionLaunches(value, target, facts, elsewhere)
    each = [launch for launches in call.each() for launch in launches]
    return [launch for launch in each if launch.choice.when != sympy.false]


def long_class(value: Value, target: GpuTarget) -> sympy.Basic:
    """Condition of long attentions, where ATen may win: not few keys, more queries than run at once."""
    return sympy.And(*_AttentionLaunches(value, target, SizeRelations(), sympy.false).is_long())


def attention_key(value: Value) -> str:
    """Equal for attentions with equal launches, such as those of a model's layers."""
    views = [view_of(x) for x in value.args]
    layouts = [(x.shape, v.strides, v.offset) for x, v in zip(value.args, views, strict=True) if v]
    return repr((value.dtype, value.shape, layouts, dict(value.attrs)))


class _AttentionLaunches:
    """``packed``: with one query, the last leading axis (heads that share keys) becomes the queries' axis."""

    def __init__(
        self,
        value: Value,
        target: GpuTarget,
        facts: SizeRelations,
        elsewhere: sympy.Basic = sympy.false,
        packed: bool = False,
    ) -> None:
        self.value = value
        self.elsewhere = elsewhere
        self.packed = packed
        self.target = target
        self.facts = facts
        self.q, self.k, self.v = value.args[:3]
        self.bias, self.sink = bias_and_sink(value)
        self.row = -3 if packed else -2  # the axis of the queries
        self.lead = self.q.shape[: self.row]
        self.queries, self.depth = self.q.shape[self.row], int(self.q.shape[-1])
        self.keys, self.columns = self.v.shape[-2], int(self.v.shape[-1])

    def each(self) -> Iterator[list[LibraryLaunch]]:
        """The launches of every class of lengths."""
        found = self.tiles
        many, waves, keys = self.is_long()
        few, short = sympy.Not(many), sympy.Not(keys)
        one = self.is_packable()
        if one != sympy.false:
            packed = _AttentionLaunches(self.value, self.target, self.facts, packed=True)
            yield from packed.launch_few(one)
        yield from self.launch_few(sympy.And(few, sympy.Not(one)))
        many = sympy.And(many, sympy.Not(self.elsewhere))
        when: dict[AttentionTile, list[sympy.Basic]] = {}  # equal tiles share a launch
        when.setdefault(found.alone, []).append(sympy.Not(waves))
        when.setdefault(found.short, []).append(sympy.And(waves, short))
        large = self.is_large()
        when.setdefault(found.long, []).append(sympy.And(waves, keys, sympy.Not(large)))
        if found.large is not None:
            when.setdefault(found.large, []).append(sympy.And(waves, keys, large))
        even = self.even() if found.even is not None else sympy.false
        if found.even is not None:
            yield from self.launch_many(found.even, sympy.And(many, even), EVEN)
        for tile, cases in when.items():
            every = sympy.true if len(when) == 1 else sympy.Or(*cases)
            yield from self.launch_many(tile, sympy.And(many, sympy.Not(even), every))

    def launch_many(
        self, tile: AttentionTile, when: sympy.Basic, even: int = 1
    ) -> Iterator[list[LibraryLaunch]]:
        """Launches for many queries: with and without a look at the bias first."""
        bounded = self.is_bounded()
        if bounded != sympy.false:
            yield self.launch_bounded(tile, sympy.And(when, bounded), even)
        yield [self.launch(tile, sympy.And(when, sympy.Not(bounded)), even)]

    def launch_few(self, when: sympy.Basic) -> Iterator[list[LibraryLaunch]]:
        """Launches for few queries: with and without a split of a block's keys, or a look at the bias first."""
        few, wide = self.tiles.few, self.tiles.wide
        share, much = self.shares(wide), self.is_much()
        alone = sympy.And(when, sympy.Not(share))
        for here, finds in ((much, True), (sympy.Not(much), False)):
            yield self.launch_shared(wide, sympy.And(when, share, here), finds)
            if wide == few or self.facts.equal(self.queries, self.keys):
                yield [self.launch(few, sympy.And(alone, here), finds=finds)]
                continue
            keys = _relation(sympy.Gt(self.keys, FEW_KEYS))
            if not finds:
                yield [self.launch(few, sympy.And(alone, here, sympy.Not(keys)))]
            yield [self.launch(wide, sympy.And(alone, here, keys), finds=finds)]

    def is_packable(self) -> sympy.Basic:
        """Condition: one query, and keys that several heads share."""
        shared = len(self.lead) > 1 and self.lead[-1] != 1 and not self.value.attrs["causal"]
        if not shared or any(_strides(x)[-3] != 0 for x in (self.k, self.v)):
            return sympy.false
        return _relation(sympy.Eq(self.queries, 1))

    def is_long(self) -> tuple[sympy.Basic, sympy.Basic, sympy.Basic]:
        """Conditions: many queries, many blocks of queries, many keys."""
        return (
            _relation(sympy.Gt(self.queries, FEW_QUERIES)),
            _relation(sympy.Gt(self.blocks(self.tiles.alone), self.at_once)),
            _relation(sympy.Gt(self.keys, SHORT_KEYS)),
        )

    def is_large(self) -> sympy.Basic:
        """Condition: more of the largest blocks of queries than run at once."""
        if self.tiles.large is None:
            return sympy.false
        return _relation(sympy.Gt(self.blocks(self.tiles.large), self.at_once))

    @property
    def at_once(self) -> int:
        """The number of programs that are certain to run at once."""
        return 2 * self.target.multiprocessors

    @cached_property
    def tiles(self) -> AttentionTiles:
        causal = bool(self.value.attrs["causal"])
        found = tiles(self.depth, self.columns, self.q.dtype, self.matrix, causal)
        return found.fitted(self.depth, self.columns, self.q.dtype, self.target.shared)

    def even(self) -> sympy.Basic:
        """Condition: rows of a full bias begin at multiples of EVEN elements, so that loads are vectors."""
        assert self.bias is not None
        *rows, step = _strides(self.bias)
        if step != 1 or not starts_aligned(self.bias, self.facts):
            return sympy.false
        open_ = [s for s in (self.keys, *rows) if not self.facts.divides(EVEN, s)]
        return sympy.And(*(_relation(sympy.Eq(Mod(s, EVEN), 0)) for s in open_))

    def shares(self, tile: AttentionTile) -> sympy.Basic:
        """Condition: several programs split the keys of a block."""
        if self.value.attrs["causal"] or self.facts.equal(self.queries, self.keys):
            return sympy.false
        few = _relation(sympy.Le(self.blocks(tile) * 2, self.target.multiprocessors))
        return sympy.And(few, _relation(sympy.Ge(self.keys, FEWEST_KEYS)))

    def parts(self, tile: AttentionTile) -> Dim:
        """The number of programs per block: as many as run at once, each with at least one tile of keys."""
        at_once = FloorDiv(sympy.Integer(2 * self.target.multiprocessors), self.blocks(tile))
        return plain(Min(Min(at_once, MOST_PARTS), sympy.sympify(ceil_div(self.keys, tile.keys))))

    def blocks(self, tile: AttentionTile) -> sympy.Expr:
        per_head = FloorDiv(sympy.sympify(self.queries) + tile.queries - 1, tile.queries)
        return sympy.sympify(numel(self.lead)) * per_head

    def launch(
        self, tile: AttentionTile, when: sympy.Basic, even: int = 1, finds: bool = False
    ) -> LibraryLaunch:
        numbers = specialize_sizes({**self.numbers(), **self.out_numbers()}, self.facts)
        out = {"out": self.value}
        return self.made(tile, when, numbers, out, self.blocks(tile), even, finds)

    def launch_shared(
        self, tile: AttentionTile, when: sympy.Basic, finds: bool
    ) -> list[LibraryLaunch]:
        parts = self.parts(tile)
        rows = 2 * self.target.multiprocessors * tile.queries  # an upper bound of the programs
        results = {
            "sums": ScratchBuffer(torch.float32, rows * self.columns),
            "totals": ScratchBuffer(torch.float32, rows),
            "tops": ScratchBuffer(torch.float32, rows),
        }
        numbers = specialize_sizes({**self.numbers(), "PARTS": parts}, self.facts)
        grid = self.blocks(tile) * parts
        made = self.made(tile, when, numbers, results, grid, finds=finds)
        return [made, self.combine(when, results, parts)]

    def launch_bounded(
        self, tile: AttentionTile, when: sympy.Basic, even: int
    ) -> list[LibraryLaunch]:
        groups = FloorDiv(sympy.sympify(self.queries) + ROWS - 1, ROWS) if self.matrix else 1
        strides: list[Dim] = [0] * len(self.lead)
        size = sympy.sympify(groups)
        for k in reversed(self.bias_axes):
            strides[k] = plain(size * 2)
            size = size * self.lead[k]
        bounds = ScratchBuffer(torch.int32, plain(size * 2))
        results: dict[str, Value | ScratchBuffer] = {"bounds": bounds, "out": self.value}
        numbers = {**self.numbers(), **_numbered("BOUNDS", strides), **self.out_numbers()}
        known = specialize_sizes(numbers, self.facts)
        made = self.made(tile, when, known, results, self.blocks(tile), even)
        return [self.find_bounds(when, bounds, size, even), made]

    def find_bounds(
        self, when: sympy.Basic, bounds: ScratchBuffer, programs: sympy.Expr, even: int
    ) -> LibraryLaunch:
        """The launch that fills ``bounds``: a program for each ROWS queries with a bias of their own."""
        assert self.bias is not None
        steps = _strides(self.bias)
        sizes = {f"N{place}": self.lead[k] for place, k in enumerate(self.bias_axes) if place}
        sizes |= {"L": self.queries, "S": self.keys}
        sizes |= {"BIAS_QUERY": steps[self.row], "BIAS_KEY": steps[-1]}
        sizes |= _numbered("BIAS", [steps[k] for k in self.bias_axes])
        numbers = specialize_sizes(sizes, self.facts)
        operands: dict[str, Value | ScratchBuffer] = {"bias": self.bias, "bounds": bounds}
        constants = {
            "ROWS": ROWS if self.matrix else 1,
            "CHUNK": CHUNK,
            "BIAS_ROWS": self.matrix,
            "EVEN": even,
            **_HIDDEN,
        }
        unit = named_unit(
            "attention_bounds",
            bounds_text(numbers.names, len(self.bias_axes), self.target.starts_early),
            (*((n, pointer(x)) for n, x in operands.items()), *numbers.signature),
            (*numbers.constants, *constants.items()),
            (*self.aligned(operands), *numbers.aligned),
            warps=8,
            early=self.target.starts_early,
        )
        choice = LaunchChoice(condition(when), unit, (plain(programs), 1, 1))
        return LibraryLaunch(choice, tuple(operands.values()), numbers.values)

    def made(
        self,
        tile: AttentionTile,
        when: sympy.Basic,
        numbers: SpecializedSizes,
        results: Mapping[str, Value | ScratchBuffer],
        grid: sympy.Expr,
        even: int = 1,
        finds: bool = False,
    ) -> LibraryLaunch:
        """A launch that writes to ``results``: partial results of several programs, or the final one.

        ``finds``: it finds out first which keys are seen.
        """
        shared, bounded = "sums" in results, "bounds" in results
        seen = "bounds" if bounded else "find" if finds else ""
        early = self.target.starts_early
        bias = self.q if self.bias is None else self.bias
        sink = {} if self.sink is None else {"sink": self.sink}
        operands = {"q": self.q, "k": self.k, "v": self.v, "bias": bias, **sink, **results}
        pointers = tuple((n, pointer(x)) for n, x in operands.items())
        exact = bounded and self.facts.divides(tile.keys, self.keys)
        constants = {**dict(self.constants(tile)), "EVEN": even, "EXACT": exact}
        if bounded:
            constants["ROWS"] = ROWS
        if finds:
            rows = tile.queries if self.matrix else 1
            constants |= {"ROWS": rows, "CHUNK": CHUNK * 2 // min(rows, 8), **_HIDDEN}
        unit = named_unit(
            "attention",
            attention_text(
                numbers.names, len(self.lead), shared, early, seen, self.sink is not None
            ),
            (*pointers, *numbers.signature),
            (*numbers.constants, *constants.items()),
            (*self.aligned(operands), *numbers.aligned),
            tile.warps,
            tile.stages,
            early,
            tile.registers,
        )
        choice = LaunchChoice(condition(when), unit, (plain(grid), 1, 1))
        return LibraryLaunch(choice, tuple(operands.values()), numbers.values)

    def combine(
        self, when: sympy.Basic, parts: Mapping[str, Value | ScratchBuffer], count: Dim
    ) -> LibraryLaunch:
        numbers = specialize_sizes(
            {**self.out_numbers(), **self.sizes(), "PARTS": count}, self.facts
        )
        operands = {**parts, "out": self.value}
        pointers = tuple((n, pointer(x)) for n, x in operands.items())
        constants = {
            "E": self.columns,
            "BLOCK_E": padded(self.columns),
            "UNDEFINED": self.value.attrs["undefined"],
            "MOST": MOST_PARTS,
        }
        unit = named_unit(
            "attention_combine",
            combine_text(numbers.names, len(self.lead), self.target.starts_early),
            (*pointers, *numbers.signature),
            (*numbers.constants, *constants.items()),
            (*self.aligned(operands), *numbers.aligned),
            early=self.target.starts_early,
        )
        grid = plain(sympy.sympify(numel(self.lead)) * self.queries)
        choice = LaunchChoice(condition(when), unit, (grid, 1, 1))
        return LibraryLaunch(choice, tuple(operands.values()), numbers.values)

    @property
    def bias_axes(self) -> list[int]:
        """The leading axes along which the bias differs."""
        steps = () if self.bias is None else _strides(self.bias)[: self.row]
        return [k for k, step in enumerate(steps) if step != 0]

    @property
    def hides(self) -> bool:
        """Whether a bias may hide keys, so that they need not be read."""
        attrs = self.value.attrs
        return self.bias is not None and attrs["hides"] and not attrs["causal"]

    def is_much(self) -> sympy.Basic:
        """Condition: so many bytes of keys and values that it pays to look at the bias of few queries first."""
        if not self.hides:
            return sympy.false
        keys = _relation(sympy.Ge(self.keys, BOUNDED_KEYS))
        own = [n for n, step in zip(self.lead, _strides(self.k), strict=False) if step != 0]
        row = (self.depth + self.columns) * self.k.dtype.itemsize
        many = sympy.sympify(numel(own)) * sympy.sympify(self.keys) * row
        return sympy.And(keys, _relation(sympy.Ge(many, MUCH)))

    def is_bounded(self) -> sympy.Basic:
        """Condition: many keys, and a bias that several heads share."""
        if not self.hides:
            return sympy.false
        shared = [n for k, n in enumerate(self.lead) if k not in self.bias_axes]
        if math.prod(n for n in shared if isinstance(n, int)) < SHARED_BIAS:
            return sympy.false
        return _relation(sympy.Ge(self.keys, BOUNDED_KEYS))

    @property
    def matrix(self) -> bool:
        """Does every query have its own bias?"""
        return self.bias is not None and _strides(self.bias)[self.row] != 0

    @property
    def bias_kind(self) -> int:
        attrs = self.value.attrs
        if self.bias is None:
            return 0
        return 1 if attrs["fill"] is None else 2

    @property
    def folded(self) -> bool:
        attrs = self.value.attrs
        return self.bias is None and attrs["scale"] > 0 and not attrs["cap"]

    def constants(self, tile: AttentionTile) -> Iterator[tuple[str, object]]:
        attrs, scale, cap = self.value.attrs, self.value.attrs["scale"], self.value.attrs["cap"]
        yield from {
            "D": self.depth,
            "E": self.columns,
            **dict(zip(("BLOCK_D", "REST_D"), self.blocks_of(self.depth), strict=True)),
            **dict(zip(("BLOCK_E", "REST_E"), self.blocks_of(self.columns), strict=True)),
            "BLOCK_L": tile.queries,
            "BLOCK_S": tile.keys,
            "SCALE": scale / cap if cap else scale * _LOG2E,
            "CAP": cap * _LOG2E,
            "FOLDED": self.folded,
            "BIAS": self.bias_kind,
            "FILL": 0.0 if attrs["fill"] is None else attrs["fill"],
            "BIAS_ROWS": self.matrix,
            "CAUSAL": attrs["causal"],
            "UNDEFINED": attrs["undefined"],
            "PRECISION": "tf32x3" if self.q.dtype == torch.float32 else "tf32",
        }.items()

    def blocks_of(self, size: int) -> tuple[int, int]:
        """The blocks of ``size``: two only with vector loads; else a device got the second block wrong."""
        strides = [d for x in (self.q, self.k, self.v) for d in _strides(x)[:-1]]
        known = all(self.facts.divides(8 if isinstance(d, int) else 16, d) for d in strides)
        starts = all(starts_aligned(x, self.facts) for x in (self.q, self.k, self.v))
        return parts_of(size) if known and starts else (padded(size), 0)

    def sizes(self) -> dict[str, Dim]:
        """Sizes of the leading axes except the first, and the number of queries."""
        lead = {f"N{k}": n for k, n in enumerate(self.lead) if k}
        return {**lead, "L": self.queries}

    def numbers(self) -> dict[str, Dim]:
        found = {**self.sizes(), "S": self.keys}
        for name, x in (("Q", self.q), ("K", self.k), ("V", self.v)):
            strides = _strides(x)
            found[f"{name}_ROW"] = strides[self.row if name == "Q" else -2]
            found |= _numbered(name, strides[: self.row])
        strides = (0,) * len(self.q.shape) if self.bias is None else _strides(self.bias)
        found |= {"BIAS_QUERY": strides[self.row], "BIAS_KEY": strides[-1]}
        found |= _numbered("BIAS", strides[: self.row])
        if self.sink is None:
            return found
        strides = _strides(self.sink)
        found["SINK_QUERY"] = strides[self.row]
        return found | _numbered("SINK", strides[: self.row])

    def out_numbers(self) -> dict[str, Dim]:
        """Strides of the result, in which a query's row holds all heads."""
        strides, heads = _strides(self.value)[:-1], self.value.attrs["heads"]
        place = len(strides) - 1 - heads
        lead = (*strides[:place], *strides[place + 1 :])
        if self.packed:
            return {"O_ROW": lead[-1], **_numbered("OUT", lead[:-1])}
        return {"O_ROW": strides[place], **_numbered("OUT", lead)}

    def aligned(self, operands: Mapping[str, Value | ScratchBuffer]) -> Iterator[str]:
        """Names of pointers aligned to 16 bytes: all buffers, and views with an aligned offset."""
        for name, x in operands.items():
            if isinstance(x, ScratchBuffer) or starts_aligned(x, self.facts):
                yield name


def _strides(x: Value) -> Shape:
    view = view_of(x)
    assert view is not None, x
    return tuple(0 if d == 1 else s for d, s in zip(x.shape, view.strides, strict=True))


def _numbered(name: str, dims: Shape | list[Dim]) -> dict[str, Dim]:
    return {f"{name}_{k}": d for k, d in enumerate(dims)}


def _relation(found: sympy.Basic | bool) -> sympy.Basic:
    """``found`` as a sympy condition; a relation between numbers is a bool."""
    made: sympy.Basic = sympy.sympify(found)
    return made
