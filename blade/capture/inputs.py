# SPDX-License-Identifier: Apache-2.0
"""Normalize the user's samples to positional tuples, and bind them to the call that the model expects.

    call, samples = normalize(signature, {"input_ids": ids, "attention_mask": mask}, bake=True)
    args, kwargs = call.bind(samples[0])        # model(*args, **kwargs)

A list is a list of samples; a tuple is one sample's positional arguments, a mapping its keyword arguments, a
tensor the only argument. The order of a positional tuple is the forward signature's.
"""

import dataclasses
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from blade.errors import InputError

Sample = tuple[Any, ...]
Argument = tuple[str, bool, Any]  # name, passed by position, value


MEASURED = 8  # samples of different sizes that are verified and timed; the others calibrate


@dataclass(frozen=True)
class ArgumentSlot:
    """One argument of the call: an entry of each sample, or (``baked``) always ``value``.

    With a ``guard``, the TorchScript type of the argument, it decides between paths by its value, which is
    ``value`` by default, or by whether it is there.
    """

    name: str
    positional: bool
    baked: bool = False
    value: Any = None
    guard: str = ""


@dataclass(frozen=True)
class CallSignature:
    """How a positional sample becomes the arguments of the model's ``forward``.

    The entries of a sample are those without a guard, then those with one; both in the order of the slots.
    """

    slots: tuple[ArgumentSlot, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each entry of a sample."""
        return tuple(slot.name for slot in self._entries())

    @property
    def guards(self) -> dict[int, ArgumentSlot]:
        """The slots with a guard, by the index of their entry."""
        return {index: slot for index, slot in enumerate(self._entries()) if slot.guard}

    @property
    def baked(self) -> dict[str, Any]:
        """The arguments that are no entry of a sample, by name."""
        return {slot.name: slot.value for slot in self.slots if slot.baked}

    def bind(self, sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments for ``forward``."""
        entries = dict(zip(self.names, sample, strict=True))
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for slot in self.slots:
            value = slot.value if slot.baked else entries[slot.name]
            if slot.positional:
                args.append(value)
            else:
                kwargs[slot.name] = value
        return tuple(args), kwargs

    def with_constants(self, sample: Sample) -> tuple["CallSignature", Sample]:
        """The call in which the entries of ``sample`` that are guarded and no tensors are baked in, and the
        rest of ``sample``."""
        fixed = {
            slot.name: sample[index]
            for index, slot in self.guards.items()
            if not isinstance(sample[index], torch.Tensor)
        }
        slots = tuple(
            replace(slot, baked=True, value=fixed[slot.name], guard="")
            if slot.name in fixed
            else slot
            for slot in self.slots
        )
        entries = zip(self.names, sample, strict=True)
        return CallSignature(slots), tuple(value for name, value in entries if name not in fixed)

    def _entries(self) -> list[ArgumentSlot]:
        taken = [slot for slot in self.slots if not slot.baked]
        return sorted(taken, key=lambda slot: bool(slot.guard))


def normalize(
    signature: inspect.Signature, inputs: Any, bake: bool
) -> tuple[CallSignature, tuple[Sample, ...]]:
    """Return ``inputs`` as samples in the order of ``signature``.

    With ``bake``, numbers, strings and ``None`` get guards, other arguments without a tensor become constants of
    the call (they must be equal in all samples) and arguments that no sample gives are left out; without it
    every parameter is an entry, with its default if it was not given. Raises ``InputError``.
    """
    rows = [
        [
            (name, positional, _ordinary(name, value, index))
            for name, positional, value in flat_arguments(
                _bind(signature, one, index), defaults=not bake
            )
        ]
        for index, one in enumerate(_as_list(inputs))
    ]
    if bake:
        rows = _completed(rows, signature)
    _check_alike(rows, bake)
    if not bake:
        call, _ = call_from(rows[0], bake)
        return call, tuple(call_from(row, bake)[1] for row in rows)
    columns = [[value for _, _, value in one] for one in zip(*rows, strict=True)]
    slots = [_slot(values, *first) for values, first in zip(columns, rows[0], strict=True)]
    call = CallSignature(tuple(_in_order(slots, columns)))
    given = [{name: value for name, _, value in row} for row in rows]
    return call, tuple(tuple(row[name] for name in call.names) for row in given)


def gathered(inputs: Any, most: int) -> Any:
    """Return ``inputs``, or the first ``most`` samples of an iterable (a generator, a loader) of samples."""
    if isinstance(inputs, (torch.Tensor, tuple, list, Mapping, str)) or not isinstance(
        inputs, Iterable
    ):
        return inputs
    return list(islice(inputs, most))


def to_calibrate(inputs: Any, most: int) -> tuple[Any, list[Any]]:
    """Split samples into the first of each size, as a list, and the rest of the first ``most``."""
    if not isinstance(inputs, list):
        return inputs, []
    first: dict[object, Any] = {}
    rest = []
    for one in inputs:
        leaves, spec = pytree.tree_flatten(one)
        sizes = (spec, *(tuple(x.shape) for x in leaves if isinstance(x, torch.Tensor)))
        fresh = repr(sizes) not in first and len(first) < MEASURED
        if fresh:
            first[repr(sizes)] = one
        else:
            rest.append(one)
    return list(first.values()), rest[: max(0, most - len(first))]


def call_from(arguments: Sequence[Argument], bake: bool) -> tuple[CallSignature, Sample]:
    """Return the call with these ``arguments``, and its sample; with ``bake`` only tensors are entries."""
    slots = tuple(
        ArgumentSlot(name, positional, True, value)
        if bake and not has_tensor(value)
        else ArgumentSlot(name, positional)
        for name, positional, value in arguments
    )
    entries = (value for (_, _, value), slot in zip(arguments, slots) if not slot.baked)
    return CallSignature(slots), tuple(entries)


def takes_in_order(call: CallSignature, signature: inspect.Signature) -> bool:
    """Whether ``forward(*sample)`` is the call: no constants, and nothing that goes by keyword only."""
    if call.baked or call.guards:
        return False
    if all(slot.positional for slot in call.slots):
        return True
    in_order = [
        name
        for name, one in signature.parameters.items()
        if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    return list(call.names) == in_order[: len(call.slots)]


def _completed(rows: list[list[Argument]], signature: inspect.Signature) -> list[list[Argument]]:
    """``rows`` with the defaults of arguments that only some of them give."""
    parameters = signature.parameters
    known = {name: positional for row in rows for name, positional, _ in row}
    if all(len(row) == len(known) for row in rows):
        return rows
    order = [*(name for name in parameters if name in known)]
    order += [name for name in known if name not in parameters]
    found = []
    for row in rows:
        given = {name: (positional, value) for name, positional, value in row}
        if any(
            name not in given and _default(parameters.get(name)) is inspect.Parameter.empty
            for name in order
        ):
            return rows  # the difference is reported
        found.append(
            [
                (name, *given.get(name, (known[name], _default(parameters.get(name)))))
                for name in order
            ]
        )
    return found


def _default(parameter: inspect.Parameter | None) -> Any:
    return inspect.Parameter.empty if parameter is None else parameter.default


def _slot(values: Sequence[Any], name: str, positional: bool, first: Any) -> ArgumentSlot:
    """The slot of an argument that has ``values``, the ``first`` of them in the first sample."""
    given = [value for value in values if value is not None]
    optional = len(given) < len(values)
    if given and (has_tensor(given[0]) or not all(map(is_guarded, given))):
        if not optional and has_tensor(given[0]):
            return ArgumentSlot(name, positional)
        if not optional or not isinstance(given[0], torch.Tensor):
            return ArgumentSlot(name, positional, True, first)
    kind = type(given[0]).__name__ if given and is_guarded(given[0]) else "Tensor"
    default = None if isinstance(first, torch.Tensor) else first
    guard = f"Optional[{kind}]" if optional else kind
    return ArgumentSlot(name, positional, value=default, guard=guard)


def _in_order(
    slots: Sequence[ArgumentSlot], columns: Sequence[Sequence[Any]]
) -> Iterator[ArgumentSlot]:
    """``slots``, in which a tensor behind one with a guard has a guard as well.

    Entries with guards come last: otherwise ``forward(x, mask, bias)`` would take ``x, bias, mask``.
    """
    is_behind = False
    for slot, values in zip(slots, columns, strict=True):
        is_tensor = all(isinstance(value, torch.Tensor) for value in values)
        if is_behind and is_tensor and not slot.baked and not slot.guard:
            slot = replace(slot, guard="Optional[Tensor]")
        is_behind |= bool(slot.guard)
        yield slot


def is_guarded(value: Any) -> bool:
    """Whether an argument's ``value`` is one that TorchScript has a constant for, and compares."""
    if type(value) is str:
        return value.isascii() and value.isprintable()
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is bool or (type(value) is int and value.bit_length() < 64)


def has_tensor(value: Any) -> bool:
    """Whether a tensor is anywhere in ``value``."""
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def name_of_leaf(names: Sequence[str], sample: Sample, index: int) -> str:
    """Return the name of the argument that leaf ``index`` of ``sample`` belongs to."""
    ends = [len(pytree.tree_leaves(sample[: i + 1])) for i in range(len(sample))]
    return next(name for name, end in zip(names, ends) if index < end)


def describe(names: Iterable[str], sample: Sample) -> str:
    """``input_ids: int64[2, 16], mask: None`` for messages."""
    return ", ".join(f"{name}: {_describe(value)}" for name, value in zip(names, sample))


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{dtype}{list(value.shape)}{where}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_describe, value))})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_describe(item)}" for key, item in value.items()) + "}"
    return (
        repr(value) if isinstance(value, (type(None), bool, int, float, str)) else str(type(value))
    )


