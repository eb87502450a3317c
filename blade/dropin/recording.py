# SPDX-License-Identifier: Apache-2.0
"""``blade.record``: note the calls of a module while a program uses it.

with blade.record(model) as samples:
    pipe("some text")
optimized = blade.optimize(model, samples)

with blade.record(pipe, "unet", "text_encoder") as calls:
    pipe("a cat")
pipe.unet = blade.accelerate(pipe.unet, calls["unet"])
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from blade.capture.reference_model import copy_of
from blade.capture.samples import Samples
from blade.dropin.caches import cache_parts, is_cache
from blade.dropin.call_kind import CallReader
from blade.dropin.nested import NotNested
from blade.errors import InputError

MEGABYTE = 2**20

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Calls = list[tuple[Arguments, int]]  # each with how often it was seen


def record(model: Any, *parts: str, limit_mb: float = 256.0) -> Any:
    """A context in which the calls of ``model`` are recorded; it yields ``Samples``.

    With ``parts``, names of submodules of ``model`` or of modules that are attributes of it (a pipeline), it yields a
    dict from these names to ``Samples``. Calls are those of the module (``model(...)``), not of its methods.
    Tensors are copied, ``limit_mb`` megabytes of them at most per module. Nothing is added to the model afterwards.

    Raises ``InputError`` for what is no module.
    """
    if limit_mb <= 0:
        raise InputError(f"limit_mb: a number above 0 is expected, got {limit_mb}.")
    if not parts:
        return _recorded(_module(model, ""), limit_mb)
    return _all_recorded({name: _module(model, name) for name in parts}, limit_mb)


def samples_of(samples: Any) -> list[Any]:
    """``samples`` as a list of samples, each a tensor, a tuple or a mapping."""
    if isinstance(samples, list):
        return samples
    return [samples]


def call_of(sample: Any) -> Arguments:
    """The arguments of the call that ``sample`` stands for."""
    if isinstance(sample, torch.Tensor):
        return (sample,), {}
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, tuple):
        return sample, {}
    raise InputError(
        f"samples: a sample is a tensor, a tuple of positional arguments or a mapping of keyword arguments, not "
        f"{type(sample).__name__}."
    )


def calls_of(samples: Any) -> Calls:
    """The calls that ``samples`` stand for."""
    calls = [call_of(one) for one in samples_of(samples)]
    counts = samples.counts if isinstance(samples, Samples) else [1] * len(calls)
    return list(zip(calls, counts))


@contextmanager
def _recorded(module: nn.Module, limit_mb: float) -> Iterator[Samples]:
    samples = Samples()
    signature = inspect.signature(module.forward)
    reader = CallReader(signature)
    known: dict[Any, int] = {}
    left = limit_mb * MEGABYTE

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal left
        try:
            call = reader.read(args, kwargs)
        except NotNested:
            samples.skipped += 1
            return
        key = (call.kind, tuple(tuple(t.shape) for t in call.tensors))
        size = sum(t.numel() * t.element_size() for t in call.tensors)
        if key in known:
            samples.counts[known[key]] += 1
        elif size > left or (sample := _sample(signature, args, kwargs)) is None:
            samples.skipped += 1
        else:
            left -= size
            known[key] = len(samples)
            samples.append(copy_of(_with_own_caches(sample)))
            samples.counts.append(1)

    handle = module.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
    try:
        yield samples
    finally:
        handle.remove()


@contextmanager
def _all_recorded(
    modules: Mapping[str, nn.Module], limit_mb: float
) -> Iterator[dict[str, Samples]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(_recorded(module, limit_mb))
            for name, module in modules.items()
        }


def _sample(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any | None:
    """The call as a sample; ``None`` if it has both unnamed and named arguments that no mapping takes."""
    if not kwargs:
        return args
    if not args:
        return dict(kwargs)
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    if any(one.kind in places for one in signature.parameters.values()):
        return None
    return {**dict(zip(signature.parameters, args)), **kwargs}


def _with_own_caches(sample: Any) -> Any:
    """``sample`` with copies of its caches, which the call is about to fill."""

    def copied(leaf: Any) -> Any:
        if not is_cache(leaf):
            return leaf
        tensors = cache_parts(leaf)[1]
        return copy.deepcopy(leaf, {id(t): t.detach().clone() for t in tensors})

    return pytree.tree_map(copied, sample)


def _module(model: Any, name: str) -> nn.Module:
    found = model
    for part in filter(None, name.split(".")):
        found = getattr(found, part, None)
    if not isinstance(found, nn.Module) or isinstance(found, torch.jit.ScriptModule):
        what = f"{type(model).__name__}.{name}" if name else "model"
        raise InputError(f"{what}: a torch.nn.Module is expected, got {type(found).__name__}.")
    return found
