# SPDX-License-Identifier: Apache-2.0
"""The kind of a call: its arguments without the sizes and contents of their tensors.

    reader = CallReader(inspect.signature(model.forward))
    call = reader.read(args, kwargs)       # call.kind is hashable; call.tensors are those of the arguments
    arguments_of(call.kind, call.tensors)  # (args, kwargs), caches

f(x), f(input=x) and f(x, mask=None) are one kind if ``mask`` is None by default.
"""

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from blade.dropin.nested import NUMBER, NotNested, Parts, Structure, count_tensors, made

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

ORDERS = 64  # of keyword arguments that are remembered
VALUES = 3  # of an int, before it is no part of the kind any more


@dataclass(frozen=True)
class CallKind:
    """What calls have in common that one optimized module can answer: per argument its name ("*": by place) and
    structure, and per tensor its dtype, device and rank."""

    names: tuple[str, ...]
    structures: tuple[Structure, ...]
    tensors: tuple[tuple[torch.dtype, torch.device, int], ...]

    def __hash__(self) -> int:
        found: int | None = vars(self).get("_hash")
        if found is None:
            found = hash((self.names, self.structures, self.tensors))
            object.__setattr__(self, "_hash", found)
        return found

    def labels(self) -> tuple[str, ...]:
        """A name for each tensor, made of the argument's."""
        found: list[str] = []
        for place, (name, structure) in enumerate(zip(self.names, self.structures)):
            count = count_tensors(structure)
            base = f"argument_{place}" if name == "*" else name
            found += [base] if count == 1 else [f"{base}_{k}" for k in range(count)]
        return tuple(found)

    def numbers(self) -> frozenset[str]:
        """The names of the arguments that are numbers of any value."""
        return frozenset(name for name, one in zip(self.names, self.structures) if one == NUMBER)

    def ints(self) -> dict[str, int]:
        """The arguments by name that are constant ints above 0. (0 often means "all": it stays a constant.)"""
        return {
            name: one[2]
            for name, one in zip(self.names, self.structures)
            if one[:2] == ("constant", int) and one[2] > 0 and name != "*"
        }

    def with_numbers(self, names: Collection[str]) -> "CallKind":
        """The kind as it would be if the ints ``names`` were numbers of any value, but for its tensors."""
        pairs = zip(self.names, self.structures)
        return replace(
            self, structures=tuple(NUMBER if name in names else one for name, one in pairs)
        )

    def __str__(self) -> str:
        shown = []
        tensors = iter(self.tensors)
        for name, structure in zip(self.names, self.structures):
            text = _text(structure, tensors)
            shown.append(text if name == "*" else f"{name}: {text}")
        return ", ".join(shown)


@dataclass(frozen=True)
class Call:
    """One call: its kind, its tensors, and the caches among its arguments."""

    kind: CallKind
    tensors: list[torch.Tensor]
    caches: list[Any]


class CallReader:
    """Reads the calls of a ``forward`` with ``signature``."""

    def __init__(self, signature: inspect.Signature) -> None:
        parameters = signature.parameters.values()
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._places = [one.name for one in parameters if one.kind in by_place]
        self._by_place_only = [
            one.name for one in parameters if one.kind is inspect.Parameter.POSITIONAL_ONLY
        ]
        self._defaults = {one.name: one.default for one in parameters if _is_plain(one.default)}
        self.numbers: frozenset[str] = frozenset()  # arguments whose ints are no part of the kind
        self._orders: dict[tuple[str, ...], list[str]] = {}
        self._order = {one.name: place for place, one in enumerate(parameters)}

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Raises ``NotNested`` if an argument is not made of tensors and constants."""
        parts = Parts()
        names: list[str] = []
        structures: list[Structure] = []
        if len(args) > len(self._places) or self._by_place_only:
            for value in args:
                names.append("*")
                structures.append(parts.add(value))
            named: Mapping[str, Any] = kwargs
        else:
            named = {**dict(zip(self._places, args)), **kwargs} if args else kwargs
            if len(named) < len(args) + len(kwargs):
                raise NotNested("an argument that is given twice")
        defaults = self._defaults
        for name in self._sorted(tuple(named)):
            value = named[name]
            if (value is None or value is True or value is False) and (
                name in defaults and value is defaults[name]
            ):
                continue
            names.append(name)
            is_number = name in self.numbers and type(value) is int and value > 0
            structures.append(parts.add_number(value) if is_number else parts.add(value))
        facts = tuple([(t.dtype, t.device, t.dim()) for t in parts.tensors])
        kind = CallKind(tuple(names), tuple(structures), facts)
        return Call(kind, parts.tensors, parts.caches)

    def _sorted(self, names: tuple[str, ...]) -> list[str]:
        found = self._orders.get(names)
        if found is None:
            found = sorted(names, key=self._place)
            if len(self._orders) < ORDERS:
                self._orders[names] = found
        return found

    def _place(self, name: str) -> tuple[int, str]:
        return (self._order.get(name, len(self._order)), name)


def arguments_of(kind: CallKind, tensors: Iterable[torch.Tensor]) -> tuple[Arguments, list[Any]]:
    """The arguments of a call of ``kind`` with ``tensors``, and the caches that were made for it."""
    left = iter(tensors)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    caches: list[Any] = []
    for name, structure in zip(kind.names, kind.structures):
        value = made(structure, left)
        if name == "*":
            args.append(value)
        else:
            kwargs[name] = value
        caches += _caches_in(structure, value)
    return (tuple(args), kwargs), caches


def varying(kinds: Iterable[CallKind]) -> frozenset[str]:
    """The arguments that are ints of ``VALUES`` values or more in kinds that are equal otherwise."""
    values: dict[tuple[str, CallKind], set[int]] = {}
    for kind in kinds:
        for name, value in kind.ints().items():
            values.setdefault((name, kind.with_numbers((name,))), set()).add(value)
    return frozenset(name for (name, _), found in values.items() if len(found) >= VALUES)


def _is_plain(value: Any) -> bool:
    return value is None or value is True or value is False


def _caches_in(structure: Structure, value: Any) -> list[Any]:
    how = structure[0]
    if how == "cache":
        return [value]
    if how == "items":
        return [c for part, item in zip(structure[2], value) for c in _caches_in(part, item)]
    if how == "mapping":
        return [c for key, part in zip(*structure[2:]) for c in _caches_in(part, value[key])]
    if how in ("dataclass", "namedtuple"):
        return [
            c for key, part in zip(*structure[2:]) for c in _caches_in(part, getattr(value, key))
        ]
    return []


def _text(structure: Structure, tensors: Any) -> str:
    how = structure[0]
    if how == "tensor":
        dtype, _, rank = next(tensors)
        return f"{str(dtype).removeprefix('torch.')}[{', '.join('?' * rank)}]"
    if how == "constant":
        return repr(structure[2])
    if how == "number":
        next(tensors)
        return "int"
    if how == "items":
        return f"({', '.join(_text(part, tensors) for part in structure[2])})"
    if how == "cache":
        for _ in range(count_tensors(structure)):
            next(tensors)
        return f"{structure[1].__name__} of {count_tensors(structure)} tensors"
    fields = zip(structure[2], structure[3])
    return "{" + ", ".join(f"{key}: {_text(part, tensors)}" for key, part in fields) + "}"
