# SPDX-License-Identifier: Apache-2.0
"""How a module made from an exported program is called, and what it returns.

A module takes the entries of a sample, as a trace does: tensors, and tuples, lists and dicts with tensors.
The program takes the leaves of all arguments, and returns the leaves of its output.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import _pytree as fx_pytree
from torch.utils import _pytree as pytree

from blade.core import torchscript
from blade.core.reason import Code
from blade.errors import InputError, Refused
from blade.graph.torchscript.writer import ScriptWriter

Sample = tuple[Any, ...]


@dataclass(frozen=True)
class Interface:
    """``names`` of the entries of a sample; ``bind`` makes the arguments of the model from them.

    ``flatten`` makes tensors and nested tuples of tensors from the model's output, as a trace returns them.
    """

    names: tuple[str, ...]
    sample: Sample
    bind: Callable[[Sample], tuple[tuple[Any, ...], dict[str, Any]]]
    flatten: Callable[[Any], Any]

    def types(self) -> dict[str, str]:
        """The annotation of each entry; raises ``Refused`` for one that TorchScript cannot take."""
        found = {}
        for name, entry in zip(self.names, self.sample, strict=True):
            inferred = torchscript.inferred_type(entry)
            if not inferred.success():
                what = f"Argument {name!r} is a {type(entry).__name__} that TorchScript cannot take"
                raise Refused(Code.EXPORT_FAILED, f"{what}: {inferred.reason()}")
            found[name] = inferred.type().annotation_str
        return found


def leaves_of(
    writer: ScriptWriter,
    program: ExportedProgram,
    interface: Interface,
    inputs: Sequence[torch._C.Value],
) -> list[Any]:
    """The leaves that ``program`` takes, in order: values of the graph, or constants that the call bakes in.

    Raises ``InputError`` if the arguments have another structure than those of the program.
    """
    unpacked = tuple(
        _unpacked(writer, value, entry)
        for value, entry in zip(inputs, interface.sample, strict=True)
    )
    args, kwargs = interface.bind(unpacked)
    spec = program.call_spec.in_spec
    count, keywords = _form(program)
    _check(len(args) == count and set(kwargs) == set(keywords), program)
    try:
        leaves: list[Any] = fx_pytree.tree_flatten_spec((args, kwargs), spec)
    except (RuntimeError, KeyError, TypeError, ValueError):
        leaves = []
    _check(len(leaves) == spec.num_leaves, program)
    return leaves


def _check(is_fine: bool, program: ExportedProgram) -> None:
    if not is_fine:
        raise InputError(
            "inputs: they have another structure than the inputs that the program was exported with: "
            f"{program.call_spec.in_spec}."
        )


def _form(program: ExportedProgram) -> tuple[int, list[str]]:
    """How many positional arguments the program takes, and which keywords."""
    positional, keywords = program.call_spec.in_spec.children()
    return positional.num_children, list(keywords.context)


def paths_of(program: ExportedProgram) -> list[tuple[str, tuple[str, ...]]]:
    """A name per leaf, and how the guards of ``program`` may call it (``L['x'][0]``)."""
    spec = program.call_spec.in_spec
    signature = program.module_call_graph[0].signature
    names = None if signature is None else signature.forward_arg_names
    count, keywords = _form(program)
    names = names or [f"argument_{k}" for k in range(count)] + keywords
    numbered = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    found = []
    for k, (path, _) in enumerate(pytree.tree_flatten_with_path(numbered)[0]):
        place: Any = path[1]
        top = names[place.idx] if isinstance(place, pytree.SequenceKey) else place.key
        inner = pytree.keystr(path[2:])
        sources = [f"L['{top}']{inner}", f"L['flat_args'][{k}]"]
        base, _, number = top.rpartition("_")
        if base and number.isdigit():  # ``*base`` of the model
            sources.append(f"L['{base}'][{number}]{inner}")
        found.append((f"{top}{inner}", tuple(sources)))
    return found


def bind_by_name(
    program: ExportedProgram, names: Sequence[str], arguments: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split ``arguments`` of ``program.module()``, whose parameters are ``names``, as the program takes them."""
    count, _ = _form(program)
    values = [arguments[name] for name in names if name in arguments]
    return tuple(values[:count]), dict(zip(names[count:], values[count:]))


