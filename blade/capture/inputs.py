# SPDX-License-Identifier: Apache-2.0
"""Normalize the user's samples to positional tuples, and bind them to the call that the model expects.

    call, samples = normalize(signature, {"input_ids": ids, "attention_mask": mask}, bake=True)
    args, kwargs = call.bind(samples[0])        # model(*args, **kwargs)

A list is a list of samples; a tuple is one sample's positional arguments, a mapping its keyword arguments, a
tensor the only argument. The order of a positional tuple is the forward signature's.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    """One argument of the call: an entry of each sample, or (``baked``) always ``value``."""

    name: str
    positional: bool
    baked: bool = False
    value: Any = None


@dataclass(frozen=True)
class CallSignature:
    """How a positional sample becomes the arguments of the model's ``forward``."""

    slots: tuple[ArgumentSlot, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each entry of a sample."""
        return tuple(slot.name for slot in self.slots if not slot.baked)

    @property
    def baked(self) -> dict[str, Any]:
        """The arguments that are no entry of a sample, by name."""
        return {slot.name: slot.value for slot in self.slots if slot.baked}

    def bind(self, sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments for ``forward``."""
        entries = iter(sample)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for slot in self.slots:
            value = slot.value if slot.baked else next(entries)
            if slot.positional:
                args.append(value)
            else:
                kwargs[slot.name] = value
        return tuple(args), kwargs


def normalize(
    signature: inspect.Signature, inputs: Any, bake: bool
) -> tuple[CallSignature, tuple[Sample, ...]]:
    """Return ``inputs`` as samples in the order of ``signature``.

    With ``bake``, arguments without a tensor become constants of the call (they must be equal in all samples)
    and arguments not given are left out; without it every parameter is an entry, with its default if it was
    not given. Raises ``InputError``.
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
    _check_alike(rows, same_constants=bake)
    call, _ = call_from(rows[0], bake)
    samples = tuple(call_from(row, bake)[1] for row in rows)
    return call, samples


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

    Raises ``InputError`` for tensors that are not strided, and for those that Python code implements.
    """

    def ordinary(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
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


def _check_alike(rows: list[list[Argument]], same_constants: bool) -> None:
    """Raise unless all samples have the same arguments, structure, dtypes, ranks and devices."""
    first = rows[0]
    for index, row in enumerate(rows[1:], start=1):
        names, others = [name for name, _, _ in first], [name for name, _, _ in row]
        if names != others:
            raise InputError(
                f"inputs: sample {index} gives the arguments {others}, sample 0 gives {names}; "
                "all samples must give the same ones."
            )
        for (name, _, a), (_, _, b) in zip(first, row):
            if (kind := _difference(a, b, same_constants)) is not None:
                raise InputError(
                    f"inputs: argument {name!r} differs in {kind} between sample 0 ({_describe(a)}) and "
                    f"sample {index} ({_describe(b)}); only the sizes of tensors may differ."
                )


def _difference(a: Any, b: Any, same_constants: bool) -> str | None:
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
        elif same_constants and (type(x) is not type(y) or x != y):
            return "value"
    return None
