# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning's modules, whose property ``trainer`` raises without one, as torch reads all properties.

    with readable_properties(model):
        torch.jit.trace(model, sample)

Lightning's own ``to_torchscript`` sets the same flag of the class, under which the property is ``None``.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

from torch import nn

from blade.process.shared_switch import SharedSwitch

_FLAG = "_jit_is_scripting"


@contextmanager
def readable_properties(model: nn.Module) -> Iterator[None]:
    """Within the block, the flag is set on the classes of ``model``'s parts that have it."""
    kinds = {type(part) for part in model.modules()}
    owners = {owner for kind in kinds for owner in kind.__mro__ if _FLAG in vars(owner)}
    with ExitStack() as entered:
        for owner in owners:
            entered.enter_context(_switch(owner))
        yield


@cache
def _switch(owner: Any) -> SharedSwitch[Any]:
    def put() -> Any:
        before = getattr(owner, _FLAG)
        setattr(owner, _FLAG, True)
        return before

    return SharedSwitch(put, lambda before: setattr(owner, _FLAG, before))
