# SPDX-License-Identifier: Apache-2.0
"""Resolves a TorchScript node to the ATen overload it calls, with arguments as Python values.

TorchScript writes enums as ints (``dtype=11`` is bool); FX and backends want ``torch.bool``. Only the
schema tells an int from an enum, so overload and arguments are resolved together.
"""

from __future__ import annotations

from typing import Any

import torch

from blade.graph.torchscript.alias import schema_of

SCALAR_TYPES: dict[int, torch.dtype] = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    8: torch.complex32,
    9: torch.complex64,
    10: torch.complex128,
    11: torch.bool,
    12: torch.qint8,
    13: torch.quint8,
    14: torch.qint32,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    25: torch.float8_e5m2fnuz,
    26: torch.float8_e4m3fnuz,
    27: torch.uint16,
    28: torch.uint32,
    29: torch.uint64,
}
"""``c10::ScalarType`` numbers, which are part of torch's file format and do not change."""

MEMORY_FORMATS: dict[int, torch.memory_format] = {
    0: torch.contiguous_format,
    1: torch.preserve_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
}

LAYOUTS: dict[int, torch.layout] = {
    0: torch.strided,
    1: torch.sparse_coo,
    2: torch.sparse_csr,
    4: torch.sparse_csc,
    5: torch.sparse_bsr,
    6: torch.sparse_bsc,
    7: torch.jagged,
}

# PT2E's explicit quantization ops and torchvision's are functional like ATen's and have meta functions.
LIBRARIES = ("aten", "quantized_decomposed", "torchvision")

_ENUMS: dict[str, dict[int, Any]] = {
    "ScalarTypeType": SCALAR_TYPES,
    "MemoryFormatType": MEMORY_FORMATS,
    "LayoutType": LAYOUTS,
}


def resolve(node: torch._C.Node) -> torch._ops.OpOverload | None:
    """The overload that ``node`` calls; ``None`` if it is not of ``LIBRARIES`` or unknown to the dispatcher.

    Operators that exist only in the TorchScript interpreter (``aten::Int``, ``prim::*``) give ``None``.
    """
    schema = schema_of(node)
    library, _, name = ("", "", "") if schema is None else schema.name.partition("::")
    if schema is None or library not in LIBRARIES:
        return None
    full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    if not torch._C._dispatch_has_kernel(full):
        return None
    packet = getattr(getattr(torch.ops, library), name)
    overload = getattr(packet, schema.overload_name or "default")
    assert isinstance(overload, torch._ops.OpOverload), overload
    return overload


def to_python(argument: torch._C.Argument, value: Any) -> Any:
    """``value`` with TorchScript's ints converted to the enums that ``argument`` takes.

    Raises ``KeyError`` for an enum value without a name in torch's Python API.
    """
    kind = argument.real_type
    if kind.kind() == "OptionalType":
        kind = kind.getElementType()
    table = _ENUMS.get(kind.kind())
    return table[value] if table is not None and type(value) is int else value


def split_arguments(
    overload: torch._ops.OpOverload, values: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword-only arguments from a dict by schema argument name."""
    arguments = overload._schema.arguments
    assert len(arguments) == len(values), (str(overload), list(values))
    args = tuple(values[a.name] for a in arguments if not a.kwarg_only)
    kwargs = {a.name: values[a.name] for a in arguments if a.kwarg_only}
    return args, kwargs


def trim_defaults(
    overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Drop trailing arguments that equal their defaults, as torch.export writes calls."""
    by_name = {a.name: a for a in overload._schema.arguments}
    kept = {k: v for k, v in kwargs.items() if not _is_default(by_name[k], v)}
    positional = [a for a in overload._schema.arguments if not a.kwarg_only]
    count = len(args)
    while count and _is_default(positional[count - 1], args[count - 1]):
        count -= 1
    return args[:count], kept


def _is_default(argument: torch._C.Argument, value: Any) -> bool:
    if not argument.has_default_value():
        return False
    default = to_python(argument, argument.default_value)
    plain = (type(None), bool, int, float, str, torch.dtype, torch.memory_format, list)
    if type(value) is not type(default) or not isinstance(value, plain):
        return False
    return bool(value == default)
