# SPDX-License-Identifier: Apache-2.0
"""Three ways from an ``nn.Module`` to a ScriptModule: trace all of it, script all of it, or trace the
named submodules and script the rest."""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.jit._trace import TracerWarning
from torch.utils import _pytree as pytree

from blade.capture.captured import Limit, Tie
from blade.capture.explain import limit_text, tie_text
from blade.capture.flat_trace import flat_trace
from blade.capture.inputs import Call, Sample, call_from, flat_arguments
from blade.capture.original import copy_of
from blade.capture.outputs import tensors_of
from blade.capture.repeats import repeats_by_size
from blade.capture.while_any import WhileAny
from blade.errors import InputError
from blade.graph.autograd_functions import inline_in


@dataclass(frozen=True)
class Trace:
    """A traced module and what the tracer warned about, one sentence each."""

    module: torch.jit.ScriptModule
    warnings: tuple[str, ...]
    is_frozen: bool = False

    @property
    def branches_on_values(self) -> bool:
        """Whether Python decided something on the value of a tensor while tracing."""
        return any("Python boolean" in text for text in self.warnings)


def trace(
    model: nn.Module,
    call: Call,
    sample: Sample,
    is_plain: bool,
    limits: Sequence[Limit] = (),
    preserved: Sequence[str] = (),
    ties: Sequence[Tie] = (),
) -> Trace:
    """``model`` traced at ``sample``; its parameters keep the names in ``call``.

    ``is_plain`` says that forward takes the sample as it is and returns tensors only; otherwise a
    wrapper does the translation. The module raises RuntimeError at sizes outside of ``limits`` and
    where ``ties`` do not hold. The plain attributes ``preserved`` are found on the module even where a
    wrapper is around it.
    """
    target = _target(model, call, is_plain, limits, ties)
    with _quiet() as caught, torch.no_grad(), repeats_by_size:
        module = torch.jit.trace(target, copy_of(sample), check_trace=False, strict=False)
    inline_in(module)
    _add_attributes(module, model, preserved)
    return Trace(module, _texts(caught))


def trace_frozen(
    model: nn.Module,
    call: Call,
    sample: Sample,
    is_plain: bool,
    limits: Sequence[Limit] = (),
    ties: Sequence[Tie] = (),
) -> Trace | None:
    """``trace``, frozen, in a fraction of the time; ``None`` for what it cannot see to be without a state."""
    target = _target(model, call, is_plain, limits, ties)
    with _quiet() as caught, torch.no_grad(), repeats_by_size:
        module = flat_trace(target, call.names, copy_of(sample))
    return None if module is None else Trace(module, _texts(caught), is_frozen=True)


def _target(
    model: nn.Module, call: Call, is_plain: bool, limits: Sequence[Limit], ties: Sequence[Tie]
) -> nn.Module:
    """What is traced."""
    checks = [*(_check(call, one) for one in limits), *(_check_tie(call, one) for one in ties)]
    return model if is_plain and not checks else _adapter(model, call, checks)


def _texts(caught: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    texts = dict.fromkeys(
        f"{one.message} (at {Path(one.filename).name}:{one.lineno})"
        for one in caught
        if issubclass(one.category, TracerWarning)
    )
    return tuple(texts)


def _add_attributes(module: torch.jit.ScriptModule, model: nn.Module, names: Sequence[str]) -> None:
    """Give ``module`` the plain attributes of ``model`` in ``names``; the tracer leaves them out."""
    for name in names:
        value = getattr(model, name, None)
        if value is None or callable(value) or module._c.hasattr(name):
            continue
        inferred = torch._C._jit_try_infer_type(value)
        if inferred.success():
            module._c._register_attribute(name, inferred.type(), value)


def script(model: nn.Module) -> torch.jit.ScriptModule:
    """``model`` scripted; raises what ``torch.jit.script`` raises."""
    with _quiet():
        module: torch.jit.ScriptModule = torch.jit.script(model)
    return module


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
        bound = inspect.signature(parts[name].forward).bind(*args, **kwargs)
        inner, entries = call_from(flat_arguments(bound), bake=True)
        with _quiet(), torch.no_grad():
            traced = trace(parts[name], inner, entries, is_plain=False).module
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, traced)
    return script(model)


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

    def __init__(self, model: nn.Module, call: Call, checks: Sequence[Callable[..., Any]]) -> None:
        super().__init__()
        self.model = model
        self.__dict__.update(_call=call, _checks=checks)
        self.training = False


def _adapter(model: nn.Module, call: Call, checks: Sequence[Callable[..., Any]]) -> nn.Module:
    def forward(self: Any, *sample: Any) -> Any:
        for check in self._checks:
            check(sample)
        args, kwargs = self._call.bind(sample)
        return tensors_of(self.model(*args, **kwargs))

    # torch.jit.trace names the graph's inputs after the signature of forward.
    place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, place) for name in ("self", *call.names)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    adapter = type(f"Captured{type(model).__name__}", (_Adapter,), {"forward": forward})
    made: nn.Module = adapter(model, call, checks)
    return made


def _check(call: Call, limit: Limit) -> Callable[[Sample], None]:
    """A call of a scripted function, so that the trace keeps the branch and the raise."""
    with _quiet():
        raise_outside = torch.jit.script(_raise_outside)

    def check(sample: Sample) -> None:
        leaf = pytree.tree_leaves(sample)[limit.index]
        message = (
            f"traced by blade for {limit_text(call, sample, limit)}; optimize with samples of other "
            "sizes, or with a scriptable model, to serve them"
        )
        raise_outside(leaf, limit.axis, limit.low, limit.high, message)

    return check


def _raise_outside(
    tensor: torch.Tensor, axis: int, low: int, high: int, message: str
) -> torch.Tensor:
    if tensor.size(axis) < low or tensor.size(axis) > high:
        raise RuntimeError(message)
    return tensor  # the tracer accepts no function without a result


def _check_tie(call: Call, tie: Tie) -> Callable[[Sample], None]:
    """The same for two sizes that must be equal."""
    with _quiet():
        raise_unequal = torch.jit.script(_raise_unequal)

    def check(sample: Sample) -> None:
        leaves = pytree.tree_leaves(sample)
        (a, i), (b, j) = tie.first, tie.second
        message = (
            f"traced by blade for inputs where {tie_text(call, sample, tie)}; optimize with a scriptable "
            "model to serve others"
        )
        raise_unequal(leaves[a], i, leaves[b], j, message)

    return check


def _raise_unequal(a: torch.Tensor, i: int, b: torch.Tensor, j: int, message: str) -> torch.Tensor:
    if a.size(i) != b.size(j):
        raise RuntimeError(message)
    return a


def has_fused_layers(model: nn.Module) -> bool:
    """Whether ``fused_layers`` make a difference: such a layer skips padding, and answers zeros there."""
    return any(isinstance(part, nn.TransformerEncoderLayer) for part in model.modules())


@contextlib.contextmanager
def fused_layers(enabled: bool) -> Iterator[None]:
    """Attention and encoder layers of ``torch.nn`` as one op each, or as the ops that they are otherwise."""
    with contextlib.nullcontext() if enabled else _taken_apart:
        yield


def _take_apart() -> bool:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return before


_taken_apart = WhileAny(_take_apart, torch.backends.mha.set_fastpath_enabled)


@contextlib.contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Collect the tracer's warnings about the model's own lines, and show none of any kind."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=TracerWarning)
        TracerWarning.ignore_lib_warnings()
        yield caught
