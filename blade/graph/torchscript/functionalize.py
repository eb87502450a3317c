# SPDX-License-Identifier: Apache-2.0
"""Functionalization: replaces in-place ops on tensors of the graph's own by out-of-place ops.

    x = conv(...); x.relu_(); return x * 2      ->      x = conv(...); y = relu(x); return y * 2
    m = zeros(...); m[0].fill_(1); return m     ->      m = zeros(...); v = fill(m[0], 1)
                                                        return select_scatter(m, v, 0, 0)

No backend takes an op that writes, and a write cuts the cluster around it. As in torch's functionalization,
a write to a view makes a new base (``view_inverse.py``), and whatever reads the base or a view of it later
reads it of the new one: views are made again. Bases that the block of an If or a Loop makes new are results of
that block, and a Loop carries them. Only private buffers are treated so (``private_writes.py``); a write that
has no out-of-place form stays, and writes the newest base.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from blade.core.cluster import ValueInfo
from blade.graph.torchscript.alias import find_aliases
from blade.graph.torchscript.bind_overloads import resolve
from blade.graph.torchscript.buffers import Buffers, ViewOf, drops_nothing, find_buffers, name_of
from blade.graph.torchscript.describe import ObservedFacts
from blade.graph.torchscript.insert import Inserter
from blade.graph.torchscript.number_tensors import make_number_tensors
from blade.graph.torchscript.observe_values import observe_facts
from blade.graph.torchscript.out_of_place import (
    copies_layout,
    functional,
    keeps_form,
    write_out_of_place,
)
from blade.graph.torchscript.private_writes import PrivateBuffers
from blade.graph.torchscript.program import TENSOR, Block, Line, Program, read
from blade.graph.torchscript.splice import clone
from blade.graph.torchscript.view_inverse import has_inverse, invert

LARGEST_CARRIED = 1 << 18
"""Bytes of a tensor of which a Loop may write a part out of place, which copies the rest in each iteration."""

_BY_STRIDES = frozenset("view view_as unflatten view_as_real view_as_complex".split())
"""Views that not every layout in memory allows."""


def functionalize(
    module: torch.jit.ScriptModule,
    samples: Sequence[Sequence[Any]],
    probes: Sequence[Sequence[Any]] = (),
) -> torch.jit.ScriptModule | None:
    """Replace in-place ops in ``module``'s forward, where possible; dtypes are taken from ``samples``, and from
    ``probes`` where no sample comes by.

    Return ``module`` as it was, if it wrote to parts of tensors: that is faster where no engine serves.
    """
    make_number_tensors(module.graph)
    program = read(module.graph)
    if not any(functional(line) or drops_nothing(program, line) for line in program.lines):
        return None
    buffers = find_buffers(program)
    private = PrivateBuffers(program, find_aliases(program), buffers).find()
    runs = observe_facts(program, module, samples) if private else ()
    facts = ObservedFacts(program, runs)
    if private and probes and any(_is_unseen(program, facts, line) for line in program.lines):
        facts = ObservedFacts(program, (*runs, *observe_facts(program, module, probes)))
    functionalizer = _Functionalizer(program, buffers, private, facts)
    before = clone(module) if functionalizer.writes_parts() else None
    functionalizer.run()
    _remove_unread(module.graph)
    return before


def _is_unseen(program: Program, facts: ObservedFacts, line: Line) -> bool:
    """Whether ``line`` writes a tensor that no run has reached."""
    return functional(line) is not None and facts.info(line.inputs[0]).dtype is None


class _Functionalizer:
    """The newest base of each private buffer, and its views that were made since it is the newest."""

    def __init__(
        self,
        program: Program,
        buffers: Buffers,
        private: frozenset[int],
        facts: ObservedFacts,
    ) -> None:
        self.program = program
        self.buffers = buffers
        self.private = private
        self.facts = facts
        self.bases: dict[int, torch._C.Value] = {}
        self.made: dict[
            int, tuple[int, torch._C.Value]
        ] = {}  # name -> (version of the base, value)
        self.versions: dict[int, int] = {}
        self._count = itertools.count()
        self._replaced: list[torch._C.Node] = []
        self._writes = self._find_writes()

    def writes_parts(self) -> bool:
        """Whether a write that is replaced is to a part of a tensor."""
        lines = (self.program.lines[index] for index in self._writes)
        return any(self._is_part(line) for line in lines if not line.blocks)

    def run(self) -> None:
        self._block(self.program.blocks[0], self.program.graph.return_node())
        for node in reversed(self._replaced):
            node.destroy()
        for line in reversed(self.program.lines):
            if line.kind == "prim::Loop":
                self._drop_slots(line)

    def _drop_slots(self, line: Line) -> None:
        """Remove what a Loop carries of a tensor that it also carries the newest base of."""
        node: Any = line.node
        [inner] = node.blocks()
        slots = self.program.blocks[line.blocks[0]].inputs[1:]
        for place, slot in reversed(list(enumerate(slots))):
            is_replaced = (
                self.buffers.name(slot) != slot and self.buffers.buffer(slot) in self.private
            )
            if is_replaced and not node.outputsAt(place).uses():
                inner.returnNode().removeInput(1 + place)
                inner.paramNode().eraseOutput(1 + place)
                node.removeInput(2 + place)
                node.eraseOutput(place)

    def _find_writes(self) -> dict[int, set[int]]:
        """Line -> buffers of which it, or a line in its blocks, makes a new base."""
        found: dict[int, set[int]] = {}
        for line in self.program.lines:
            if not self._is_replaced(line):
                continue
            buffer = self.buffers.buffer(line.inputs[0])
            at: Line | None = line
            while at is not None:
                found.setdefault(at.index, set()).add(buffer)
                owner = self.program.blocks[at.block].owner
                at = None if owner is None else self.program.lines[owner]
        return found

    def _is_replaced(self, line: Line) -> bool:
        if functional(line) is None or self.buffers.buffer(line.inputs[0]) not in self.private:
            return False
        views = list(self._path(line.inputs[0]))
        return (
            all(has_inverse(self.program, view) for view in views)
            and keeps_form(line, self._infos(line))
            and not self._copies_much(line)
        )

    def _copies_much(self, line: Line) -> bool:
        """Whether a Loop writes a part of a large tensor that was there before the Loop."""
        buffer = self.buffers.buffer(line.inputs[0])
        maker = self.program.maker(buffer)
        if (maker is not None and maker.block == line.block) or not self._is_in_loop(line):
            return False
        whole = [info.bytes for run in self.facts.runs for info in run.get(buffer, ())]
        return self._is_part(line) and max(whole, default=0) > LARGEST_CARRIED

    def _is_part(self, line: Line) -> bool:
        is_view = next(self._path(line.inputs[0]), None) is not None
        return is_view or line.kind.startswith(("aten::index_", "aten::scatter"))

    def _is_in_loop(self, line: Line) -> bool:
        owner = self.program.blocks[line.block].owner
        if owner is None:
            return False
        above = self.program.lines[owner]
        return above.kind == "prim::Loop" or self._is_in_loop(above)

    def _infos(self, line: Line) -> list[ValueInfo]:
        return [self._info(v) for v in line.inputs]

    def _info(self, value: int) -> ValueInfo:
        is_number = self.program.constant(value) and self.program.is_tensor(value)
        if is_number and self.program.tensor_constant(value) is None:  # traced into a tensor
            return ValueInfo("tensor", self.program.tensor_dtype(value), None, 0)
        return self.facts.info(value)

    def _path(self, value: int) -> Iterator[ViewOf]:
        """The views from ``value`` to its whole tensor."""
        name = self.buffers.name(value)
        while name in self.buffers.views:
            yield self.buffers.views[name]
            name = self.buffers.views[name].base

    def _block(self, block: Block, end: torch._C.Node) -> None:
        for value in block.inputs:
            self._begin(value)
        for index in block.lines:
            self._line(self.program.lines[index])
        self._read_newest(block.returns, end)

    def _begin(self, value: int) -> None:
        """``value`` is the first base of a private buffer, if it is one."""
        if value in self.private and self.buffers.name(value) == value:
            self._set_base(value, self.program.values[value])

    def _set_base(self, buffer: int, base: torch._C.Value) -> None:
        self.bases[buffer] = base
        self.versions[buffer] = next(self._count)

    def _line(self, line: Line) -> None:
        if line.blocks:
            self._control(line)
        elif line.index in self._writes:
            self._write(line)
        else:
            self._read_newest(line.inputs, line.node)
            if drops_nothing(self.program, line):
                line.node.output().replaceAllUsesWith(line.node.inputsAt(0))
                self._replaced.append(line.node)
                return
            for value in line.outputs:
                self._begin(value)
                name = self.buffers.name(value)
                if name in self.buffers.views and self.buffers.buffer(name) in self.bases:
                    version = self.versions[self.buffers.buffer(name)]
                    self.made[name] = version, self.program.values[value]

    def _read_newest(self, inputs: Sequence[int], node: torch._C.Node) -> None:
        for place, value in enumerate(inputs):
            newest = self._newest(value, node)
            if newest is not None:
                node.replaceInput(place, newest)

    def _newest(self, value: int, before: torch._C.Node) -> torch._C.Value | None:
        """The view that ``value`` is, of the newest base; ``None`` for what is in no private buffer."""
        name = self.buffers.name(value)
        buffer = self.buffers.buffer(name)
        if buffer not in self.bases:
            return None
        if name == buffer:
            return self.bases[buffer]
        version, made = self.made.get(name, (-1, None))
        if version == self.versions[buffer]:
            return made
        made = self._view(self.buffers.views[name], before)
        self.made[name] = self.versions[buffer], made
        return made

    def _view(self, view: ViewOf, before: torch._C.Node) -> torch._C.Value:
        if view.pick is not None:
            return self._pieces(view, before)[view.pick]
        return self._again(view.line, before).output()

    def _pieces(self, view: ViewOf, before: torch._C.Node) -> list[torch._C.Value]:
        """All pieces of the newest base that ``view`` is one of."""
        whole = self._again(view.line, before).output()
        unpack = next(
            self.program.lines[i]
            for i in self.program.users[view.line.outputs[0]]
            if self.program.lines[i].kind == "prim::ListUnpack"
        )
        return list(Inserter(self.program.graph, before).clone(unpack.node, [whole]).outputs())

    def _again(self, line: Line, before: torch._C.Node) -> torch._C.Node:
        """A copy of ``line`` that reads the newest values."""
        return Inserter(self.program.graph, before).clone(line.node, self._inputs(line, before))

    def _inputs(self, line: Line, before: torch._C.Node) -> list[torch._C.Value]:
        given = zip(line.inputs, line.node.inputs(), strict=True)
        return [self._newest(value, before) or present for value, present in given]

    def _write(self, line: Line) -> None:
        node = line.node
        insert = Inserter(self.program.graph, node)
        inputs = self._inputs(line, node)
        new = write_out_of_place(line, inputs, self._infos(line), insert)
        buffer = self.buffers.buffer(line.inputs[0])
        if not copies_layout(line) and self._depends_on_layout(buffer):
            new = insert.op("aten::copy", [inputs[0], new, insert.constant(False)])
        for view in self._path(line.inputs[0]):
            base = self._newest(view.base, node)
            assert base is not None, line
            pieces = partial(self._pieces, view, node)
            new = invert(self.program, view, base, new, pieces, insert)
        self._set_base(buffer, new)
        self._replaced.append(node)

    def _depends_on_layout(self, buffer: int) -> bool:
        """Whether some view of ``buffer`` cannot be made of every layout in memory."""
        views = (self.buffers.views.get(v) for v in self.buffers.members[buffer])
        makers = (resolve(v.line.node) for v in views if v is not None)
        return any(m is not None and name_of(m) in _BY_STRIDES for m in makers)

    def _control(self, line: Line) -> None:
        """An If or a Loop: new bases leave each block, and enter that of a Loop."""
        node: Any = line.node  # the stubs of nodes and blocks are incomplete
        is_loop = line.kind == "prim::Loop"
        self._read_newest(line.inputs, node)
        threaded = [b for b in sorted(self._writes.get(line.index, ())) if b in self.bases]
        if is_loop:
            for buffer in threaded:
                node.addInput(self.bases[buffer])
        for index, inner in zip(line.blocks, node.blocks(), strict=True):
            with self._inside():
                for buffer in threaded if is_loop else ():
                    inside = inner.addInputToBlock()
                    inside.setType(TENSOR)
                    self._set_base(buffer, inside)
                self._block(self.program.blocks[index], inner.returnNode())
                for buffer in threaded:
                    inner.registerOutput(self.bases[buffer])
        for buffer in threaded:
            outside = node.addOutput()
            outside.setType(TENSOR)
            self._set_base(buffer, outside)
        for value in line.outputs:
            buffer = self.buffers.name(value)
            if buffer in self.private and buffer not in self.bases:
                self._set_base(buffer, self.program.values[value])

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Values made in a block cannot be read after it."""
        before = dict(self.bases), dict(self.made), dict(self.versions)
        yield
        self.bases, self.made, self.versions = before


def _remove_unread(block: torch._C.Graph | torch._C.Block) -> None:
    """Remove views and other ops without effects whose results nothing reads any longer."""
    for node in reversed(list(block.nodes())):
        for inner in node.blocks():
            _remove_unread(inner)
        if not node.hasUses() and _has_no_effect(node):
            node.destroy()


def _has_no_effect(node: torch._C.Node) -> bool:
    if node.kind() in ("prim::Constant", "prim::ListConstruct", "prim::ListUnpack"):
        return True
    overload = resolve(node)
    return (
        overload is not None
        and not overload._schema.is_mutable
        and bool(overload._schema.returns)
        and torch.Tag.nondeterministic_seeded not in overload.tags
    )
