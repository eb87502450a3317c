# SPDX-License-Identifier: Apache-2.0
"""Writes the nodes of a graph, in order, each in the first way that serves:

* computed now, if everything it takes is known (``fold``), or are sizes (``host_ops``);
* its row in the table (``ops/``);
* the function that ONNX defines it by, if there is one;
* a node of ONNX Runtime (``runtime_node``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.inliner

from blade.importers.onnx.emit import table
from blade.importers.onnx.emit.dtypes import torch_dtype
from blade.importers.onnx.emit.emitter import Emitter
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.table import NodeView, view_node
from blade.importers.onnx.emit.types import OutputType, output_types, type_proto, value_of
from blade.importers.onnx.emit.values import ConstantValue, TensorValue, Value
from blade.importers.onnx.fold import folded
from blade.importers.onnx.host_ops import host_result
from blade.importers.onnx.runtime_node import write_runtime_node

Env = dict[str, Value]
Protos = Sequence[onnx.NodeProto]


class GraphImporter:
    """Writes graphs to ``emitter``. ``in_runtime`` names the ops that ONNX Runtime runs, with the reason."""

    def __init__(
        self,
        emitter: Emitter,
        opsets: Mapping[str, int],
        ir_version: int,
        read: Any = onnx.numpy_helper.to_array,
        allow_runtime: bool = True,
    ) -> None:
        self.e = emitter
        self.opsets = dict(opsets)
        self.ir_version = ir_version
        self.in_runtime: Counter[str] = Counter()
        self._read = read
        self._allow_runtime = allow_runtime

    def initializers(self, graph: onnx.GraphProto, env: Env) -> None:
        """Add the constants of ``graph`` to ``env``."""
        for tensor in graph.initializer:
            env[tensor.name] = ConstantValue(
                tensor.name, self._read(tensor), torch_dtype(tensor.data_type)
            )
        for sparse in graph.sparse_initializer:
            dense = _dense(sparse)
            dtype = torch_dtype(sparse.values.data_type)
            env[sparse.values.name] = ConstantValue(sparse.values.name, dense, dtype)

    def subgraph(
        self, graph: onnx.GraphProto, env: Mapping[str, Value], inputs: Sequence[Value] = ()
    ) -> list[Value]:
        """Write the nodes of ``graph``, which sees ``env``; return its outputs."""
        own: Env = dict(env)
        self.initializers(graph, own)
        own.update(zip((one.name for one in graph.input), inputs))
        self.nodes(graph.node, own)
        return [own[one.name] for one in graph.output]

    def nodes(self, protos: Protos, env: Env) -> None:
        """Write ``protos``; their outputs are added to ``env``."""
        for proto in protos:
            domain = "" if proto.domain == "ai.onnx" else proto.domain
            node = view_node(proto, self.opsets.get(domain, 1))
            inputs = [env[name] if name else None for name in node.inputs]
            for name, value in zip(node.outputs, self._node(node, inputs, env)):
                if name:
                    env[name] = value

    def _node(self, node: NodeView, inputs: Sequence[Value | None], env: Env) -> Sequence[Value]:
        types = output_types(self.e, node, inputs, self.opsets)
        known: Sequence[Value] | None = folded(self.e, node, inputs, types)
        if known is None:
            known = host_result(self.e, node, inputs, [one.dtype for one in types])
        if known is not None:
            return known
        whys = []
        for write in (self._by_row, self._by_function, self._by_runtime):
            mark = self.e.mark()
            try:
                return write(node, inputs, env, types)
            except NotImported as why:
                self.e.roll_back(mark)
                whys.append(str(why))
        raise NotImported(f"{node.op}: " + " ".join(dict.fromkeys(whys)))

    def _by_row(
        self,
        node: NodeView,
        inputs: Sequence[Value | None],
        env: Env,
        types: Sequence[OutputType],
    ) -> Sequence[Value]:
        if any(one.is_outside for one in types):
            raise NotImported("It returns an element type that torch lacks.")
        write = table.find(node)
        given: tuple[Any, ...] = tuple(inputs)
        if getattr(write, "takes_importer", False):
            given = (self, env, *inputs)
        made = write(self.e, node, *given)
        results = list(made) if isinstance(made, tuple) else [made]
        return [
            self._named(one, name, found) for one, name, found in zip(results, node.outputs, types)
        ]

    def _named(self, result: Any, name: str, found: OutputType) -> Value:
        """``result`` of a row under a name like the output's; its type is the row's, else the inferred one."""
        if isinstance(result, str):
            return value_of(self.e.let(result, name=name or "unused").text, found)
        if isinstance(result, TensorValue):
            dtype = found.dtype if result.dtype is None else result.dtype
            dims = _refined(result.dims, found.dims)
            if not result.text.isidentifier():
                return self.e.let(result.text, dtype, dims, name or "unused")
            return TensorValue(result.text, dtype, dims)
        value: Value = result
        return value

    def _by_function(
        self,
        node: NodeView,
        inputs: Sequence[Value | None],
        env: Env,
        types: Sequence[OutputType],
    ) -> Sequence[Value]:
        if node.domain not in ("", "ai.onnx.preview") or not onnx.defs.has(node.op, node.version):
            raise NotImported("It is defined by no function.")
        schema: Any = onnx.defs.get_schema(node.op, node.version)
        if not (schema.has_function or schema.has_context_dependent_function):
            raise NotImported("It is defined by no function.")
        graph, opsets = _inlined(node, inputs, self.ir_version)
        inner = GraphImporter(self.e, opsets, self.ir_version, allow_runtime=self._allow_runtime)
        own: Env = {name: one for name, one in zip(node.inputs, inputs) if one is not None}
        inner.initializers(graph, own)
        inner.nodes(graph.node, own)
        self.in_runtime.update(inner.in_runtime)
        return [own[name] if name else own[node.outputs[0]] for name in node.outputs]

    def _by_runtime(
        self,
        node: NodeView,
        inputs: Sequence[Value | None],
        env: Env,
        types: Sequence[OutputType],
    ) -> Sequence[Value]:
        if not self._allow_runtime:
            raise NotImported("Nodes of ONNX Runtime are not allowed here.")
        made = write_runtime_node(self.e, node, inputs, types, self.opsets)
        self.in_runtime[node.op] += 1
        return made


def _refined(own: Any, inferred: Any) -> Any:
    """What a row knows of the sizes together with what was inferred."""
    if own is None or inferred is None or len(own) != len(inferred):
        return inferred if own is None else own
    return tuple(a if b is None else b for a, b in zip(own, inferred))


def _inlined(
    node: NodeView, inputs: Sequence[Value | None], ir_version: int
) -> tuple[onnx.GraphProto, dict[str, int]]:
    """The body of the node's function as a graph over the node's inputs, and its opsets."""
    infos: list[onnx.ValueInfoProto] = []
    for name, value in zip(node.inputs, inputs):
        if value is None or any(one.name == name for one in infos):
            continue
        proto = type_proto(value)
        if proto is None:
            raise NotImported("The element type of an input is not known.")
        infos.append(onnx.helper.make_value_info(name, proto))
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in node.outputs if name]
    graph = onnx.helper.make_graph([node.proto], "function", infos, outputs)
    opset = onnx.helper.make_opsetid(node.domain, node.version)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=ir_version)
    try:
        made = onnx.inliner.inline_selected_functions(
            model, [(node.domain, node.op)], exclude=False, inline_schema_functions=True
        )
    except (RuntimeError, ValueError, onnx.checker.ValidationError) as error:
        raise NotImported("Its function cannot be inlined.") from error
    if any(one.op_type == node.op for one in made.graph.node):
        raise NotImported("Its function cannot be inlined.")
    return made.graph, {one.domain: one.version for one in made.opset_import}


def _dense(sparse: onnx.SparseTensorProto) -> np.ndarray[Any, Any]:
    values = onnx.numpy_helper.to_array(sparse.values)
    indices = onnx.numpy_helper.to_array(sparse.indices)
    dense = np.zeros(list(sparse.dims), values.dtype)
    if indices.ndim == 2:
        dense[tuple(indices.T)] = values
    else:
        dense.reshape(-1)[indices] = values
    return dense


def device_anchor(inputs: Sequence[Value]) -> str:
    """A tensor that every call has."""
    return next((one.text for one in inputs if isinstance(one, TensorValue)), "")
