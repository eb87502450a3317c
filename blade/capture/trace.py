# SPDX-License-Identifier: Apache-2.0
"""Three ways from an ``nn.Module`` to a ScriptModule: trace all of it, script all of it, or trace the
named submodules and script the rest."""

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from blade.capture.inputs import Call, Sample
from blade.capture.original import copy_of
from blade.capture.outputs import tensors_of
from blade.errors import InputError


@dataclass(frozen=True)
class Trace:
    """A traced module and what the tracer warned about, one sentence each."""

    module: torch.jit.ScriptModule
    warnings: tuple[str, ...]

    @property
    def branches_on_values(self) -> bool:
        """Whether Python decided something on the value of a tensor while tracing."""
        return any("Python boolean" in text for text in self.warnings)


def trace(model: nn.Module, call: Call, sample: Sample, is_plain: bool) -> Trace:
    """``model`` traced at ``sample``; its parameters keep the names in ``call``.

    ``is_plain`` says that forward takes the sample as it is and returns tensors only; otherwise a
    wrapper does the translation.
    """
    target = model if is_plain else _adapter(model, call)
    with _quiet() as caught, torch.no_grad():
        module = torch.jit.trace(target, copy_of(sample), check_trace=False, strict=False)
    texts = dict.fromkeys(
        str(one.message) for one in caught if issubclass(one.category, torch.jit.TracerWarning)
    )
    return Trace(module, tuple(texts))


def script(model: nn.Module) -> torch.jit.ScriptModule:
    """``model`` scripted; raises what ``torch.jit.script`` raises."""
    with _quiet():
        return torch.jit.script(model)


def script_around(
    model: nn.Module, names: Sequence[str], call: Call, sample: Sample
) -> torch.jit.ScriptModule:
    """``model`` scripted, with the submodules ``names`` traced at what ``sample`` gives them.

    Changes ``model``: the named submodules are replaced. Raises ``InputError`` for an unknown name or
    a submodule that ``sample`` does not reach.
    """
    parts = dict(model.named_modules())
    for name in names:
        if not name or name not in parts:
            known = ", ".join(sorted(name for name in parts if name)[:20])
            raise InputError(
                f"allow_tracing: the model has no submodule {name!r}; it has: {known}."
            )
    seen = _calls_of({name: parts[name] for name in names}, model, call, sample)
    for name in names:
        if name not in seen:
            raise InputError(f"allow_tracing: the first sample never calls the submodule {name!r}.")
        args, kwargs = seen[name]
        inner, entries = _call_of(parts[name], args, kwargs)
        with _quiet(), torch.no_grad():
            traced = trace(parts[name], inner, entries, is_plain=False).module
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, traced)
    return script(model)


def _call_of(part: nn.Module, args: Any, kwargs: Any) -> tuple[Call, Sample]:
    

    bound = inspect.signature(part.forward).bind(*args, **kwargs)
    slots = tuple(Slot(n, True, not has_tensor(v), v) for n, v in bound.arguments.items())
    return Call(slots), tuple(v for v in bound.arguments.values() if has_tensor(v))


def _calls_of(parts: dict[str, nn.Module], model: nn.Module, call: Call, sample: Sample) -> Any:
    """The first (args, kwargs) each of ``parts`` is called with when ``model`` runs ``sample``."""
    seen: dict[str, Any] = {}
    hooks = [
        part.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: (
                seen.setdefault(name, copy_of((args, kwargs))) and None
            ),
            with_kwargs=True,
        )
        for name, part in parts.items()
    ]
    args, kwargs = call.bind(copy_of(sample))
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


class _Adapter(nn.Module):
    """Takes the entries of a sample, calls the model as the user does, returns tensors."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self.__dict__["_call"] = call
        self.training = False


def _adapter(model: nn.Module, call: Call) -> nn.Module:
    def forward(self: Any, *sample: Any) -> Any:
        args, kwargs = self._call.bind(sample)
        return tensors_of(self.model(*args, **kwargs))

    # torch.jit.trace names the graph's inputs after the signature of forward.
    place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, place) for name in ("self", *call.names)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return type(f"Captured{type(model).__name__}", (_Adapter,), {"forward": forward})(model, call)


@contextlib.contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Collect the tracer's warnings about the model's own lines, and show none of any kind."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=torch.jit.TracerWarning)
        torch.jit.TracerWarning.ignore_lib_warnings()
        yield caught
