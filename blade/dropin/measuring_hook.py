# SPDX-License-Identifier: Apache-2.0
"""Hooks that only measure: a drop-in with them is as it was, and copies of it have none.

put_hooks(modules, finder.enter, finder.leave)
remove_hooks(modules)
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")


class MeasuringHook:
    """Calls ``method``, and does not keep its object alive. Pickles and Dynamo see a hook that does nothing."""

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._known = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *given: Any) -> None:
        if torch.compiler.is_compiling():
            return
        found = None if self._known is None else self._known()
        if found is not None:
            found(*given)

    def __deepcopy__(self, memo: dict[int, Any]) -> "MeasuringHook":
        return self

    def __reduce__(self) -> Any:
        return MeasuringHook, ()


def put_hooks(
    modules: Iterable[nn.Module], enter: Callable[..., None], leave: Callable[..., None]
) -> None:
    """Call ``enter`` before each call of one of ``modules``, and ``leave`` after it, also if it raises."""
    before, after = MeasuringHook(enter), MeasuringHook(leave)
    for module in modules:
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)


def remove_hooks(modules: Iterable[nn.Module]) -> None:
    """Remove what ``put_hooks`` has put there. Handles do not: they know the dicts before a watch replaced them."""
    for module in modules:
        ours = [key for name in _TABLES[:2] for key in _ours(vars(module)[name])]
        for name in _TABLES:
            for key in ours:
                vars(module)[name].pop(key, None)


def _ours(hooks: dict[int, Any]) -> list[int]:
    return [key for key, hook in hooks.items() if isinstance(hook, MeasuringHook)]


def others(hooks: dict[int, Any]) -> list[Any]:
    """The hooks that do more than measure."""
    return [hook for hook in hooks.values() if not isinstance(hook, MeasuringHook)]
