# SPDX-License-Identifier: Apache-2.0
"""Finds private buffers: those whose in-place writes can become new values without anyone noticing.

A buffer (``buffers.py``) is private if ops of the graph made all memory that it may be in, and if it need
not share memory with any other buffer: none that may be the same memory is read after a write to it, and it
is not read after a write to that one. So ``z = y.reshape(-1); z.neg_(); return z`` counts as a copy, while
``return z + y`` does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from blade.core.torch_modes import is_composite
from blade.graph.torchscript.alias import Aliases, schema_of
from blade.graph.torchscript.bind_overloads import resolve
from blade.graph.torchscript.buffers import Buffers, drops_nothing, name_of
from blade.graph.torchscript.program import Line, Program
from blade.graph.torchscript.scalar_lines import METADATA

_FRESH = frozenset(
    "absolute adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d arccos arccosh arcsin arcsinh arctan "
    "arctan2 arctanh argsort avg_pool1d batch_norm bilinear cdist clip column_stack concat concatenate conv1d "
    "conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d cosine_similarity cross cross_entropy_loss "
    "divide dstack float_power greater greater_equal grid_sampler group_norm hstack inner instance_norm isclose "
    "isfinite layer_norm less less_equal linear log_sigmoid log_softmax matmul max max_pool1d max_pool2d max_pool3d "
    "min multiply nanmean negative not_equal one_hot outer pad pairwise_distance prelu quantile relu6 "
    "repeat_interleave rms_norm scaled_dot_product_attention selu softmax square std subtract take_along_dim tile "
    "true_divide upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d "
    "upsample_nearest3d upsample_trilinear3d var vstack where".split()
)
"""Composite ops that always return new memory; ``type_as`` or ``einsum`` of one tensor may return their argument."""

_SHARES = frozenset("_unsafe_view unsafe_split unsafe_split_with_sizes lift".split())
"""Ops that are not composite and return a view, although their schemas do not say so."""

_MADE = frozenset(
    "prim::If prim::Loop aten::tensor prim::NumToTensor prim::ListConstruct prim::TupleConstruct prim::DictConstruct "
    "prim::ListUnpack prim::TupleUnpack prim::TupleIndex prim::TupleSlice prim::unchecked_cast".split()
)
"""Kinds beside ATen ops that make memory, or pass on what they are given."""


@dataclass(frozen=True)
class Touch:
    """Lines that read or write one buffer. A block's return is a read by the last line of the block."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


