# SPDX-License-Identifier: Apache-2.0
"""Arguments of an ATen call in FX as values of a TorchScript graph, by the schema of its overload.

overload, values = write_arguments(writer, torch.ops.aten.add.Tensor, {"self": x, "other": 2}, fakes)
writer.call(overload, values)                  # aten::add.Scalar(%x, 2, 1)

FX leaves out defaults, writes enums as objects, and may give a number where the schema has a tensor.
TorchScript takes every argument, in order, and selects the overload by their types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from blade.capture.exported.numbers import as_kind, value_of
from blade.core.reason import Code
from blade.errors import Refused
from blade.graph.torchscript.bind_overloads import LAYOUTS, MEMORY_FORMATS, SCALAR_TYPES
from blade.graph.torchscript.writer import ScriptWriter

_ENUMS: dict[Any, int] = {
    value: number
    for table in (SCALAR_TYPES, MEMORY_FORMATS, LAYOUTS)
    for number, value in table.items()
}

_NUMBERS = ("IntType", "FloatType", "BoolType", "NumberType", "ComplexType")


def bound(
    overload: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments that are given, by name."""
    names = [one.name for one in overload._schema.arguments if not one.kwarg_only]
    return {**dict(zip(names, args)), **kwargs}


def write_arguments(
    writer: ScriptWriter,
    overload: torch._ops.OpOverload,
    given: Mapping[str, Any],
    fakes: Sequence[torch.Tensor],
) -> tuple[torch._ops.OpOverload, list[torch._C.Value]]:
    """The overload to call, and all of its arguments; ``fakes`` are the tensors among ``given``.

    Raises ``Refused`` for a value that TorchScript cannot hold.
    """
    overload = _with_numbers(overload, given)
    values = []
    arguments: Any = overload._schema.arguments
    for argument in arguments:
        if argument.name in given:
            value = given[argument.name]
        elif argument.has_default_value():
            value = argument.default_value
        else:
            assert not argument.type.isSubtypeOf(torch._C.TensorType.get()), (overload, argument)
            value = None
        if _is_number(value) and argument.type.kind() == "TensorType":
            values.append(_as_tensor(writer, value, fakes))
        else:
            values.append(_written(writer, value, argument.type, argument.N))
    return overload, values


def _with_numbers(
    overload: torch._ops.OpOverload, given: Mapping[str, Any]
) -> torch._ops.OpOverload:
    """The overload of the same op that takes numbers where ``given`` has them; ``overload`` if none does."""
    tensors = {a.name for a in overload._schema.arguments if a.type.kind() == "TensorType"}
    if not any(_is_number(given.get(name)) for name in tensors):
        return overload
    packet = overload._overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        if _takes(other, given) and not other._schema.is_mutable:
            return other  # type: ignore[no-any-return]
    return overload


def _takes(overload: torch._ops.OpOverload, given: Mapping[str, Any]) -> bool:
    arguments = {one.name: one for one in overload._schema.arguments}
    if not set(given) <= set(arguments):
        return False
    for name, argument in arguments.items():
        if name not in given:
            if not argument.has_default_value():
                return False
        elif _is_number(given[name]) != (argument.type.kind() in _NUMBERS):
            return False
    return True


def _is_number(value: Any) -> bool:
    if isinstance(value, torch._C.Value):
        return value.type().kind() in _NUMBERS
    return isinstance(value, (bool, int, float, complex))


def _as_tensor(writer: ScriptWriter, value: Any, fakes: Sequence[torch.Tensor]) -> torch._C.Value:
    """A 0-d tensor for ``value``, of the dtype that it has in arithmetic with ``fakes``."""
    sample = value
    if isinstance(value, torch._C.Value):
        sample = {"IntType": 1, "BoolType": True}.get(value.type().kind(), 1.0)
    dtype, device = torch.tensor(sample).dtype, None
    for fake in fakes:
        dtype, device = torch.result_type(fake, sample), fake.device
    overload = torch.ops.aten.scalar_tensor.default
    given = {"s": value, "dtype": dtype, "device": device}
    made = writer.call(*write_arguments(writer, overload, given, ()))
    assert isinstance(made, torch._C.Value), made
    return made


def _written(
    writer: ScriptWriter, value: Any, kind: torch._C.JitType, count: int | None
) -> torch._C.Value:
    """``value`` as an argument of type ``kind``; ``count``: the length of a list that one number stands for."""
    if isinstance(value, torch._C.Value):
        return _converted(writer, value, kind)
    if value is None:
        return writer.constant(None)
    if kind.kind() == "OptionalType":
        return _written(writer, value, kind.getElementType(), count)
    if kind.kind() == "ListType":
        element = kind.getElementType()
        items = value if isinstance(value, (list, tuple)) else [value] * (count or 1)
        return writer.list_of([_written(writer, one, element, None) for one in items], element)
    if isinstance(value, torch.Tensor):
        return writer.constant(value)
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        if value not in _ENUMS:
            raise Refused(Code.EXPORT_FAILED, f"TorchScript has no number for {value}.")
        return writer.constant(_ENUMS[value])
    if kind.kind() == "FloatType":
        return writer.constant(float(value))
    if kind.kind() == "DeviceObjType":
        return writer.constant(torch.device(value))
    if isinstance(value, (bool, int, float, complex, str)):
        return value_of(writer, value)
    what = type(value).__name__
    raise Refused(Code.EXPORT_FAILED, f"An argument of type {what} has no form in TorchScript.")


def _converted(
    writer: ScriptWriter, value: torch._C.Value, kind: torch._C.JitType
) -> torch._C.Value:
    """``value``, as a float where ``kind`` wants one and it is an int."""
    if kind.kind() == "OptionalType":
        return _converted(writer, value, kind.getElementType())
    if value.type().kind() == "IntType" and kind.kind() == "FloatType":
        return as_kind(writer, value, kind)
    return value
