# SPDX-License-Identifier: Apache-2.0
"""Copy a model's structure, and share the memory of its weights.

copy = sharing_copy(model)     # layers, buffers and attributes of its own; the values of model's parameters
"""

import copy
from typing import Any

from torch import nn

from blade.dropin.measuring_hook import remove_hooks
from blade.dropin.watched import is_the_class_method
from blade.report import DROP_IN

_HOOKS = "_hooks"


def sharing_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy of ``model`` whose parameters are new tensors on the same memory.

    Moving, replacing or casting the copy's parameters leaves ``model`` as it is; writing to their values does
    not. Hooks stay the same functions, drop-ins become what they are drop-ins of, and a ``forward`` on an object
    that is its class's is left out. Raises what ``copy.deepcopy`` does.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        is_plain = type(parameter) is nn.Parameter
        own = nn.Parameter(parameter.detach(), parameter.requires_grad) if is_plain else parameter
        memo[id(parameter)] = own
    left_out: set[int] = set()
    for module in model.modules():
        forward = vars(module).get("forward")
        if forward is not None and is_the_class_method(module, forward):
            memo[id(forward)] = forward
            left_out.add(id(forward))
        for name, hooks in vars(module).items():
            if name.endswith(_HOOKS) and isinstance(hooks, dict):
                memo.update((id(hook), hook) for hook in hooks.values())
    for layer in model.modules():
        state: Any = vars(layer).get(DROP_IN)
        behind = getattr(state, "model", None)
        if behind is not None and layer is not behind and layer is not model:
            memo[id(layer)] = copy.deepcopy(behind, memo)
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        if id(vars(module).get("forward")) in left_out:
            del module.forward
    remove_hooks(copied.modules())
    return copied