class PrivateBuffers:
    """Decides which buffers of ``program`` are private."""

    def __init__(self, program: Program, aliases: Aliases, buffers: Buffers) -> None:
        self.program = program
        self.buffers = buffers
        self._ends, self._loops, self._slots = _nesting(program)
        self._roots = _roots(program, aliases, buffers)
        self._touched = _touches(program, aliases, buffers, self._ends)
        self._sharing: dict[int, list[int]] = {}
        for buffer, roots in self._roots.items():
            for root in roots:
                self._sharing.setdefault(root, []).append(buffer)

    def find(self) -> frozenset[int]:
        """The private buffers that are written."""
        written = (b for b, t in self._touched.items() if t.writes and self.program.is_tensor(b))
        return frozenset(filter(self._is_private, written))

    def _is_private(self, buffer: int) -> bool:
        made = all(_is_made(self.program, self._slots, r) for r in self._roots[buffer])
        if not made or any(map(self._changes_shape, self._touched[buffer].writes)):
            return False
        others = {b for root in self._roots[buffer] for b in self._sharing[root]} - {buffer}
        return not any(self._notices(buffer, other) for other in others)

    def _changes_shape(self, index: int) -> bool:
        """Whether a line writes more than elements: a call, or ``resize_``, ``squeeze_`` and the like."""
        overload = resolve(self.program.lines[index].node)
        return (
            overload is None
            or torch.Tag.inplace_view in overload.tags
            or name_of(overload) in ("set_", "resize_", "resize_as_")
        )

    def _notices(self, a: int, b: int) -> bool:
        """Whether one of ``a`` and ``b`` may be read after a write to the other."""
        if self._is_of_another_iteration(a, b) or self._is_of_another_iteration(b, a):
            return False
        since = self._since(a, b)
        return self._is_read_after(a, b, since) or self._is_read_after(b, a, since)

    def _is_of_another_iteration(self, a: int, b: int) -> bool:
        """Whether a Loop carries ``a`` and what ``b`` can be is made in each iteration anew."""
        loop = self._slots.get(a)
        return loop is not None and all(loop in self._loops_of(r) for r in self._roots[b])

    def _is_read_after(self, written: int, read: int, since: int) -> bool:
        """Whether ``read`` is read after a write to ``written``, once they may be the same memory.

        A list that gets another element leaves the elements of its tensors alone.
        """
        if not self.program.is_tensor(written):
            return False
        writes = [w for w in self._touched[written].writes if self._is_after(w, since, written)]
        reads = self._touched[read].reads
        if not writes or not reads:
            return False
        return max(reads) > min(writes) or any(
            self._recurs(w, r, (written, read)) for w, r in product(writes, reads)
        )

    def _is_after(self, write: int, since: int, buffer: int) -> bool:
        return write > since or self._recurs(write, since, (buffer,))

    def _recurs(self, a: int, b: int, buffers: Iterable[int]) -> bool:
        """Whether lines ``a`` and ``b`` are in a Loop that one of ``buffers`` outlives an iteration of."""
        common = self._loops[a] & self._loops[b]
        return any(
            loop not in self._loops_of(root)
            for loop in common
            for buffer in buffers
            for root in self._roots[buffer]
        )

    def _since(self, a: int, b: int) -> int:
        """The line from which ``a`` and ``b`` may be the same memory."""
        start = max(self._made_at(a), self._made_at(b))
        for whole, part in ((a, b), (b, a)):
            if not self.program.is_tensor(whole):
                filled = self._first_filled(whole, part)
                start = start if filled is None else max(start, filled)
        return start

    def _first_filled(self, container: int, buffer: int) -> int | None:
        """The first line that puts ``buffer`` into ``container``, if no other container brings it there."""
        inside = {b for root in self._roots[container] for b in self._sharing[root]}
        if any(b != container and not self.program.is_tensor(b) for b in inside):
            return None
        maker = self.program.maker(container)
        if maker is None or buffer in map(self.buffers.buffer, maker.inputs):
            return None
        lines = (self.program.lines[i] for i in self._touched[container].writes)
        return min(
            (x.index for x in lines if buffer in map(self.buffers.buffer, x.inputs)), default=None
        )

    def _made_at(self, buffer: int) -> int:
        line = self.program.maker(buffer)
        if line is not None:
            return self._ends[line.index] if line.kind == "prim::If" else line.index
        return self._slots.get(buffer, -1)

    def _loops_of(self, value: int) -> frozenset[int]:
        """The Loops in each iteration of which ``value`` is made anew."""
        line = self.program.maker(value)
        if line is not None:
            return self._loops[line.index]
        carrier = self._slots.get(value)
        return frozenset() if carrier is None else self._loops[carrier]


def _nesting(
    program: Program,
) -> tuple[list[int], list[frozenset[int]], dict[int, int]]:
    """Per line its last nested line and the Loops around it; and the Loop of each value that one carries.

    The Loops have an entry more, for the return.
    """
    ends = list(range(len(program.lines)))
    loops: list[frozenset[int]] = [frozenset()] * (len(program.lines) + 1)
    slots: dict[int, int] = {}
    for line in program.lines:
        for block in (program.blocks[b] for b in line.blocks):
            is_loop = line.kind == "prim::Loop"
            slots.update(dict.fromkeys(block.inputs, line.index))
            for inner in block.lines:
                loops[inner] = loops[line.index] | ({line.index} if is_loop else frozenset())
    for line in reversed(program.lines):
        for block in (program.blocks[b] for b in line.blocks):
            ends[line.index] = max(ends[line.index], *(ends[i] for i in block.lines), -1)
    return ends, loops, slots


