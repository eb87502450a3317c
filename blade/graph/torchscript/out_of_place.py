# SPDX-License-Identifier: Apache-2.0
"""Turns one in-place op into ops that return what it leaves in its argument, in the same dtype and shape.

    x += y        ->      add(x, expand_as(y, x))       and a conversion where ``y`` has a higher dtype

``x += y`` must not enlarge ``x``, so ``y`` is expanded to ``x``, which raises where ``+=`` would.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blade.core.cluster import ValueInfo
from blade.graph.torchscript.bind_overloads import resolve
from blade.graph.torchscript.buffers import name_of, writes_first
from blade.graph.torchscript.insert import Inserter
from blade.graph.torchscript.program import Line

_BROADCAST = ("other", "mask", "tensor1", "tensor2", "end")
"""Arguments that may make an out-of-place result larger than ``self``."""

_KEEPS_FORM = frozenset(
    "copy fill zero index_put index_add index_copy index_fill scatter scatter_add scatter_reduce".split()
)
"""Ops with other tensor arguments whose result always has the shape and dtype of ``self``."""

_COPIES_LAYOUT = frozenset("copy fill zero index_put masked_fill masked_scatter".split())
"""Ops that are not pointwise and whose result lies in memory like ``self``."""

_ANSWERS_BOOL = frozenset(
    "eq ne lt le gt ge logical_and logical_or logical_xor logical_not "
    "not_equal less less_equal greater greater_equal".split()
)
"""Ops with a boolean out-of-place result, which is converted to the dtype of ``self``."""

_MAY_BE_SELF = frozenset({"conj_physical"})
"""Ops whose out-of-place form returns a real ``self`` itself instead of a new tensor."""


def functional(line: Line) -> torch._ops.OpOverload | None:
    """The out-of-place overload of ``line`` if it writes its first argument and nothing else."""
    overload = resolve(line.node)
    if overload is None or not writes_first(overload) or len(line.outputs) != 1:
        return None
    if torch.Tag.nondeterministic_seeded in overload.tags:
        return None
    name = name_of(overload)[:-1]
    if name in _MAY_BE_SELF:
        return None
    twin = getattr(getattr(torch.ops.aten, name, None), overload._overloadname, None)
    if twin is None or any(r.alias_info is not None for r in twin._schema.returns):
        return None
    return twin if _parameters(twin) == _parameters(overload) else None


def _parameters(overload: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in overload._schema.arguments]


def keeps_form(line: Line, infos: Sequence[ValueInfo]) -> bool:
    """Whether ``write_out_of_place`` keeps ``self``'s dtype and shape; ``infos`` are those of the inputs."""
    twin = functional(line)
    if twin is None:
        return False
    name, own = name_of(twin), infos[0]
    if name in _KEEPS_FORM:
        return True
    if name in _ANSWERS_BOOL and own.dtype is None:
        return False
    for argument, info in list(zip(twin._schema.arguments, infos, strict=True))[1:]:
        if "Tensor" not in str(argument.type):
            continue
        if argument.name not in _BROADCAST or own.dtype is None or info.dtype is None:
            return False
        promotes = argument.name != "mask" and info.dtype != own.dtype
        if promotes and (own.rank is None or info.rank is None):
            return False
    return True


def write_out_of_place(
    line: Line,
    inputs: Sequence[torch._C.Value],
    infos: Sequence[ValueInfo],
    insert: Inserter,
) -> torch._C.Value:
    """What ``line`` leaves in its first argument; ``inputs`` stand for those of ``line``."""
    twin = functional(line)
    assert twin is not None and keeps_form(line, infos), line
    name = name_of(twin)
    own, given = inputs[0], list(inputs)
    if name in _KEEPS_FORM:
        return insert.op(twin._schema.name, given)
    is_cast = name in _ANSWERS_BOOL
    for place, argument in enumerate(twin._schema.arguments):
        if argument.name not in _BROADCAST or "Tensor" not in str(argument.type):
            continue
        if infos[place].rank != 0:  # a 0-d operand enlarges nothing, and promotes like a number
            given[place] = insert.op("aten::expand_as", [given[place], own])
        if argument.name != "mask":
            is_cast |= _promotes(infos[0], infos[place])
    made = insert.op(twin._schema.name, given)
    return insert.op("aten::type_as", [made, own]) if is_cast else made


def _promotes(own: ValueInfo, other: ValueInfo) -> bool:
    """Whether a result of tensors like these may not be of the dtype of ``own``."""
    assert own.dtype is not None and other.dtype is not None
    if other.rank == 0 and own.rank != 0:  # of a higher category it could not be written
        return False
    return torch.promote_types(own.dtype, other.dtype) != own.dtype


def copies_layout(line: Line) -> bool:
    """Whether the result of ``write_out_of_place`` lies in memory like ``self``."""
    twin = functional(line)
    assert twin is not None, line
    return name_of(twin) in _COPIES_LAYOUT or torch.Tag.pointwise in twin.tags
