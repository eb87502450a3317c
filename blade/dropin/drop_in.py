# SPDX-License-Identifier: Apache-2.0
"""The classes of drop-ins: a drop-in has the model's class as its base, and shares the model's attributes.

made = drop_in(own, config)        # isinstance(made, type(own)); vars(made) is vars(own)
state_of(made)                     # what answers its calls
plain(made)                        # own
"""

import copy
import functools
from typing import Any

import torch
from torch import nn

from blade.config import Config
from blade.dropin.state import DropInState
from blade.errors import InputError
from blade.report import DROP_IN, drop_in_state


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
        own = copy.deepcopy(plain(self), memo)
        made = drop_in(own, state.config, state)
        state_of(made).is_split = state.is_split
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unpickled, (plain(self), state_of(self).config)


def state_of(module: Any) -> DropInState:
    """The state of a drop-in; raises ``InputError`` for anything else."""
    state = vars(module).get(DROP_IN) if isinstance(module, nn.Module) else None
    if not isinstance(state, DropInState):
        parts = getattr(drop_in_state(module), "parts", None)
        hint = f" Its parts are drop-ins: {', '.join(parts.drop_ins)}." if parts else ""
        raise InputError(
            f"module: a drop-in of blade.accelerate is expected, got {type(module).__name__}.{hint}"
        )
    return state


def drop_in(
    own: nn.Module,
    config: Config,
    like: DropInState | None = None,
    in_background: bool = False,
) -> Any:
    """A drop-in for ``own``, which shares its attributes; with what ``like`` has prepared."""
    state = DropInState(own, config, in_background)
    if like is not None:
        state.have(one for one in like.prepared.values() if not one.number)
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


def plain(module: Any) -> nn.Module:
    """The model that ``module`` is the drop-in of: the same attributes, the model's class."""
    return state_of(module).model


def _unpickled(plain: nn.Module, config: Config) -> Any:
    return drop_in(plain, config, None, in_background=True)
