# SPDX-License-Identifier: Apache-2.0
"""Converts a ``torch.export.ExportedProgram`` to a ScriptModule.

    interface = Interface(("x",), (sample,), bind=lambda entries: (entries, {}), flatten=lambda out: out)
    module = to_script(program, interface)
    module(x)                   # RuntimeError("... x.size(1) % 7 == 0 ...") outside of the program's guards

Every node of the program becomes one node of TorchScript, with all of its arguments, so that nothing is
traced and nothing is decided anew. Sizes are computed from the inputs. The module has the program's
parameters and buffers, under their names and in the same memory, and writes to buffers as the program does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind

from blade.capture.exported.arguments import bound, write_arguments
from blade.capture.exported.control_flow import write_higher_order
from blade.capture.exported.guards import Leaf
from blade.capture.exported.interface import (
    Interface,
    annotation_of,
    leaves_of,
    outputs_of,
    paths_of,
    returned_value,
)
from blade.capture.exported.numbers import as_kind, is_number_function, kind_of, write_call
from blade.capture.exported.weights import Weights, module_with
from blade.capture.exported.write_guards import write_guards
from blade.core.reason import Code
from blade.errors import Refused
from blade.graph.torchscript.writer import BOOL, INT, ScriptWriter

aten = torch.ops.aten

_TENSORS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_WRITES = (
    OutputKind.BUFFER_MUTATION,
    OutputKind.PARAMETER_MUTATION,
    OutputKind.USER_INPUT_MUTATION,
)

_VMAP = "torch._functorch.predispatch"

_SAME = (aten.detach.default, aten.detach_.default, aten.alias.default, aten.lift_fresh.default)
"""Ops whose result is their input, without gradients."""

_IMPLIED = (
    aten._assert_tensor_metadata.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)
"""Checks that always hold: the dtypes of the inputs are guards, and ranges that matter are asserted apart."""


def to_script(
    program: ExportedProgram,
    interface: Interface,
    *,
    holder: nn.Module | None = None,
    all_ranges: bool = False,
    as_checks: bool = False,
) -> torch.jit.ScriptModule:
    """Return a module that computes what ``program`` does, called as ``interface`` says.

    It raises RuntimeError where a guard of the program does not hold; ``all_ranges`` as in ``find_guards``,
    ``as_checks`` as in ``write_guards``.
    Parameters and buffers are those of ``holder``, a copy of ``program.module()``, or else the program's.
    Raises ``Refused`` for a program without a form in TorchScript, and ``InputError`` for an interface of
    another structure than the program's.
    """
    if _has_modes(program.graph_module):
        program = program.run_decompositions({})  # writes casts and batches as ops
    tensors = _tensors(program, holder)
    returned = annotation_of(program, interface)
    module = module_with(tensors, name_of(program), interface.types(), returned)
    graph: Any = module.graph
    graph.setInsertPoint(graph.block())
    writer = ScriptWriter(graph)
    entries = list(graph.inputs())[1:]
    given = leaves_of(writer, program, interface, entries)
    write_guards(writer, program, leaves(program), given, all_ranges, as_checks)
    results = _Converter(writer, program, Weights(module, tensors)).run(given)
    graph.registerOutput(returned_value(writer, outputs_of(program, interface, results)))
    graph.lint()
    return module


def leaves(program: ExportedProgram) -> list[Leaf]:
    """The leaves of the arguments of ``program``."""
    specs = [one for one in program.graph_signature.input_specs if one.kind == InputKind.USER_INPUT]
    given = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    return [
        Leaf(name, sources, _given(spec, given))
        for spec, (name, sources) in zip(specs, paths_of(program), strict=True)
    ]


def _given(spec: InputSpec, known: dict[str, Any]) -> Any:
    value = known.get(spec.arg.name)
    return value if value is not None else getattr(spec.arg, "value", None)


def name_of(program: ExportedProgram) -> str:
    """The class of the module that was exported, if the program knows it."""
    for node in program.graph.nodes:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            if path in ("", "L['self']"):
                name = kind if isinstance(kind, str) else kind.__name__
                return str(name).rpartition(".")[2]
    return "ExportedProgram"


def _has_modes(graph_module: fx.GraphModule) -> bool:
    """Whether the meaning of some ops depends on a mode that is on around them: autocast, or vmap."""
    autocast = torch.ops.higher_order.wrap_with_autocast
    parts = [one for one in graph_module.modules() if isinstance(one, fx.GraphModule)]
    return any(
        node.target is autocast or getattr(node.target, "__module__", None) == _VMAP
        for part in parts
        for node in part.graph.nodes
    )


def _tensors(program: ExportedProgram, holder: nn.Module | None) -> dict[str, torch.Tensor]:
    """The tensors that the graph takes beside the arguments, by name."""
    found = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind in _TENSORS:
            assert spec.target is not None, spec
            found[spec.target] = _tensor(program, holder, spec.target)
        elif spec.kind != InputKind.USER_INPUT:
            what = f"The program takes {spec.arg.name!r}, a {spec.kind.name.lower()}"
            raise Refused(Code.EXPORT_FAILED, f"{what}, which TorchScript cannot hold.")
    return found


def _tensor(program: ExportedProgram, holder: nn.Module | None, name: str) -> torch.Tensor:
    if holder is not None:
        held: torch.Tensor = operator.attrgetter(name)(holder)
        return held
    kept: Any = program.state_dict if name in program.state_dict else program.constants
    return kept[name]  # type: ignore[no-any-return]


class _Converter:
    """Writes the nodes of one program."""

    def __init__(self, writer: ScriptWriter, program: ExportedProgram, weights: Weights) -> None:
        self._writer = writer
        self._program = program
        self._weights = weights
        parts = [p for p in program.graph_module.modules() if isinstance(p, fx.GraphModule)]
        calls = [node.target for part in parts for node in part.graph.nodes]
        self._writes = any(
            isinstance(one, torch._ops.OpOverload) and one._schema.is_mutable and one not in _SAME
            for one in calls
        )

    def run(self, given: Sequence[Any]) -> list[Any]:
        """Write the whole program for the leaves ``given``; return those of its output."""
        signature = self._program.graph_signature
        leaves = iter(given)
        by_name: dict[str, Any] = {}
        inputs = []
        for spec in signature.input_specs:
            is_leaf = spec.kind == InputKind.USER_INPUT
            target = spec.target or ""
            inputs.append(next(leaves) if is_leaf else self._weights.read(self._writer, target))
            by_name[spec.arg.name if is_leaf else target] = inputs[-1]
        results = self._graph(self._program.graph_module, inputs)
        returned = []
        for output, result in zip(signature.output_specs, results, strict=True):
            if output.kind in _WRITES:
                self._assign(by_name[output.target or ""], result)
            elif output.kind == OutputKind.USER_OUTPUT:
                returned.append(result)
            else:
                what = f"The program returns a {output.kind.name.lower()}"
                raise Refused(Code.EXPORT_FAILED, f"{what}; only inference is optimized.")
        return returned

    def _assign(self, written: torch._C.Value, result: torch._C.Value) -> None:
        """The write that the program left to its caller."""
        no = self._writer.constant(False)
        self._writer.call(aten.copy_.default, [written, result, no])

    def _graph(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Write the nodes of ``graph_module`` for ``inputs``; return what it returns."""
        known: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for node in graph_module.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(given)
            elif node.op == "get_attr":
                known[node] = operator.attrgetter(str(node.target))(graph_module)
            elif node.op == "output":
                return fx.map_arg(node.args[0], lambda one: known[one])
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: known[one])
                known[node] = self._call(node, list(args), dict(kwargs))
        raise AssertionError(graph_module)

    def _call(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        if target in _SPECIAL:
            return _SPECIAL[target](self._writer, node, *args, **kwargs)
        if target in _SAME or (target is aten.lift_fresh_copy.default and not self._writes):
            return args[0]
        if target in _IMPLIED:
            return None
        if target is operator.getitem:
            return args[0][args[1]]
        if isinstance(target, torch._ops.HigherOrderOperator):
            return write_higher_order(self._writer, self._graph, target.name(), args, kwargs)
        if isinstance(target, torch._ops.OpOverload):
            return self._overload(node, target, args, kwargs)
        kind = kind_of(node.meta.get("val"))
        if kind is not None and is_number_function(target):
            return write_call(self._writer, target, args, kind)
        what = getattr(target, "__name__", str(target))
        raise Refused(Code.EXPORT_FAILED, f"A call of {what!r} has no form in TorchScript.")

    def _overload(
        self,
        node: fx.Node,
        overload: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        fakes = [
            one.meta["val"]
            for one in node.all_input_nodes
            if isinstance(one.meta.get("val"), torch.Tensor)
        ]
        chosen, values = write_arguments(
            self._writer, overload, bound(overload, args, kwargs), fakes
        )
        made = self._writer.call(chosen, values)
        if not isinstance(made, torch._C.Value) or made.type().kind() != "ListType":
            return made
        known = node.meta.get("val")
        if not isinstance(known, (list, tuple)):
            raise Refused(Code.EXPORT_FAILED, f"The length of the list of {overload} is unknown.")
        return self._writer.unpack(made, [made.type().getElementType()] * len(known))


def _size(writer: ScriptWriter, node: fx.Node, tensor: Any, axis: int) -> torch._C.Value:
    return writer.op("aten::size", [tensor, writer.constant(axis)], INT)


def _count(writer: ScriptWriter, node: fx.Node, tensor: Any) -> torch._C.Value:
    return writer.op("aten::numel", [tensor], INT)


def _stride(writer: ScriptWriter, node: fx.Node, tensor: Any, axis: int) -> torch._C.Value:
    strides = writer.op("aten::stride", [tensor], torch._C.ListType(INT))
    return writer.op("aten::__getitem__", [strides, writer.constant(axis)], INT)


def _offset(writer: ScriptWriter, node: fx.Node, tensor: Any) -> torch._C.Value:
    return writer.op("aten::storage_offset", [tensor], INT)


def _item(writer: ScriptWriter, node: fx.Node, tensor: Any) -> torch._C.Value:
    """The number in a tensor of one element, of the type that it had at export."""
    kind = kind_of(node.meta["val"])
    if kind is None:
        raise Refused(Code.EXPORT_FAILED, "A complex number in a tensor is taken out of it.")
    casts = {"IntType": "aten::Int", "FloatType": "aten::Float", "BoolType": "aten::Bool"}
    return writer.op(casts[kind.kind()], [tensor], kind)


def _assert_scalar(writer: ScriptWriter, node: fx.Node, condition: Any, message: str) -> None:
    test = node.args[0]
    if condition is True or (isinstance(test, fx.Node) and _is_size_of_something(test)):
        return
    if not isinstance(condition, torch._C.Value):
        writer.fail(writer.constant(message))
    else:
        writer.require(as_kind(writer, condition, BOOL), message)


def _is_size_of_something(test: fx.Node) -> bool:
    """Whether ``test`` says that the size of a tensor is not negative."""
    if test.target is not operator.ge or not isinstance(test.args[0], fx.Node):
        return False
    is_size = test.args[0].target in (aten.sym_size.int, aten.sym_numel.default)
    return is_size and isinstance(test.args[1], int) and test.args[1] <= 0


def _assert_async(
    writer: ScriptWriter, node: fx.Node, condition: Any, message: str = "an assertion failed"
) -> None:
    writer.require(writer.op("aten::Bool", [condition], BOOL), message)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.sym_size.int: _size,
    aten.sym_numel.default: _count,
    aten.sym_stride.int: _stride,
    aten.sym_storage_offset.default: _offset,
    aten.item.default: _item,
    aten._local_scalar_dense.default: _item,
    aten._assert_scalar.default: _assert_scalar,
    aten._assert_async.default: _assert_async,
    aten._assert_async.msg: _assert_async,
}
