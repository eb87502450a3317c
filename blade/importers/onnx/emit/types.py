# SPDX-License-Identifier: Apache-2.0
"""The types of what a node returns, by ONNX's own inference, one node at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx.shape_inference
import torch

from blade.importers.onnx.emit.dtypes import DTYPES, ELEMENT_TYPES, numpy_dtype
from blade.importers.onnx.emit.emitter import Emitter
from blade.importers.onnx.emit.table import NodeView
from blade.importers.onnx.emit.values import (
    ConstantValue,
    Dims,
    HostValue,
    OptionalValue,
    SequenceValue,
    Sizes,
    TensorValue,
    Value,
)


@dataclass(frozen=True)
class OutputType:
    """``kind``: "tensor", "sequence", "optional tensor" or "optional sequence"."""

    kind: str = "tensor"
    dtype: torch.dtype | None = None
    dims: Dims | None = None
    is_outside: bool = False
    """Whether the element type is one that torch lacks."""


UNKNOWN = OutputType()


def output_types(
    e: Emitter, node: NodeView, inputs: Sequence[Value | None], opsets: Mapping[str, int]
) -> list[OutputType]:
    """The type of each output, as far as it can be inferred."""
    unknown = [UNKNOWN] * len(node.outputs)
    if not onnx.defs.has(node.op, node.version, node.domain):
        return unknown
    schema = onnx.defs.get_schema(node.op, node.version, node.domain)
    given: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    for name, value in zip(node.inputs, inputs):
        if value is None:
            continue
        made = type_proto(value)
        if made is None:
            return unknown
        given[name] = made
        if (tensor := _data(e, value)) is not None:
            data[name] = tensor
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    try:
        found = onnx.shape_inference.infer_node_outputs(
            schema, node.proto, given, data, opset_imports=imports
        )
    except (onnx.shape_inference.InferenceError, KeyError, RuntimeError):
        return unknown
    return [read_type(found[name]) if name in found else UNKNOWN for name in node.outputs]


def read_type(proto: onnx.TypeProto) -> OutputType:
    """A type of ONNX; element types that torch lacks are marked."""
    kind = proto.WhichOneof("value")
    if kind == "optional_type":
        inner = read_type(proto.optional_type.elem_type)
        return OutputType(f"optional {inner.kind}", inner.dtype, inner.dims, inner.is_outside)
    if kind == "sequence_type":
        inner = read_type(proto.sequence_type.elem_type)
        outside = inner.is_outside or inner.kind != "tensor"
        return OutputType("sequence", inner.dtype, inner.dims, outside)
    if kind != "tensor_type":
        return OutputType(is_outside=kind is not None)
    tensor = proto.tensor_type
    dims: Dims | None = None
    if tensor.HasField("shape"):
        dims = tuple(
            one.dim_value if one.HasField("dim_value") else None for one in tensor.shape.dim
        )
    element = tensor.elem_type
    return OutputType("tensor", DTYPES.get(element), dims, bool(element) and element not in DTYPES)


def type_proto(value: Value) -> onnx.TypeProto | None:
    """The type of ``value`` as ONNX writes it; ``None`` if its element type is not known."""
    if isinstance(value, OptionalValue):
        inner = type_proto(value.inner)
        return None if inner is None else onnx.helper.make_optional_type_proto(inner)
    dims: Sizes | None
    if isinstance(value, (HostValue, ConstantValue)):
        dims = value.array.shape
    else:
        dims = value.dims
    if value.dtype is None:
        return None
    if dims is not None:
        dims = tuple(one if isinstance(one, int) else None for one in dims)
    made = onnx.helper.make_tensor_type_proto(ELEMENT_TYPES[value.dtype], dims)
    return onnx.helper.make_sequence_type_proto(made) if isinstance(value, SequenceValue) else made


def value_of(text: str, found: OutputType) -> Value:
    """The value that ``text`` is."""
    if found.kind == "sequence":
        return SequenceValue(text, found.dtype, found.dims)
    if found.kind == "optional sequence":
        return OptionalValue(text, SequenceValue("", found.dtype, found.dims))
    if found.kind.startswith("optional"):
        return OptionalValue(text, TensorValue("", found.dtype, found.dims))
    return TensorValue(text, found.dtype, found.dims)


def _data(e: Emitter, value: Value) -> onnx.TensorProto | None:
    known = e.known(value)
    if known is None or known.size > 1024:
        return None
    dtype = numpy_dtype(e.dtype(value))
    return onnx.numpy_helper.from_array(known.astype(dtype))