def _as_list(inputs: Any) -> list[Any]:
    samples = inputs if isinstance(inputs, list) else [inputs]
    if not samples:
        raise InputError("inputs: an empty list; give at least one sample.")
    for index, one in enumerate(samples):
        if not isinstance(one, (torch.Tensor, tuple, Mapping)):
            raise InputError(
                f"inputs: sample {index} is of type {type(one).__name__}; a sample is a tensor, a tuple of "
                "positional arguments or a mapping of keyword arguments (a list is a list of samples)."
                + _hint(one)
            )
    return samples


def _hint(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return " Turn the array into a tensor: torch.from_numpy(array)."
    if isinstance(value, list):
        return " A list that is an argument goes into a tuple: (list,)."
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return " Of what yields samples make a list; with enable_int8 it is taken as it is."
    return ""


def _ordinary(name: str, value: Any, index: int) -> Any:
    """Return ``value`` with its tensors detached and of torch's own class, so that they can be copied.

    Raises ``InputError`` for tensors that are not strided, for those that Python code implements, and for tensors in
    dataclasses, which TorchScript has no type for.
    """

    def ordinary(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            if any(map(has_tensor, _fields(leaf))):
                raise InputError(
                    f"inputs: argument {name!r} of sample {index} is a {type(leaf).__name__}, whose tensors would be "
                    "constants; graphs take tensors, and tuples, lists and dicts of them: give one of those, and make "
                    f"the {type(leaf).__name__} inside of forward."
                )
            return leaf
        if leaf.layout is not torch.strided or leaf.is_nested:
            raise InputError(
                f"inputs: argument {name!r} of sample {index} is a tensor with the layout {leaf.layout}; "
                "graphs take dense (strided) tensors: give a dense one, or make it inside of forward."
            )
        if torch._C._dispatch_keys(leaf).has(torch._C.DispatchKey.Python):
            raise InputError(
                f"inputs: argument {name!r} of sample {index} is a {type(leaf).__name__}, which computes in "
                "Python; give an ordinary tensor."
            )
        plain = leaf.detach() if leaf.requires_grad else leaf
        return plain if type(plain) is torch.Tensor else plain.as_subclass(torch.Tensor)

    return pytree.tree_map(ordinary, value)


def _fields(leaf: Any) -> list[Any]:
    """What is in a leaf of an argument that is a dataclass."""
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return []
    return [getattr(leaf, one.name, None) for one in dataclasses.fields(leaf)]


def _bind(signature: inspect.Signature, sample: Any, index: int) -> inspect.BoundArguments:
    try:
        if isinstance(sample, Mapping):
            return signature.bind(**sample)
        return signature.bind(*((sample,) if isinstance(sample, torch.Tensor) else sample))
    except TypeError as error:
        raise InputError(
            f"inputs: sample {index} does not fit forward{signature}: {error}. "
            "(A tuple is one sample's positional arguments, a list is a list of samples.)"
        ) from error


def flat_arguments(bound: inspect.BoundArguments, defaults: bool = False) -> list[Argument]:
    """Return every argument, with ``*args`` and ``**kwargs`` unpacked."""
    if defaults:
        bound.apply_defaults()
    parameters = bound.signature.parameters
    kinds = {name: parameters[name].kind for name in bound.arguments}
    spread = any(kind is inspect.Parameter.VAR_POSITIONAL for kind in kinds.values())
    flat: list[Argument] = []
    for name, value in bound.arguments.items():
        if kinds[name] is inspect.Parameter.VAR_POSITIONAL:
            flat += [(f"{name}_{i}", True, item) for i, item in enumerate(value)]
        elif kinds[name] is inspect.Parameter.VAR_KEYWORD:
            flat += [(key, False, item) for key, item in value.items()]
        else:
            only = kinds[name] is inspect.Parameter.POSITIONAL_ONLY
            by_place = only or (spread and kinds[name] is inspect.Parameter.POSITIONAL_OR_KEYWORD)
            flat.append((name, by_place, value))
    return flat


def _check_alike(rows: list[list[Argument]], bake: bool) -> None:
    """Raise unless all samples have the same arguments, structure, dtypes, ranks and devices."""
    first = rows[0]
    for index, row in enumerate(rows[1:], start=1):
        names, others = [name for name, _, _ in first], [name for name, _, _ in row]
        if names != others:
            raise InputError(
                f"inputs: sample {index} gives the arguments {others}, sample 0 gives {names}; "
                "all samples must give the same ones."
            )
        for position, ((name, _, a), (_, _, b)) in enumerate(zip(first, row)):
            if bake and _may_be_none(a, b):
                a = next((r[position][2] for r in rows if r[position][2] is not None), None)
                if _may_be_none(a, b):
                    continue
            if (kind := _difference(a, b, bake)) is not None:
                raise InputError(
                    f"inputs: argument {name!r} differs in {kind} between sample 0 ({_describe(a)}) and "
                    f"sample {index} ({_describe(b)}); sizes of tensors may differ, and values of str, bool, int "
                    "and float."
                )


def _may_be_none(a: Any, b: Any) -> bool:
    """Whether one of them is ``None``, and the other is, or has a guard."""
    return (a is None or b is None) and all(
        value is None or is_guarded(value) or isinstance(value, torch.Tensor) for value in (a, b)
    )


def _difference(a: Any, b: Any, bake: bool) -> str | None:
    if bake and is_guarded(a) and is_guarded(b):
        return None if type(a) is type(b) else "type"
    leaves_a, spec_a = pytree.tree_flatten(a)
    leaves_b, spec_b = pytree.tree_flatten(b)
    if spec_a != spec_b:
        return "structure"
    for x, y in zip(leaves_a, leaves_b):
        if isinstance(x, torch.Tensor) != isinstance(y, torch.Tensor):
            return "type"
        if isinstance(x, torch.Tensor):
            for what, u, v in (
                ("dtype", x.dtype, y.dtype),
                ("rank", x.dim(), y.dim()),
                ("device", x.device, y.device),
            ):
                if u != v:
                    return what
        elif bake and (type(x) is not type(y) or x != y):
            return "value"
    return None
