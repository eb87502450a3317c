# SPDX-License-Identifier: Apache-2.0
"""The user's model: checked, unwrapped, and copied so that optimization does not change it."""

import copy
import inspect
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from blade.capture.decisions.traced_number import TracedNumber
from blade.core import torchscript
from blade.errors import InputError
from blade.report import ATTRIBUTE


def private_copy(model: Any, instead: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of ``model`` without data-parallel or ``torch.compile`` wrappers.

    ``instead``: what the copy holds in place of objects of ``model``, by their id.
    Raises ``InputError`` if ``model`` is no module or optimized already, is in training mode, has parameters
    on several devices or on ``meta``, or cannot be copied.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model: expected a torch.nn.Module or ScriptModule, got {type(model).__name__}{_hint(model)}."
        )
    model = _unwrap(model)
    if isinstance(getattr(model, ATTRIBUTE, None), str):
        raise InputError(
            "model: it is what blade.optimize returned; give the model that was optimized. (As a part of a larger "
            "model it may stay.)"
        )
    _check_training(model)
    device_of(model)
    try:
        own = _copy(model, instead or {})
    except (AttributeError, RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        if counters := [name for name, b in model.named_buffers() if isinstance(b, TracedNumber)]:
            raise InputError(
                f"model: {type(model).__name__} writes to {', '.join(counters)} and reads it as a Python number, which "
                "no captured path can follow. Decide on it outside of the model, or compute with it as a tensor."
            ) from error
        raise InputError(
            f"model: {type(model).__name__} cannot be deep-copied ({error}); optimize works on a copy."
        ) from error
    for module in own.modules():
        if getattr(
            module, "training", False
        ):  # modules without a mode (_with_a_mode): freezing checks the flag all the same
            module.training = False
    return own


def _hint(model: Any) -> str:
    if isinstance(model, type):
        return "; give an instance of the class, not the class"
    if isinstance(model, (str, Path)):
        return "; load the file first, with torch.jit.load say"
    if isinstance(model, Mapping):
        return "; load a state dict into an instance of the model's class with load_state_dict"
    if callable(model):
        return "; call it in the forward of a torch.nn.Module, and give that"
    return ""


def signature_of(model: nn.Module) -> inspect.Signature:
    """Return the signature of ``model.forward``; for a ScriptModule its schema's."""
    if not isinstance(model, torch.jit.ScriptModule):
        return inspect.signature(model.forward)
    if not model._c._has_method("forward"):
        raise InputError("model: this ScriptModule has no forward method to optimize.")
    parameters = [
        inspect.Parameter(
            argument.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=argument.default_value
            if argument.has_default_value()
            else inspect.Parameter.empty,
        )
        for argument in model._c._get_method("forward").schema.arguments[1:]
    ]
    return inspect.Signature(parameters)


def device_of(model: nn.Module) -> torch.device | None:
    """Return the device of all parameters and buffers, ``None`` if there are none; raises ``InputError``."""
    at: dict[torch.device, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        at.setdefault(tensor.device, name)
    meta = [name for device, name in at.items() if device.type == "meta"]
    if meta:
        raise InputError(
            f"model: {meta[0]!r} is on the meta device and has no values; load the weights first, "
            'for example with model.to_empty(device="cpu") and load_state_dict.'
        )
    if len(at) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in at.items())
        raise InputError(
            f"model: parameters and buffers are on several devices ({places}); "
            "move the whole model to one with model.to(device)."
        )
    return next(iter(at), None)


def _unwrap(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _check_training(model: nn.Module) -> None:
    # A frozen ScriptModule lacks the attribute: it was in eval mode.
    training = [pair for pair in _with_a_mode(model) if getattr(pair[1], "training", False)]
    if not getattr(model, "training", False):  # submodules made after model.eval(), as caches are
        training = [(name, module) for name, module in training if _reads_mode(type(module))]
    names = [name or type(model).__name__ for name, _ in training]
    if names:
        shown = ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
        raise InputError(
            f"model: {len(names)} module(s) are in training mode ({shown}); call model.eval() first. "
            "Only inference is optimized here."
        )


def _reads_mode(kind: type[nn.Module]) -> bool:
    """Whether code of the class may read ``self.training``: that of a ScriptModule cannot be read."""
    if issubclass(kind, torch.jit.ScriptModule):
        return True
    own = [base for base in kind.__mro__ if base not in nn.Module.__mro__]
    members: list[Any] = [member for base in own for member in vars(base).values()]
    functions: list[Any] = [f.fget if isinstance(f, property) else f for f in members]
    codes = [f.__code__ for f in map(inspect.unwrap, functions) if isinstance(f, FunctionType)]
    return any("training" in _names_in(code) for code in codes)


def _names_in(code: CodeType) -> set[object]:
    inner = [_names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return {*code.co_names, *code.co_consts}.union(*inner)


def _with_a_mode(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield module and submodules that may behave differently in training mode.

    The graph of a ``GraphModule`` is independent of its mode, and an exported one cannot be put into eval
    mode; only the modules that the graph calls have a mode, except the check of export's guards.
    """
    if isinstance(module, GraphModule):
        called = {str(node.target) for node in module.graph.nodes if node.op == "call_module"}
        children = [(target, module.get_submodule(target)) for target in sorted(called)]
    else:
        yield name, module
        children = list(module.named_children())
    for child, submodule in children:
        if not type(submodule).__module__.startswith("torch.export"):
            yield from _with_a_mode(submodule, f"{name}.{child}" if name else child)


def _copy(model: nn.Module, instead: Mapping[int, Any]) -> nn.Module:
    if not isinstance(model, torch.jit.ScriptModule):
        copies = _non_leaf_copies(model) | dict(instead)
        own: nn.Module = copy.deepcopy(model, copies)
        _rebind_closures(own, copies)
        return own
    # A deep copy shares its code with the source; running the code of a frozen module can crash.
    return torchscript.load(io.BytesIO(torchscript.to_bytes(model)))


def hooks_of(module: nn.Module) -> list[dict[Any, Any]]:
    """Return the dicts of hooks of ``module``."""
    return [d for name, d in vars(module).items() if "_hooks" in name and isinstance(d, dict)]


def _rebind_closures(own: nn.Module, copies: Mapping[int, Any]) -> None:
    """Make the hooks and other functions that ``own`` holds refer to ``copies``, by the id of what was copied.

    A deep copy has the same functions: a hook that writes to ``self.features`` would write to the source's.
    """
    for module in own.modules():
        for held in (vars(module), *hooks_of(module)):
            for name, function in held.items():
                if isinstance(function, FunctionType):
                    held[name] = _rebound(function, copies)


def _rebound(function: FunctionType, copies: Mapping[int, Any]) -> FunctionType:
    """Return ``function`` with ``copies`` of what its closure refers to; itself if there are none."""
    cells = tuple(_copied_cell(cell, copies) for cell in function.__closure__ or ())
    if all(new is cell for new, cell in zip(cells, function.__closure__ or (), strict=True)):
        return function
    rebound = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        cells,
    )
    rebound.__kwdefaults__ = function.__kwdefaults__
    vars(rebound).update(vars(function))
    return rebound


def _copied_cell(cell: CellType, copies: Mapping[int, Any]) -> CellType:
    try:
        held = cell.cell_contents
    except ValueError:  # nothing was assigned to the variable
        return cell
    return CellType(copies[id(held)]) if id(held) in copies else cell


def _non_leaf_copies(model: nn.Module) -> dict[int, Any]:
    """Return a deepcopy memo for the tensors that deepcopy refuses: results kept as plain attributes.

    The old ``weight_norm`` keeps ``module.weight`` like this and recomputes it in each call.
    """
    return {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }
