# SPDX-License-Identifier: Apache-2.0
"""Interprets the graph of a scripted module in Python: over fake tensors, to learn what it returns, or under
``torch.export``, which then sees ATen ops.

    class OverFakes(ScriptInterpreter):
        def decide(self, condition): ...
    outputs = OverFakes().run(module, [x, y])

Numbers that the graph holds in tensors (sizes) are Python's, or symbolic ones. Raises ``NotInterpreted`` for what
has no form in Python, and ``Ended`` where the call ends in an error or is the original model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from blade.graph.torchscript.bind_overloads import resolve, split_arguments, to_python
from blade.graph.torchscript.symbolic_sizes import (
    NUMBER_TYPES,
    NUMBERS,
    OF_TENSOR,
    NotOfSizes,
    dtype_of_number,
)

CppModule = Any  # torch._C.ScriptModule


class NotInterpreted(Exception):
    """The graph has something that the interpreter does not know."""


class Ended(Exception):
    """This path has no result of its own: it raises, or asks the original model."""


class ScriptInterpreter:
    """Calls every op of a graph as it is; subclasses decide what else to do with ops, calls and branches."""

    def __init__(self) -> None:
        self._constants: dict[int, torch.Tensor] = {}

    def run(self, module: CppModule, inputs: Sequence[Any], method: str = "forward") -> list[Any]:
        """The results of ``module``'s method; ``module`` is a ``torch._C.ScriptModule``."""
        graph: Any = module._get_method(method).graph
        known: dict[int, Any] = {}
        for value, given in zip(graph.inputs(), (module, *inputs), strict=True):
            known[value.unique()] = given
        return self._block(graph, known)

    def decide(self, condition: Any) -> bool:
        """Which branch an If takes, and whether a loop goes on."""
        if isinstance(condition, torch.Tensor):
            raise NotInterpreted("a branch by an element")
        return bool(condition)

    def call(self, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of an op."""
        return overload(*args, **kwargs)

    def call_module(self, module: CppModule, method: str, inputs: Sequence[Any], name: str) -> Any:
        """The result of the module that is the attribute ``name``; several outputs of its graph as a tuple."""
        results = self.run(module, inputs, method)
        return results[0] if len(results) == 1 else tuple(results)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor to compute with in place of a weight."""
        return tensor

    def number_tensor(self, number: Any, dtype: torch.dtype) -> torch.Tensor:
        """A tensor without axes that holds ``number``."""
        return torch.scalar_tensor(number, dtype=dtype)

    def _block(self, block: Any, known: dict[int, Any]) -> list[Any]:
        for node in block.nodes():
            self._node(node, known)
        return [known[value.unique()] for value in block.outputs()]

    def _node(self, node: Any, known: dict[int, Any]) -> None:
        kind = node.kind()
        outputs = list(node.outputs())
        if kind == "prim::If":
            results: Any = self._branch(node, known)
        elif kind == "prim::Loop":
            results = self._loop(node, known)
        else:
            made = self._value(node, kind, [known.get(v.unique()) for v in node.inputs()])
            results = [made] if len(outputs) == 1 else list(made or ())
        if len(results) != len(outputs):
            raise NotInterpreted(kind)
        known.update((value.unique(), made) for value, made in zip(outputs, results))

    def _branch(self, node: Any, known: dict[int, Any]) -> list[Any]:
        taken, other = node.blocks()
        condition = known[node.inputsAt(0).unique()]
        return self._block(taken if self.decide(condition) else other, known)

    def _loop(self, node: Any, known: dict[int, Any]) -> list[Any]:
        [body] = node.blocks()
        most, goes_on, *carried = (known[v.unique()] for v in node.inputs())
        if not isinstance(most, int):
            raise NotInterpreted("a loop whose length is a size")
        counter, *places = body.inputs()
        for turn in range(most):
            if not self.decide(goes_on):
                break
            known[counter.unique()] = turn
            known.update((v.unique(), value) for v, value in zip(places, carried, strict=True))
            goes_on, *carried = self._block(body, known)
        return carried

    def _value(self, node: Any, kind: str, given: list[Any]) -> Any:
        if kind == "prim::Constant":
            return self._held(node)
        if kind in _STRUCTURE:
            return _STRUCTURE[kind](*given)
        if kind == "prim::GetAttr":
            return self._attribute(given[0], node.s("name"))
        if kind == "prim::CallMethod":
            module, *inputs = given
            holder = node.inputsAt(0).node()
            name = holder.s("name") if holder.kind() == "prim::GetAttr" else ""
            return self.call_module(module, node.s("name"), inputs, name)
        if kind in ("prim::RaiseException", "blade::answer_by_original"):
            raise Ended
        if kind == "blade::count_path":
            return None
        if kind == "blade::has_original_changed":
            return False
        first = given[0] if given else None
        if kind in OF_TENSOR and isinstance(first, torch.Tensor):
            return OF_TENSOR[kind](*given)
        if kind in NUMBERS and not any(isinstance(x, torch.Tensor) for x in given):
            return self._number(kind, given)
        if kind in _READS and isinstance(first, torch.Tensor):
            return first.item()
        if kind in _LISTS and isinstance(first, (list, dict)):
            return _LISTS[kind](*given)
        return self._op(node, kind, given)

    def _number(self, kind: str, given: list[Any]) -> Any:
        try:
            return NUMBERS[kind](given)
        except NotOfSizes as error:
            raise NotInterpreted(f"{kind}: {error}") from error

    def _held(self, node: Any) -> Any:
        held = node.output().toIValue()
        if not isinstance(held, torch.Tensor):
            return held
        is_number = held.dim() == 0 and not (held.is_floating_point() or held.is_complex())
        return held.item() if is_number else self._once(held)

    def _attribute(self, module: CppModule, name: str) -> Any:
        found = module.getattr(name)
        return self._once(found) if isinstance(found, torch.Tensor) else found

    def _once(self, tensor: torch.Tensor) -> torch.Tensor:
        key = tensor._cdata  # of a constant, whose Python object is made anew each time
        if key not in self._constants:
            self._constants[key] = self.constant(tensor)
        return self._constants[key]

    def _op(self, node: Any, kind: str, given: list[Any]) -> Any:
        overload = resolve(node)
        if overload is None:
            raise NotInterpreted(kind)
        device = next((x.device for x in given if isinstance(x, torch.Tensor)), None)
        values = {
            argument.name: to_python(argument, self._operand(argument, value, device))
            for argument, value in zip(overload._schema.arguments, given, strict=True)
        }
        args, kwargs = split_arguments(overload, values)
        return self.call(overload, args, kwargs)

    def _operand(self, argument: Any, value: Any, device: torch.device | None) -> Any:
        """``value``; a number that the graph holds in a tensor is one again where an op takes a tensor."""
        kind = str(argument.type)
        if kind.startswith(("List[Tensor", "List[Optional[Tensor")) and isinstance(value, list):
            return [self.as_tensor(item, device) for item in value]
        if kind.startswith(("Tensor", "Optional[Tensor")):
            return self.as_tensor(value, device)
        return value

    def as_tensor(self, value: Any, device: torch.device | None) -> Any:
        """``value``, or a tensor that holds it if it is a number."""
        if not isinstance(value, NUMBER_TYPES):
            return value
        made = self.number_tensor(value, dtype_of_number(value))
        return made if device is None or device.type == "cpu" else made.to(device)


def _unpacked(items: Any) -> Any:
    return items[0] if len(items) == 1 else items


def _pairs(*entries: Any) -> dict[Any, Any]:
    return dict(zip(entries[::2], entries[1::2], strict=True))


def _append(items: list[Any], item: Any) -> list[Any]:
    items.append(item)
    return items


_STRUCTURE: Mapping[str, Callable[..., Any]] = {
    "prim::ListConstruct": lambda *items: list(items),
    "prim::TupleConstruct": lambda *items: items,
    "prim::ListUnpack": _unpacked,
    "prim::TupleUnpack": _unpacked,
    "prim::TupleIndex": lambda items, index: items[index],
    "prim::DictConstruct": _pairs,
    "prim::unchecked_cast": lambda value: value,
    "prim::Uninitialized": lambda: None,
    "aten::__isnot__": lambda a, b: (a is None) != (b is None),
    "aten::__is__": lambda a, b: (a is None) == (b is None),
}
_READS = frozenset("aten::Int aten::IntImplicit aten::item aten::Float aten::Bool".split())
_LISTS: Mapping[str, Callable[..., Any]] = {
    "aten::append": _append,
    "aten::__getitem__": lambda items, key: items[key],
    "aten::len": len,
    "aten::slice": lambda items, start, end, step: items[start:end:step],
}
