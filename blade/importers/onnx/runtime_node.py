# SPDX-License-Identifier: Apache-2.0
"""A node that ONNX Runtime runs, as an engine of its own: what the table has no row for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import torch

from blade.backends.onnxruntime.node import UNSIGNED, node_engine
from blade.errors import BackendError
from blade.importers.onnx.emit.dtypes import ELEMENT_TYPES, numpy_dtype
from blade.importers.onnx.emit.emitter import Emitter
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.table import NodeView
from blade.importers.onnx.emit.types import OutputType, type_proto
from blade.importers.onnx.emit.values import (
    ConstantValue,
    OptionalValue,
    SequenceValue,
    TensorValue,
    Value,
)
from blade.program.dtypes import DTYPES as PASSED


def write_runtime_node(
    e: Emitter,
    node: NodeView,
    inputs: Sequence[Value | None],
    types: Sequence[OutputType],
    opsets: Mapping[str, int],
) -> Sequence[Value]:
    """Write a call of the engine that runs ``node``; raises ``NotImported`` if ONNX Runtime cannot run it."""
    if any(one.HasField("g") for one in node.proto.attribute):
        raise NotImported("It has a graph inside.")
    given = [
        (name, value)
        for name, value in dict(zip(node.inputs, inputs)).items()
        if value is not None and not isinstance(value, ConstantValue)
    ]
    dtypes = [_dtype(e, one) for _, one in given]
    passed = [_passed(one) for one in dtypes]
    model = _model(e, node, inputs, types, opsets)
    kinds = [numpy_dtype(one).name for one in dtypes]
    signature = [(one, e.rank(value)) for one, (_, value) in zip(passed, given)]
    try:
        engine, told = node_engine(node.op, model, signature, kinds)
    except BackendError as why:
        raise NotImported(str(why)) from why
    attribute = e.name(f"onnx_{node.op}")
    e.engines[attribute] = engine
    texts = [
        f"{e.tensor(value)}.cpu()" if one is own else f"{e.tensor(value)}.cpu().to({one})"
        for (_, value), one, own in zip(given, passed, dtypes)
    ]
    found = e.name("results")
    e.line(f"{found} = self.{attribute}.try_execute([{', '.join(texts)}])")
    e.line(
        f'assert {found} is not None, "the node {node.op} needs ONNX Runtime, which cannot run here"'
    )
    return _results(e, node, found, _completed(node, types, told))


def _completed(
    node: NodeView, types: Sequence[OutputType], told: Sequence[tuple[str, int]]
) -> list[OutputType]:
    """The types of the outputs; what onnx cannot infer is what ONNX Runtime ``told``."""
    found = iter(told)
    made = []
    for name, kind in zip(node.outputs, types):
        if not name:
            made.append(kind)
            continue
        text, rank = next(found)
        if kind.dtype is None:
            dtype = _NAMES.get(text.removeprefix("tensor(").removesuffix(")"))
            if dtype is None:
                raise NotImported(f"It returns {text}, which torch lacks.")
            kind = OutputType("tensor", dtype, (None,) * rank if rank else None)
        made.append(kind)
    return made


_NAMES = {
    "float": torch.float32,
    "double": torch.float64,
    "float16": torch.float16,
    "bool": torch.bool,
    **{
        name: getattr(torch, name)
        for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    },
}
"""ONNX Runtime's names of element types."""


def _results(
    e: Emitter, node: NodeView, found: str, types: Sequence[OutputType]
) -> Sequence[Value]:
    device = f".to({e.anchor}.device)" if e.anchor else ""
    made: list[Value] = []
    position = 0
    for name, kind in zip(node.outputs, types):
        if not name:
            made.append(TensorValue(""))
            continue
        text = f"{found}[{position}]"
        if kind.dtype is not None and str(kind.dtype).removeprefix("torch.") in UNSIGNED:
            text = f"{text}.to({kind.dtype})"
        made.append(e.let(f"{text}{device}", kind.dtype, kind.dims, name))
        position += 1
    return made


def _dtype(e: Emitter, value: Value) -> torch.dtype:
    if isinstance(value, (SequenceValue, OptionalValue)):
        raise NotImported("It takes a sequence or an optional.")
    return e.dtype(value)


def _passed(dtype: torch.dtype) -> torch.dtype:
    """The type in which the engine takes tensors of ``dtype``."""
    signed = UNSIGNED.get(str(dtype).removeprefix("torch."))
    found: torch.dtype = dtype if signed is None else getattr(torch, signed)
    if found not in PASSED or found in (torch.bfloat16, torch.float8_e4m3fn):
        raise NotImported(f"{dtype} is not passed to ONNX Runtime.")
    return found


def _model(
    e: Emitter,
    node: NodeView,
    inputs: Sequence[Value | None],
    types: Sequence[OutputType],
    opsets: Mapping[str, int],
) -> bytes:
    """The node as a model of its own; its constants are initializers."""
    infos: dict[str, Any] = {}
    constants = []
    for name, value in dict(zip(node.inputs, inputs)).items():
        if isinstance(value, ConstantValue):
            constants.append(onnx.numpy_helper.from_array(value.array, name))
        elif value is not None:
            proto = type_proto(value)
            assert proto is not None
            for dim in proto.tensor_type.shape.dim:
                dim.Clear()
            infos[name] = onnx.helper.make_value_info(name, proto)
    outputs = []
    for name, kind in zip(node.outputs, types):
        if kind.kind != "tensor" or kind.is_outside:
            raise NotImported("It returns something else than tensors.")
        if name and kind.dtype is None:
            outputs.append(onnx.helper.make_empty_tensor_value_info(name))
        elif name:
            assert kind.dtype is not None
            dims = None if kind.dims is None else [None] * len(kind.dims)
            number = ELEMENT_TYPES[kind.dtype]
            outputs.append(onnx.helper.make_tensor_value_info(name, number, dims))
    graph = onnx.helper.make_graph([node.proto], node.op, list(infos.values()), outputs, constants)
    versions = dict(opsets)
    if onnx.defs.has(node.op, node.version, node.domain):  # the runtime may not know newer opsets
        schema = onnx.defs.get_schema(node.op, node.version, node.domain)
        versions[node.domain] = schema.since_version
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in versions.items()]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    data: bytes = model.SerializeToString()
    return data
