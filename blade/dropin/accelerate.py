# SPDX-License-Identifier: Apache-2.0
"""``blade.accelerate``: a module that is the model to everybody who asks, and answers by optimized modules.

    model = blade.accelerate(model)             # records its first calls, and optimizes in the background
    model = blade.accelerate(model, samples)    # optimizes now
    pipe.unet = blade.accelerate(pipe.unet)

The drop-in has the model's class as its base, and its attributes, methods, hooks and signature. It shares the
memory of the model's weights.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from blade.capture.samples import Samples
from blade.config import Config
from blade.dropin.prepare import Prepared
from blade.dropin.recording import call_of, samples_of
from blade.dropin.sharing_copy import sharing_copy
from blade.dropin.state import DropInState
from blade.dropin.watched import obstacle
from blade.errors import InputError
from blade.report import DROP_IN


class DropIn:
    """Base of the classes that drop-ins are of, before the model's own."""

    __dict__: dict[str, Any]

    @property
    def optimized(self) -> torch.jit.ScriptModule:
        """The optimized module that answers most calls, for ``torch.jit.save``. It takes and returns tensors.

        Raises ``InputError`` while there is none; ``blade.wait(self)`` waits for it.
        """
        found = state_of(self).most_called()
        if not found:
            raise InputError(
                "optimized: no call is optimized yet. Call the module, then blade.wait(module); "
                "blade.report(module) has the reasons."
            )
        return found[0].module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model, with the same optimized modules until it is changed."""
        state = state_of(self)
        own = copy.deepcopy(_plain(self), memo)
        return _drop_in(own, state.config, state)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unpickled, (_plain(self), state_of(self).config)


def accelerate(
    model: nn.Module,
    samples: Any = None,
    config: Config | None = None,
    *,
    parts: Sequence[str] = (),
) -> Any:
    """Return a module that is used like ``model``, and faster where that was measured.

    ``samples`` are calls as ``blade.optimize`` takes them, or what ``blade.record`` recorded; they are optimized for
    before this returns. Without ``samples`` each kind of call is the model's at first, and is optimized in the
    background after three calls. ``parts`` names submodules to accelerate in place of the whole model, such as
    "encoder.layers.0"; ``samples`` then maps these names to samples. Calls with other arguments than tensors,
    constants, and containers and caches of them are the model's, as are calls while it is in training mode, and all
    calls after the weights, layers or hooks have changed, until these were optimized again (three times at most).

    ``model`` stays as it is; both share the memory of the weights. The outputs have no gradients.
    ``config`` defaults to the innermost active ``with Config(...)``.

    Raises ``InputError`` for what is no module, or cannot be copied.
    """
    config = Config.current() if config is None else config
    _check(model, parts)
    try:
        own = sharing_copy(model)
    except (AttributeError, RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise InputError(
            f"model: {type(model).__name__} cannot be deep-copied ({error}); accelerate works on a copy of its layers."
        ) from error
    if not parts:
        return _accelerated(own, samples, config)
    for name in parts:
        parent, _, child = name.rpartition(".")
        try:
            module = own.get_submodule(name)
        except AttributeError as error:
            raise InputError(f"parts: {type(model).__name__} has no submodule {name!r}.") from error
        _check(module)
        of_part = None if samples is None else samples[name]
        setattr(own.get_submodule(parent), child, _accelerated(module, of_part, config))
    return own


def state_of(module: Any) -> DropInState:
    """The state of a drop-in; raises ``InputError`` for anything else."""
    state = vars(module).get(DROP_IN) if isinstance(module, nn.Module) else None
    if not isinstance(state, DropInState):
        raise InputError(
            f"module: a drop-in of blade.accelerate is expected, got {type(module).__name__}."
        )
    return state


def drop_in_of(model: nn.Module, prepared: Sequence[Prepared], config: Config | None) -> Any:
    """A drop-in for ``model`` whose calls are answered by what was ``prepared`` elsewhere."""
    _check(model)
    config = Config.current() if config is None else config
    made = _drop_in(sharing_copy(model), config, None)
    state_of(made).prepared.update((one.kind, one) for one in prepared)
    return made


def _accelerated(own: nn.Module, samples: Any, config: Config) -> Any:
    made = _drop_in(own, config, None, in_background=samples is None)
    if samples is not None:
        calls = [call_of(one) for one in samples_of(samples)]
        counts = samples.counts if isinstance(samples, Samples) else [1] * len(calls)
        state_of(made).optimize([call for call, count in zip(calls, counts) for _ in range(count)])
    return made


def _drop_in(
    own: nn.Module, config: Config, like: DropInState | None, in_background: bool = False
) -> Any:
    """A drop-in for ``own``, which shares its attributes; with what ``like`` has prepared."""
    state = DropInState(own, config, in_background)
    if like is not None:
        state.prepared.update({k: p for k, p in like.prepared.items() if not p.number})
        state.reasons += like.reasons
    kind: Any = type(own)
    made: Any = object.__new__(_class_of(kind))
    vars(own)[DROP_IN] = state
    object.__setattr__(made, "__dict__", vars(own))
    return made


@functools.cache
def _class_of(kind: Any) -> type:
    """The class of drop-ins for modules of the class ``kind``: of its name, and with its forward's signature."""

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[DROP_IN].answer(args, kwargs)

    names = {
        "forward": forward,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    made: type = type(kind)(kind.__name__, (DropIn, kind), names)
    return made


def _plain(module: Any) -> nn.Module:
    """The model that ``module`` is the drop-in of: the same attributes, the model's class."""
    return state_of(module).model


def _unpickled(plain: nn.Module, config: Config) -> Any:
    return _drop_in(plain, config, None, in_background=True)


def _check(model: Any, parts: Sequence[str] = ()) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model: a torch.nn.Module is expected, got {type(model).__name__}. Of a pipeline, accelerate the modules: "
            "pipe.model = blade.accelerate(pipe.model)."
        )
    if isinstance(model, DropIn):
        raise InputError("model: it is a drop-in already.")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("model: it is TorchScript; use blade.optimize, which returns TorchScript.")
    if hasattr(model, "_orig_mod"):
        raise InputError(
            "model: it is wrapped by torch.compile; give the module that was compiled."
        )
    if not parts and (found := obstacle(model)) is not None:
        raise InputError(
            f"model: {found}; remove them (accelerate.hooks.remove_hook_from_module(model, recurse=True)), or name "
            "parts of the model without them: blade.accelerate(model, parts=[...])."
        )
