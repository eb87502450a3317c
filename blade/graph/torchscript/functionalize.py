# SPDX-License-Identifier: Apache-2.0
"""Functionalization: replaces in-place ops on tensors of the graph's own by out-of-place ops.

    x = conv(...); x.relu_(); return x * 2      ->      x = conv(...); y = relu(x); return y * 2

Most vision models write ``relu_`` after a convolution, and no backend takes an op that writes. An op is
replaced only if this cannot be observed: a line of the same straight-line code made the memory it writes,
nothing else derived from that memory earlier is read later, and the out-of-place op has the same dtype and
shape. ``x += y`` must not enlarge ``x``, so ``y`` is expanded to ``x``, which raises where ``+=`` would.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from blade.graph.torchscript.alias import Aliases, find_aliases
from blade.graph.torchscript.bind_overloads import resolve
from blade.graph.torchscript.describe import ObservedFacts
from blade.graph.torchscript.observe_values import observe_facts
from blade.graph.torchscript.program import Line, Program, read

_BROADCAST = ("other", "mask")
"""Arguments that may make an out-of-place result larger than ``self``."""

_KEEPS_FORM = frozenset(
    "index_put index_add index_copy index_fill scatter scatter_add scatter_reduce".split()
)
"""Ops with other tensor arguments whose result always has the shape and dtype of ``self``."""

_ANSWERS_BOOL = frozenset(
    "eq ne lt le gt ge logical_and logical_or logical_xor logical_not "
    "not_equal less less_equal greater greater_equal".split()
)
"""Ops with a boolean out-of-place result, which is converted to the dtype of ``self``."""

_MAY_BE_SELF = frozenset({"conj_physical"})
"""Ops whose out-of-place form returns a real ``self`` itself instead of a new tensor."""

_OVERLAPPING = ("aten::expand", "aten::expand_as", "aten::broadcast_to", "aten::as_strided")


def functionalize(module: torch.jit.ScriptModule, samples: Sequence[Sequence[Any]]) -> None:
    """Replace in-place ops in ``module``'s forward, where possible; dtypes are taken from ``samples``."""
    dtypes: dict[int, torch.dtype | None] | None = None
    while True:
        program = read(module.graph)
        writers = [line for line in _lines(program) if _functional(line) is not None]
        if not writers:
            return
        dtypes = _dtypes(program, module, samples) if dtypes is None else dtypes
        aliases = find_aliases(program)
        chosen: list[Line] = []
        touched: set[int] = set()  # one write per tensor and round; the next round sees the result
        for line in writers:
            roots = aliases.roots[line.inputs[0]]
            fits = _is_private(program, aliases, line) and _keeps_form(program, line, dtypes)
            if fits and not touched & roots:
                chosen.append(line)
                touched |= roots
        for line in chosen:
            dtypes[_replace(program, line)] = dtypes.get(line.inputs[0])
        if not chosen:
            return


def _lines(program: Program) -> Iterator[Line]:
    """Top-level lines only: a tensor that a loop carries is written in each iteration."""
    return (program.lines[index] for index in program.blocks[0].lines)


def _functional(line: Line) -> torch._ops.OpOverload | None:
    """The out-of-place overload of ``line`` if it writes its first argument and nothing else."""
    overload = resolve(line.node)
    if overload is None or not overload._schema.is_mutable or len(line.outputs) != 1:
        return None
    name = overload._schema.name.removeprefix("aten::")
    tags = (torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view)
    if not name.endswith("_") or any(tag in overload.tags for tag in tags):
        return None
    if name[:-1] in _MAY_BE_SELF:
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    twin = getattr(packet, overload._overloadname, None)
    if twin is None or any(r.alias_info is not None for r in twin._schema.returns):
        return None
    return twin if _parameters(twin) == _parameters(overload) else None


def _parameters(overload: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in overload._schema.arguments]


def _dtypes(
    program: Program, module: torch.jit.ScriptModule, samples: Sequence[Sequence[Any]]
) -> dict[int, torch.dtype | None]:
    facts = ObservedFacts(program, observe_facts(program, module, samples))
    return {value: facts.info(value).dtype for value in program.values}


def _is_private(program: Program, aliases: Aliases, line: Line) -> bool:
    """Whether ``line`` writes memory that is read afterwards only through its own tensor."""
    target = line.inputs[0]
    shared = aliases.roots[target]
    related = [value for value, roots in aliases.roots.items() if not shared.isdisjoint(roots)]
    return (
        all(_is_own(program, root) for root in shared)
        and not any(
            _overlaps(program, value) for value in related if _is_before(program, value, line)
        )
        and not any(_is_read_across(program, v, line) for v in related if v != target)
    )


def _is_own(program: Program, root: int) -> bool:
    """Whether an op of the straight-line code made this memory and nothing else can share it."""
    maker = program.maker(root)
    made = None if maker is None or maker.block != 0 else resolve(maker.node)
    # random ops (dropout) may return their input
    return made is not None and torch.Tag.nondeterministic_seeded not in made.tags


def _overlaps(program: Program, value: int) -> bool:
    """Whether elements of ``value`` may share memory with each other; torch refuses to write such tensors."""
    maker = program.maker(value)
    return maker is not None and maker.kind in _OVERLAPPING


def _is_before(program: Program, value: int, line: Line) -> bool:
    return program.producer.get(value, -1) < line.index


def _is_read_across(program: Program, value: int, line: Line) -> bool:
    """Whether ``value`` exists before ``line`` and is read after it."""
    if not _is_before(program, value, line):
        return False
    later = any(user > line.index for user in program.users.get(value, ()))
    return later or value in program.returned


def _keeps_form(program: Program, line: Line, dtypes: dict[int, torch.dtype | None]) -> bool:
    """Whether the out-of-place op keeps ``self``'s dtype (and shape, once its operands are expanded)."""
    twin = _functional(line)
    assert twin is not None, line
    name = twin._schema.name.removeprefix("aten::")
    if name in _KEEPS_FORM:
        return True
    own = dtypes.get(line.inputs[0])
    if name in _ANSWERS_BOOL and own is None:
        return False
    for argument, value in list(zip(twin._schema.arguments, line.inputs, strict=True))[1:]:
        if "Tensor" not in str(argument.type):
            continue
        if argument.name not in _BROADCAST or own is None:
            return False
        if argument.name == "other" and dtypes.get(value) != own:
            return False
    return True


def _replace(program: Program, line: Line) -> int:
    """Replace ``line`` by its out-of-place op; returns the value that stands for ``self`` from there on."""
    twin, old = _functional(line), line.node
    assert twin is not None, line
    inputs = list(old.inputs())
    own = inputs[0]
    if twin._schema.name.removeprefix("aten::") not in _KEEPS_FORM:
        for place, argument in enumerate(twin._schema.arguments):
            if argument.name in _BROADCAST and "Tensor" in str(argument.type):
                inputs[place] = _insert(program, old, "aten::expand_as", [inputs[place], own])
    made = _insert(program, old, twin._schema.name, inputs)
    if twin._schema.name.removeprefix("aten::") in _ANSWERS_BOOL:
        made = _insert(program, old, "aten::type_as", [made, own])
    old.output().replaceAllUsesWith(made)
    old.destroy()
    own.replaceAllUsesAfterNodeWith(made.node(), made)
    return made.unique()


def _insert(
    program: Program, before: torch._C.Node, kind: str, inputs: list[torch._C.Value]
) -> torch._C.Value:
    node = program.graph.create(kind, inputs, 1)
    node.insertBefore(before)
    node.copyMetadata(before)
    node.output().setType(torch._C.TensorType.get())
    assert resolve(node) is not None, node
    return node.output()
