# SPDX-License-Identifier: Apache-2.0
"""Notice that a model is no longer the one that was optimized: weights written, layers replaced, hooks added,
attributes set.

    watch = Watch(model)
    watch.change()           # None, or "a forward hook was added to 'encoder.layer.0'"

Dicts of modules, parameters, buffers and hooks tell when they are written. Versions and addresses of weights,
training flags, and attributes that are constants or lists and dicts of them are read at each call: those of the
model, of layers that are no classes of torch, and of objects that these hold, such as a config.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from blade.dropin.measuring_hook import others
from blade.dropin.unchanged import unchanged, weight_facts
from blade.report import DROP_IN

MOST = 64  # items of a list or dict that is compared at each call

_NOT_READ = (
    *(nn.Module, torch.Tensor, type, FunctionType, MethodType, ModuleType),
    *(dict, list, tuple, set, str),
)
_SETTINGS = (
    "transformers.generation."  # of classes whose objects ``generate`` reads, and no forward
)
_PLAIN = (torch.Tensor, nn.Parameter)
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has
_OF_GENERATE = frozenset({"_previous_max_cache_length"})  # what generate notes on a model
_WITH_A_MODE = ("Dropout", "BatchNorm", "InstanceNorm", "RReLU")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_WATCHED = ("_modules", "_parameters", "_buffers", *_HOOKS)


class Watch:
    """Knows whether ``model`` is as it was when this was made. Hooks of the root do not count: they are called."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._flag: set[str] = set()
        self.accept()

    def change(self) -> str | None:
        """What has changed, as a sentence without its end; ``None`` if nothing has."""
        if not self._flag and unchanged(self._weights, self._seen, self._items, self._sizes):
            return None
        found = self._difference()
        if found is None:
            self.accept()  # written, and as before: a buffer that was set again, an attribute that was added
        return found

    def accept(self) -> None:
        """Let the model be as it is now."""
        for name, module in self._model.named_modules():
            for field in _WATCHED:
                values = vars(module)[field]
                # A dict that is watched stays: the handles of hooks refer to it, and other watches.
                if name or field not in _HOOKS:
                    vars(module)[field] = _watched(values, self._flag)
        self._flag.clear()
        modules = list(self._model.modules())
        self._weights = (*self._model.parameters(), *self._model.buffers())
        self._seen = weight_facts(self._weights)
        self._sizes = tuple(x for module in modules[1:] for x in (vars(module), len(vars(module))))
        modes = [(vars(one), "training", one.training) for one in modules if _has_a_mode(one)]
        read = [item for held in self._holders().values() for item in _read_items(held)]
        self._items = tuple(x for item in (*read, *modes) for x in item)
        self._described = dict(self._describe())

    def state(self) -> Any:
        """What the model was when it was accepted: equal for equal states while the weights of both are alive."""
        return self._described

    @property
    def weights(self) -> tuple[torch.Tensor, ...]:
        """All parameters and buffers."""
        return self._weights

    def digest(self) -> list[int] | None:
        """A checksum of each weight's values, which also tells of writes through ``.data``; ``None`` if there is
        none, as for weights of classes of their own."""
        found = []
        with torch.no_grad():
            for weight in self._weights:
                if weight.layout is not torch.strided or type(weight) not in _PLAIN:
                    return None
                flat = weight.detach().reshape(-1)
                halves = [part for part in (flat, flat[: len(flat) // 2]) if len(part)]
                found += [torch.hash_tensor(part).view(torch.int64).cpu() for part in halves]
        return [int(one) for one in found]

    def _holders(self) -> dict[str, dict[str, Any]]:
        """The dicts of attributes that may decide what ``forward`` does, each once, by the name of their object."""
        found: dict[str, dict[str, Any]] = {}
        for name, module in self._model.named_modules():
            if name and type(module).__module__.startswith("torch."):
                continue
            found[name or "the model"] = vars(module)
            for key, value in vars(module).items():
                is_object = hasattr(value, "__dict__") and not isinstance(value, _NOT_READ)
                is_read = key != DROP_IN and not type(value).__module__.startswith(_SETTINGS)
                if is_object and is_read:
                    found[f"{name}.{key}".removeprefix(".")] = vars(value)
        unique = {id(held): (name, held) for name, held in reversed(found.items())}
        return dict(reversed(unique.values()))

    def _describe(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for name, module in self._model.named_modules():
            yield (name, "layer"), id(module)
            yield (name, "mode"), module.training
            if name:
                hooks = [id(hook) for field in _HOOKS for hook in others(vars(module)[field])]
                yield (name, "forward hooks"), hooks
                yield (name, "forward"), id(vars(module).get("forward"))
        for name, held in self._holders().items():
            for key, value in held.items():
                if key in _OF_GENERATE:
                    continue
                if _is_constant(value):
                    yield (name, f"attribute {key!r}"), value
                elif _is_collection(value):
                    yield (name, f"attribute {key!r}"), copy.copy(value)
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            facts = (tensor._version, tensor.data_ptr(), tensor.dtype, tensor.device)
            yield (name, "values"), (id(tensor), *facts)

    def _difference(self) -> str | None:
        now = dict(self._describe())
        for name, what in {**self._described, **now}:
            if self._described.get((name, what)) != now.get((name, what)):
                return (
                    f"the {what} of {name!r} changed"
                    if name
                    else f"the {what} of the model changed"
                )
        return None


def _read_items(held: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """What is compared of ``held`` at each call: constants, and copies of lists and dicts of them."""
    for key, value in held.items():
        if key in _OF_MODULES or key in _OF_GENERATE:
            continue
        if _is_constant(value):
            yield held, key, value
        elif _is_collection(value):
            yield held, key, copy.copy(value)


def _has_a_mode(module: nn.Module) -> bool:
    """Whether ``training`` may decide what ``module`` does: it is no class of torch, or one of a few."""
    kind = type(module)
    is_torchs = kind.__module__.startswith("torch.nn.modules.")
    return not is_torchs or any(name in kind.__name__ for name in _WITH_A_MODE)


def _is_constant(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str, torch.dtype, torch.device)


def _is_collection(value: Any) -> bool:
    """Whether ``value`` is a short list, tuple, set or dict of constants."""
    if type(value) in (list, tuple, set):
        return len(value) <= MOST and all(map(_is_constant, value))
    return type(value) is dict and len(value) <= MOST and all(map(_is_constant, value.values()))


class _WatchedDict(dict[str, Any]):
    """A dict that tells its ``flags`` when it is written; its copies are ordinary."""

    flags: tuple[set[str], ...]

    def _tell(self, key: str) -> None:
        for flag in self.flags:
            flag.add(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._tell(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._tell(key)
        super().__delitem__(key)

    def pop(self, key: str, *default: Any) -> Any:
        self._tell(key)
        return super().pop(key, *default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._tell("")
        super().update(*args, **kwargs)

    def clear(self) -> None:
        self._tell("")
        super().clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        memo[id(self)] = made
        made.update((key, copy.deepcopy(value, memo)) for key, value in self.items())
        return made

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class _WatchedHooks(OrderedDict[int, Any]):
    """Hooks, by their number; as ``_WatchedDict``."""

    flags: tuple[set[str], ...] = ()

    def _tell(self, key: int) -> None:
        for flag in self.flags:
            flag.add(str(key))

    def __setitem__(self, key: int, value: Any) -> None:
        self._tell(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: int) -> None:
        self._tell(key)
        super().__delitem__(key)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OrderedDict[int, Any]":
        made: OrderedDict[int, Any] = OrderedDict()
        memo[id(self)] = made
        made.update((key, copy.deepcopy(value, memo)) for key, value in self.items())
        return made

    def __reduce__(self) -> Any:
        return OrderedDict, (list(self.items()),)


_IS_WATCHED = (_WatchedDict, _WatchedHooks)


def obstacle(model: nn.Module) -> str | None:
    """What optimized calls of ``model`` would leave out, as a sentence without its end: hooks of its layers, and
    methods that were replaced on an object."""
    for name, module in model.named_modules():
        if "forward" in vars(module) and not is_the_class_method(module, vars(module)["forward"]):
            return f"the forward of {name or 'the model'!r} was replaced on the object, as accelerate's hooks do"
        if name and (others(module._forward_hooks) or others(module._forward_pre_hooks)):
            return f"{name!r} has forward hooks, which optimized calls would leave out"
    return None


def is_the_class_method(module: nn.Module, forward: Any) -> bool:
    """Whether ``forward`` is that of the module's class: accelerate leaves it on a module whose hook it removes."""
    owner = getattr(forward, "__self__", None)
    if not isinstance(owner, nn.Module) or vars(owner) is not vars(module):
        return False
    return bool(forward.__func__ is type(owner).forward)


def _watched(values: Any, flag: set[str]) -> Any:
    """``values``, as a dict that tells ``flag``, too, when it is written."""
    made = values
    if not isinstance(values, _IS_WATCHED):
        made = _WatchedHooks(values) if isinstance(values, OrderedDict) else _WatchedDict(values)
        made.flags = ()
    if all(flag is not known for known in made.flags):
        made.flags = (*made.flags, flag)
    return made