def fixed_axes(program: ExportedProgram, interface: Interface) -> frozenset[tuple[int, int]]:
    """(entry of a sample, axis) of the sizes that ``program`` has as constants; all entries are tensors."""
    if not all(isinstance(one, torch.Tensor) for one in interface.sample):
        return frozenset()
    args, kwargs = interface.bind(tuple(map(_Place, range(len(interface.sample)))))
    leaves = fx_pytree.tree_flatten_spec((args, kwargs), program.call_spec.in_spec)
    placeholders = {
        node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")
    }
    names = program.graph_signature.user_inputs
    return frozenset(
        (leaf.index, axis)
        for leaf, name in zip(leaves, names, strict=True)
        if isinstance(leaf, _Place)
        for axis, size in enumerate(placeholders[str(name)].shape)
        if isinstance(size, int)
    )


@dataclass(frozen=True)
class _Place:
    """Stands for an entry of a sample."""

    index: int


def _unpacked(writer: ScriptWriter, value: torch._C.Value, like: Any) -> Any:
    """``value``, a structure like ``like``, with the elements of containers taken out."""
    if isinstance(like, dict):
        return {key: _unpacked(writer, _item(writer, value, key), like[key]) for key in like}
    if isinstance(like, list):
        kinds = [value.type().getElementType()] * len(like)
        items = writer.unpack(value, kinds)
        return [_unpacked(writer, item, one) for item, one in zip(items, like, strict=True)]
    if isinstance(like, tuple):
        kind: Any = value.type()
        items = writer.unpack(value, kind.elements(), "Tuple")
        inner = [_unpacked(writer, item, one) for item, one in zip(items, like, strict=True)]
        return type(like)(*inner) if hasattr(like, "_fields") else tuple(inner)
    return value


def _item(writer: ScriptWriter, value: torch._C.Value, key: Any) -> torch._C.Value:
    kind: Any = value.type()
    return writer.op("aten::__getitem__", [value, writer.constant(key)], kind.getValueType())


def annotation_of(program: ExportedProgram, interface: Interface) -> str:
    """The type of what the module returns; raises what ``interface.flatten`` raises."""
    return _annotation(_flat(program, interface, _returned(program))[0])


def outputs_of(program: ExportedProgram, interface: Interface, values: Sequence[Any]) -> Any:
    """``values``, the leaves of the output, as nested tuples of values of the graph."""
    flat, stand_ins = _flat(program, interface, _returned(program))
    by_id = {id(one): value for one, value in zip(stand_ins, values, strict=True)}
    return _replaced(flat, by_id)


def _returned(program: ExportedProgram) -> list[Any]:
    """What the leaves of the output were at export."""
    outputs = program.graph.output_node().args[0]
    assert isinstance(outputs, (list, tuple)), outputs
    specs = program.graph_signature.output_specs
    leaves = [
        one.meta.get("val") if isinstance(one, fx.Node) else one
        for one, spec in zip(outputs, specs, strict=True)
        if spec.kind == OutputKind.USER_OUTPUT
    ]
    return leaves


def _flat(
    program: ExportedProgram, interface: Interface, leaves: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """The output with tensors that stand for those among ``leaves``, and these stand-ins."""
    stand_ins = [torch.empty(0) if isinstance(one, torch.Tensor) else one for one in leaves]
    return interface.flatten(
        pytree.tree_unflatten(stand_ins, program.call_spec.out_spec)
    ), stand_ins


def _annotation(flat: Any) -> str:
    if isinstance(flat, tuple):
        return f"Tuple[{', '.join(map(_annotation, flat)) or '()'}]"
    return "Tensor"


def _replaced(flat: Any, by_id: Mapping[int, Any]) -> Any:
    if isinstance(flat, tuple):
        return tuple(_replaced(one, by_id) for one in flat)
    return by_id[id(flat)]


def returned_value(writer: ScriptWriter, outputs: Any) -> torch._C.Value:
    """One value for ``outputs``: a tensor, or a tuple of tensors and tuples."""
    if isinstance(outputs, tuple):
        return writer.tuple_of([returned_value(writer, one) for one in outputs])
    assert isinstance(outputs, torch._C.Value), outputs
    return outputs
