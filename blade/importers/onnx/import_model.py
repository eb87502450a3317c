# SPDX-License-Identifier: Apache-2.0
"""Imports an ONNX model as a ScriptModule.

    imported = import_model("model.onnx")
    imported.module(input_ids=ids, attention_mask=mask)      # a tensor, or a tuple in the order of the outputs

The module's arguments have the names of the model's inputs, and its buffers those of the initializers. Nothing of it
needs onnx any more, except nodes that ONNX Runtime runs (``in_runtime``).
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch

from blade.core import torchscript
from blade.errors import InputError
from blade.importers.onnx.emit.emitter import Emitter
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.types import read_type, value_of
from blade.importers.onnx.emit.values import (
    ConstantValue,
    HostValue,
    OptionalValue,
    SequenceValue,
    TensorValue,
    Value,
    annotation,
)
from blade.importers.onnx.functions import table as function_table
from blade.importers.onnx.import_graph import Env, GraphImporter
from blade.importers.onnx.load_rows import load_rows
from blade.importers.onnx.read_model import OnnxSource, read_model


@dataclass(frozen=True)
class ImportedModel:
    """``arguments``: the inputs' names in the file, and in ``module``. ``outputs``: the names in the file, in order.

    ``in_runtime``: how many nodes of which op ONNX Runtime runs. ``code``: what ``module`` was compiled from.
    """

    module: torch.jit.ScriptModule
    arguments: dict[str, str]
    declared: tuple[onnx.ValueInfoProto, ...]
    outputs: tuple[str, ...]
    returns_tensors: bool
    in_runtime: dict[str, int]
    code: str


def import_model(source: Any, *, allow_runtime: bool = True) -> ImportedModel:
    """Import a model from a path or a ``ModelProto``.

    Raises ``InputError`` for a file that is no model, and for a model that has no form in TorchScript.
    """
    load_rows()
    return _import(read_model(source), allow_runtime)


def _import(source: OnnxSource, allow_runtime: bool) -> ImportedModel:
    graph = source.proto.graph
    e = Emitter()
    importer = GraphImporter(e, source.opsets, source.proto.ir_version, source.read, allow_runtime)
    env: Env = {}
    try:
        importer.initializers(graph, env)
        named = {one.name for one in graph.initializer}
        inputs = [one for one in graph.input if one.name not in named]
        given = [_argument(e, one) for one in inputs]
        env.update(zip((one.name for one in inputs), given))
        e.anchor = next((one.text for one in given if isinstance(one, TensorValue)), "")
        _check_sizes(e, {one.name: value for one, value in zip(inputs, given)})
        importer.nodes(graph.node, env)
        results = [env[one.name] for one in graph.output]
        texts = [_returned(e, one) for one in results]
    except NotImported as why:
        raise InputError(f"model: {source.name} cannot be imported. {why}") from why
    kinds = [annotation(one) for one in results]
    code = _code(given, e.lines, texts, kinds)
    module = _compile(e, code, source)
    return ImportedModel(
        module,
        {info.name: _name(one) for info, one in zip(inputs, given)},
        tuple(inputs),
        tuple(one.name for one in graph.output),
        all(kind == "Tensor" for kind in kinds),
        dict(importer.in_runtime),
        code,
    )


def _argument(e: Emitter, info: onnx.ValueInfoProto) -> Value:
    found = read_type(info.type)
    if found.is_outside:
        raise NotImported(f"Its input {info.name!r} has a type that torch lacks.")
    return value_of(e.name(info.name), found)


def _check_sizes(e: Emitter, given: Mapping[str, Value]) -> None:
    """Raise at run time where an input has another rank or size than the model says.

    There is one condition for all inputs, since each one is a branch that ends a cluster.
    """
    fixed, shown = [], []
    for name, value in given.items():
        if not isinstance(value, TensorValue) or value.dims is None:
            continue
        fixed.append(f"({value.text}.dim() == {len(value.dims)})")
        sizes = enumerate(value.dims)
        fixed += [f"({value.text}.size({k}) == {d})" for k, d in sizes if isinstance(d, int)]
        dims = ", ".join(str(d) if isinstance(d, int) else "?" for d in value.dims)
        shown.append(f"{name} [{dims}]")
    if fixed:
        text = f"the inputs have to be of the sizes {', '.join(shown)}"
        e.line(f"assert {' & '.join(fixed)}, {text!r}")


def _returned(e: Emitter, value: Value) -> str:
    if isinstance(value, (HostValue, ConstantValue)):
        return e.tensor(value)
    return value.text


def _code(
    given: Sequence[Value], lines: Sequence[str], texts: Sequence[str], kinds: Sequence[str]
) -> str:
    arguments = "".join(f", {_name(one)}: {annotation(one)}" for one in given)
    returned = kinds[0] if len(kinds) == 1 else f"Tuple[{', '.join(kinds)}]"
    result = texts[0] if len(texts) == 1 else f"({', '.join(texts)})"
    body = [*lines, f"    return {result}"]
    return f"def forward(self{arguments}) -> {returned}:\n" + "\n".join(body) + "\n"


def _name(value: Value) -> str:
    assert isinstance(value, (TensorValue, SequenceValue, OptionalValue))
    return value.text


def _compile(e: Emitter, code: str, source: OnnxSource) -> torch.jit.ScriptModule:
    root = type(_class_name(source), (torch.nn.Module,), {})()
    for name, tensor in e.buffers.items():
        root.register_buffer(name, tensor)
    for name, engine in e.engines.items():
        setattr(root, name, engine)
    run = function_table  # these names are looked up here when the code is compiled
    assert run is not None and math is not None
    module = torchscript.without_methods(root.eval())
    module.define(code)
    return module


def _class_name(source: OnnxSource) -> str:
    """The name of the module's class: that of the file."""
    stem = re.sub(r"\W+", "_", source.name.removesuffix(".onnx")).strip("_")
    return stem if stem.isidentifier() and not keyword.iskeyword(stem) else "OnnxModel"
