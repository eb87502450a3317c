# SPDX-License-Identifier: Apache-2.0
"""The ops that a recipe may call (``folding``): those that only compute tensors.

find_op("mkldnn._reorder_linear_weight")        # torch.ops.mkldnn._reorder_linear_weight.default
find_op("aten.from_file.default")               # ValueError: it takes a string
"""

import re
from typing import Any

import torch

from blade.core import torchscript

LIBRARIES = frozenset({"aten", "prims", "mkldnn", "mkl"})
TEXTS = frozenset({"none", "tanh"})
"""Strings that an op may take: the approximations of GELU."""
NAMED: dict[str, Any] = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout))
}
"""Dtypes, memory formats and layouts by their names."""

_NAME = re.compile(r"(\w+)\.(\w+)(?:\.(\w+))?", re.ASCII)
_TYPES = frozenset(
    {
        *("Tensor", "number", "int", "float", "bool", "SymInt", "ScalarType", "Layout"),
        *("Device", "MemoryFormat", "NoneType", "complex"),
    }
)


def find_op(name: Any) -> torch._ops.OpOverload:
    """The op ``library.op`` or ``library.op.overload``; ``ValueError`` if it is not allowed or does not exist.

    Allowed are functional ops of ``LIBRARIES`` that take tensors, numbers and properties of tensors, and
    return tensors. A string argument is allowed only if the op has a default for it; its value is one of
    ``TEXTS``.
    """
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    if found is None or found[1] not in LIBRARIES:
        raise ValueError(f"{name!r} is not among the ops that a recipe may call")
    library, op, overload = found.groups()
    known = torchscript.schemas_of(f"{library}::{op}")
    wanted = "" if overload in (None, "default") else overload
    schemas = [schema for schema in known if schema.overload_name == wanted]
    if len(schemas) != 1 or not _only_computes(schemas[0]):
        raise ValueError(f"{name!r} is not among the ops that a recipe may call")
    packet = getattr(getattr(torch.ops, library), op)
    made: torch._ops.OpOverload = getattr(packet, wanted or "default")
    return made


def _only_computes(schema: Any) -> bool:
    if schema.is_mutable or not schema.returns:
        return False
    if any(str(one.type) not in ("Tensor", "List[Tensor]") for one in schema.returns):
        return False
    return all(
        _kind(one.type) in _TYPES or (_kind(one.type) == "str" and one.has_default_value())
        for one in schema.arguments
    )


def _kind(kind: Any) -> str:
    """The element type, without ``List`` and ``Optional``."""
    text = str(kind)
    while inside := re.fullmatch(r"(?:List|Optional)\[(.*)\]", text):
        text = inside[1]
    return text