def _roots(program: Program, aliases: Aliases, buffers: Buffers) -> dict[int, frozenset[int]]:
    """Buffer -> the places where its bytes may live, those included that schemas do not tell of."""
    passed: dict[int, frozenset[int]] = {}
    for line in program.lines:
        if not line.blocks and _may_return_argument(program, line):
            passed.update(
                dict.fromkeys(line.outputs, aliases.union(line.inputs) | set(line.outputs))
            )
    closed = {root: _closure(root, passed) for root in passed}
    found: dict[int, frozenset[int]] = {}
    for buffer, values in buffers.members.items():
        direct = aliases.union(v for v in values if v in aliases.roots)
        found[buffer] = frozenset[int]().union(*(closed.get(r, frozenset({r})) for r in direct))
    return found


def _closure(root: int, passed: dict[int, frozenset[int]]) -> frozenset[int]:
    seen, pending = {root}, [root]
    while pending:
        fresh = passed.get(pending.pop(), frozenset()) - seen
        seen |= fresh
        pending.extend(fresh)
    return frozenset(seen)


def _may_return_argument(program: Program, line: Line) -> bool:
    """Whether an op whose schema promises new memory may return memory of an argument."""
    overload = resolve(line.node)
    if overload is None or not line.outputs or any(r.alias_info for r in overload._schema.returns):
        return False
    if torch.Tag.nondeterministic_seeded in overload.tags:  # dropout
        return True
    name = name_of(overload)
    full = f"{overload._schema.name}.{overload._overloadname}".removesuffix(".default")
    if name == "einsum":
        operands = program.maker(line.inputs[1])
        return (
            operands is None or operands.kind != "prim::ListConstruct" or len(operands.inputs) < 2
        )
    return name in _SHARES or (is_composite(full) and name not in _FRESH)


def _is_made(program: Program, slots: dict[int, int], root: int) -> bool:
    """Whether an op of the graph made this memory, or what it may be beside other roots."""
    line = program.maker(root)
    if line is None:
        return root in slots
    return line.kind in _MADE or resolve(line.node) is not None


def _touches(
    program: Program, aliases: Aliases, buffers: Buffers, ends: list[int]
) -> dict[int, Touch]:
    reads: dict[int, list[int]] = {}
    writes: dict[int, list[int]] = {}
    for line in program.lines:
        if line.kind in METADATA:
            continue
        for value in line.inputs:
            reads.setdefault(buffers.buffer(value), []).append(line.index)
        if not line.blocks and not drops_nothing(program, line):
            for buffer in _written(program, aliases, buffers, line):
                writes.setdefault(buffer, []).append(line.index)
    for block in program.blocks:
        last = max((ends[i] for i in block.lines), default=block.owner)
        for value in block.returns:
            reads.setdefault(buffers.buffer(value), []).append(-1 if last is None else last + 1)
    return {b: Touch(tuple(reads.get(b, ())), tuple(writes.get(b, ()))) for b in buffers.members}


def _written(program: Program, aliases: Aliases, buffers: Buffers, line: Line) -> Iterator[int]:
    """Buffers that ``line`` writes under one of their own names."""
    wrote = aliases.writes.get(line.index)
    schema = schema_of(line.node)
    if not wrote:
        return
    direct = [
        value
        for argument, value in zip(
            () if schema is None else schema.arguments, line.inputs, strict=False
        )
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if direct:
        yield from dict.fromkeys(map(buffers.buffer, direct))
    else:
        found = (v for v, roots in aliases.roots.items() if not wrote.isdisjoint(roots))
        yield from dict.fromkeys(map(buffers.buffer, found))
