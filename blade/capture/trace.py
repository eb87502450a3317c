# SPDX-License-Identifier: Apache-2.0
"""Three ways from an ``nn.Module`` to a ScriptModule: trace all of it, script all of it, or trace the named
submodules and script the rest."""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.jit._trace import TracerWarning
from torch.utils import _pytree as pytree

from blade.capture.clean import inline_own
from blade.capture.decisions.identity import code_that_compares_objects
from blade.capture.decisions.recorder import Recorder, recording
from blade.capture.decisions.shadows import shadowed
from blade.capture.inputs import CallSignature, Sample, call_from, flat_arguments
from blade.capture.messages import equal_sizes_text, outside, size_range_text
from blade.capture.missing_overloads import with_overloads
from blade.capture.outputs import tensors_of
from blade.capture.patch_repeat_interleave import patched_repeat_interleave
from blade.capture.reference_model import ModelState, copy_of
from blade.capture.trace_flat import flat_trace
from blade.core import torchscript
from blade.core.captured import EqualSizes, SizeRange
from blade.core.structure import structure_of
from blade.errors import InputError
from blade.graph.torchscript.inline_autograd_functions import inline_in
from blade.graph.torchscript.show_identities import show_identities
from blade.process.shared_switch import SharedSwitch
from blade.timing.free_cpus import on_free_cpus


@dataclass(frozen=True)
class Trace:
    """A traced module and the tracer's warnings, one sentence each."""

    module: torch.jit.ScriptModule
    warnings: tuple[str, ...]
    recorder: Recorder
    is_frozen: bool = False
    structure: str | None = None  # of what forward returned (core/structure.py)


def trace(
    model: nn.Module,
    call: CallSignature,
    sample: Sample,
    is_plain: bool,
    limits: Sequence[SizeRange] = (),
    preserved: Sequence[str] = (),
    ties: Sequence[EqualSizes] = (),
) -> Trace:
    """Trace ``model`` at ``sample``; its parameters keep the names in ``call``.

    ``is_plain`` says that forward takes the sample as it is and returns tensors only; otherwise a wrapper
    translates. A check fails at sizes outside ``limits`` and where ``ties`` do not hold. The
    plain attributes ``preserved`` are available on the module even if it is wrapped.
    """
    target = _target(model, call, is_plain, limits, ties)
    with _quiet() as caught, _tracing(model) as recorder:
        module = torch.jit.trace(target, copy_of(sample), check_trace=False, strict=False)
    inline_in(module)
    inline_own(module)
    show_identities(module.graph)
    _add_attributes(module, model, preserved)
    return Trace(module, _texts(caught), recorder)


def trace_frozen(
    model: nn.Module,
    call: CallSignature,
    sample: Sample,
    is_plain: bool,
    limits: Sequence[SizeRange] = (),
    ties: Sequence[EqualSizes] = (),
) -> Trace | None:
    """Trace and freeze at once, in a fraction of the time; ``None`` for a model that may have a state."""
    guards = call.guards
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    call, entries = call.with_constants(sample)
    target = _target(model, call, is_plain and not guards, limits, ties)
    with _quiet() as caught, _tracing(model) as recorder, _structure_noted(model) as structures:
        recorder.may_defer = True
        for index, slot in guards.items():
            recorder.note_argument(index, slot.name, sample[index], code)
        module = flat_trace(
            target,
            call.names,
            copy_of(entries),
            recorder.ended,
            list(guards.values()),
            recorder.consult_ranks,
        )
    if module is None:
        return None
    return Trace(module, _texts(caught), recorder, is_frozen=True, structure=structures[-1])


@contextlib.contextmanager
def _structure_noted(model: nn.Module) -> Iterator[list[str | None]]:
    """Note the structure of what ``model`` returns."""
    found: list[str | None] = []
    hook = model.register_forward_hook(lambda _, __, output: found.append(structure_of(output)))
    try:
        yield found
    finally:
        hook.remove()


@contextlib.contextmanager
def _tracing(model: nn.Module) -> Iterator[Recorder]:
    """Without gradients, with the decisions of ``model``'s code recorded."""
    weights = frozenset(map(id, (*model.parameters(), *model.buffers())))
    with torch.no_grad(), patched_repeat_interleave, shadowed(model), recording(weights) as made:
        if (code := code_that_compares_objects(model)) is not None:
            made.consult_code("identity", code)
        with on_free_cpus():
            yield made


def _target(
    model: nn.Module,
    call: CallSignature,
    is_plain: bool,
    limits: Sequence[SizeRange],
    ties: Sequence[EqualSizes],
) -> nn.Module:
    """Return the module to trace."""
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
    """Give ``module`` the plain attributes of ``model`` in ``names``; the tracer drops them."""
    for name in names:
        value = getattr(model, name, None)
        if value is None or callable(value) or module._c.hasattr(name):
            continue
        inferred = torchscript.inferred_type(value)
        if inferred.success():
            module._c._register_attribute(name, inferred.type(), value)


