# SPDX-License-Identifier: Apache-2.0
"""``auto_functionalized``: a call of an op that writes its arguments, as copies, writes, and the copies.

torch writes custom ops like this when it makes a program functional. The first version names the arguments;
the second names the tensors that they are views of.
"""

from __future__ import annotations

from typing import Any

import torch

from blade.capture.exported.numbers import value_of
from blade.core.reason import Code
from blade.errors import Refused
from blade.graph.torchscript.writer import ScriptWriter, Values

aten = torch.ops.aten


def write_functionalized(
    writer: ScriptWriter, overload: torch._ops.OpOverload, given: dict[str, Any]
) -> list[Any]:
    """The results of ``overload`` and then its written arguments, in the order of the schema."""
    new = {name: _copy(writer, given[name]) for name in _written(overload)}
    return [*_called(writer, overload, given | new), *new.values()]


def write_functionalized_bases(
    writer: ScriptWriter, overload: torch._ops.OpOverload, given: dict[str, Any]
) -> list[Any]:
    """The results of ``overload`` and then the tensors whose views it writes.

    Raises ``Refused`` for views that are neither the whole tensor nor a slice.
    """
    bases = [_copy(writer, one) for one in given["_all_bases"]]
    arguments = {one.name: one for one in overload._schema.arguments}
    views = {}
    for name in _written(overload):
        if arguments[name].type.kind() == "ListType":
            raise Refused(Code.EXPORT_FAILED, f"{overload} writes a list of tensors.")
        views[name] = _view(writer, overload, f"_{name}", given, bases)
    return [*_called(writer, overload, given | views), *bases]


def _written(overload: torch._ops.OpOverload) -> list[str]:
    return [
        one.name
        for one in overload._schema.arguments
        if one.alias_info is not None and one.alias_info.is_write
    ]


def _called(
    writer: ScriptWriter, overload: torch._ops.OpOverload, given: dict[str, Any]
) -> list[Any]:
    values = [value_of(writer, given[one.name]) for one in overload._schema.arguments]
    results = writer.call(overload, values)
    return results if isinstance(results, list) else [results]


def _view(
    writer: ScriptWriter,
    overload: torch._ops.OpOverload,
    prefix: str,
    given: dict[str, Any],
    bases: Values,
) -> Any:
    index = given[f"{prefix}_base_index"]
    if index is None:
        return None
    if f"{prefix}_storage_offset" in given:
        raise Refused(Code.EXPORT_FAILED, f"{overload} writes a view that is no slice.")
    if f"{prefix}_slice_dim" not in given:
        return bases[index]
    places = [given[f"{prefix}_slice_{what}"] for what in ("dim", "start", "end")]
    values = [bases[index], *(value_of(writer, one) for one in (*places, 1))]
    return writer.call(aten.slice.Tensor, values)


def _copy(writer: ScriptWriter, value: Any) -> Any:
    if not isinstance(value, torch._C.Value):
        return value
    return writer.call(aten.clone.default, [value, writer.constant(None)])