def script(model: nn.Module) -> torch.jit.ScriptModule:
    """Script ``model``; raises what ``torch.jit.script`` raises, and RuntimeError for a script that cannot be saved:
    a function that is no TorchScript, such as one of ``functools.cache``, stays a call of Python."""
    with _quiet():
        module: torch.jit.ScriptModule = torch.jit.script(model)
    graph: Any = module.inlined_graph  # its nodes live as long
    if calls := graph.findAllNodes("prim::PythonOp", True):
        names = ", ".join(dict.fromkeys(call.pyname() for call in calls))
        raise RuntimeError(f"The script calls {names} in Python, which no file can hold.")
    if not isinstance(model, torch.jit.ScriptModule):
        inline_own(module)
    return module


def script_around(
    model: nn.Module, names: Sequence[str], call: CallSignature, sample: Sample
) -> torch.jit.ScriptModule:
    """Script ``model``, with the submodules ``names`` traced at the inputs that they get for ``sample``.

    Changes ``model``: the named submodules are replaced. Raises ``InputError`` for an unknown name or a
    submodule that ``sample`` does not reach.
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
        part = partial(trace, parts[name], inner, entries, is_plain=False)
        with _quiet(), torch.no_grad():
            traced = with_overloads(part, ModelState(parts[name]).restore).module
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, traced)
    return script(model)


def _calls_of(
    parts: dict[str, nn.Module], model: nn.Module, call: CallSignature, sample: Sample
) -> Any:
    """Return the (args, kwargs) of the first call of each of ``parts`` when ``model`` runs ``sample``."""
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

    def __init__(
        self, model: nn.Module, call: CallSignature, checks: Sequence[Callable[..., Any]]
    ) -> None:
        super().__init__()
        self.model = model
        self.__dict__.update(_call=call, _checks=checks)
        self.training = False


def _adapter(
    model: nn.Module, call: CallSignature, checks: Sequence[Callable[..., Any]]
) -> nn.Module:
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


def _check(call: CallSignature, limit: SizeRange) -> Callable[[Sample], None]:
    """Return a call of a scripted function, so that the trace keeps the branch and the raise."""
    with _quiet():
        raise_outside = torch.jit.script(_raise_outside)

    def check(sample: Sample) -> None:
        leaf = pytree.tree_leaves(sample)[limit.index]
        message = outside(size_range_text(call, sample, limit))
        raise_outside(leaf, limit.axis, limit.low, limit.high, message)

    return check


def _raise_outside(
    tensor: torch.Tensor, axis: int, low: int, high: int, message: str
) -> torch.Tensor:
    if tensor.dim() <= axis or tensor.size(axis) < low or tensor.size(axis) > high:
        raise RuntimeError(message)
    return tensor  # the tracer accepts only functions with a result


def _check_tie(call: CallSignature, tie: EqualSizes) -> Callable[[Sample], None]:
    """Return the same check for two sizes that must be equal."""
    with _quiet():
        raise_unequal = torch.jit.script(_raise_unequal)

    def check(sample: Sample) -> None:
        leaves = pytree.tree_leaves(sample)
        (a, i), (b, j) = tie.first, tie.second
        message = outside(f"the trace holds where {equal_sizes_text(call, sample, tie)}")
        raise_unequal(leaves[a], i, leaves[b], j, message)

    return check


def _raise_unequal(a: torch.Tensor, i: int, b: torch.Tensor, j: int, message: str) -> torch.Tensor:
    if a.dim() <= i or b.dim() <= j or a.size(i) != b.size(j):
        raise RuntimeError(message)
    return a


def has_fused_layers(model: nn.Module) -> bool:
    """Whether ``fused_layers`` matters for ``model``: a fused layer skips padding and returns zeros there."""
    return any(isinstance(part, nn.TransformerEncoderLayer) for part in model.modules())


@contextlib.contextmanager
def fused_layers(enabled: bool) -> Iterator[None]:
    """Run attention and encoder layers of ``torch.nn`` as one op each, or decomposed into ordinary ops."""
    with contextlib.nullcontext() if enabled else _taken_apart:
        yield


def _take_apart() -> bool:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return before


_taken_apart = SharedSwitch(_take_apart, torch.backends.mha.set_fastpath_enabled)


@contextlib.contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Collect the tracer's warnings about the model's own lines, and show no warnings at all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=TracerWarning)
        TracerWarning.ignore_lib_warnings()
        yield caught
