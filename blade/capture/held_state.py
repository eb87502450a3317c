# SPDX-License-Identifier: Apache-2.0
"""What a module holds between calls, to tell what a call changed of it.

    held = HeldState(module)
    module(x)
    held.changes()        # Changes(weights=False, attributes=frozenset({"encoder.last_size"}))

A write to a tensor shows in its version; a list, dict or set is compared element by element.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import nn

_CONTAINERS = (dict, list, set, tuple)
_PLAIN = (bool, int, float, complex, str, bytes, torch.Size)
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # the hooks, the weights and the submodules
_HELD_BY_TORCH = ("_parameters", "_buffers", "_modules")
_WEIGHTS = ""  # the name of them all


@dataclass(frozen=True)
class Changes:
    """``weights``: whether a parameter or a buffer was written or replaced; ``attributes``: the others, by name."""

    weights: bool
    attributes: frozenset[str]


class HeldState:
    """The state of ``module`` when this was made. Of parts that are TorchScript, only the weights."""

    def __init__(self, module: nn.Module) -> None:
        weights = [*module.parameters(), *module.buffers()]
        self._vars: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[str, Any, list[Any]]] = []
        self._versions = [(_WEIGHTS, tensor, _version(tensor)) for tensor in weights]
        seen = set(map(id, weights))
        for path, part in module.named_modules():
            if isinstance(part, torch.jit.ScriptModule):
                continue
            prefix = f"{path}." if path else ""
            self._vars.append((prefix, vars(part), dict(vars(part))))
            for registered in (part._parameters, part._buffers):
                self._containers.append((_WEIGHTS, registered, _parts(registered)))
            for key in vars(part).keys() - _OF_TORCH:
                for held in _contents(vars(part)[key], seen):
                    if isinstance(held, torch.Tensor):
                        self._versions.append((prefix + key, held, _version(held)))
                    elif not isinstance(held, tuple):  # which cannot change
                        self._containers.append((prefix + key, held, _parts(held)))

        self._spaces = [live for _, live, _ in self._vars]
        self._keys = list(map(tuple, self._spaces))
        self._getters = [itemgetter(*_own_keys(live)) for live in self._spaces]
        self._live = [live for _, live, _ in self._containers if not _is_odd(live)]
        self._odd = [(live, saved) for _, live, saved in self._containers if _is_odd(live)]
        self._dicts = [live for live in self._live if isinstance(live, dict)]
        self._lengths = list(map(len, self._live))
        self._objects = list(self._all_objects())
        self._versioned = [tensor for _, tensor, _ in self._versions if not tensor.is_inference()]
        self._numbers = list(map(_number, self._versioned))

    def _all_objects(self) -> Iterator[Any]:
        """The attributes of the modules, and the keys, elements and values of all containers."""
        return chain(
            chain.from_iterable(get(live) for get, live in zip(self._getters, self._spaces)),
            chain.from_iterable(self._live),
            chain.from_iterable(map(dict.values, self._dicts)),
        )

    def _is_untouched(self) -> bool:
        """Whether the same objects are everywhere, which most calls leave: in a fraction of the time of a look at each
        name."""
        return (
            list(map(tuple, self._spaces)) == self._keys
            and list(map(len, self._live)) == self._lengths
            and all(map(is_, self._all_objects(), self._objects))
            and list(map(_number, self._versioned)) == self._numbers
            and all(_is_kept(_parts(live), saved) for live, saved in self._odd)
        )

    def changes(self) -> Changes | None:
        """What has changed since; ``None`` if nothing has."""
        if self._is_untouched():
            return None
        names = {
            prefix + key
            for prefix, live, before in self._vars
            if not _is_kept(_parts(live), _parts(before))
            for key in live.keys() | before.keys()
            if key not in live or key not in before or not _is_kept([live[key]], [before[key]])
        }
        names |= {
            name for name, live, saved in self._containers if not _is_kept(_parts(live), saved)
        }
        names |= {name for name, tensor, version in self._versions if _version(tensor) != version}
        return Changes(_WEIGHTS in names, frozenset(names - {_WEIGHTS})) if names else None


def _own_keys(live: dict[str, Any]) -> list[str]:
    return [key for key in live if key in _HELD_BY_TORCH or key not in _OF_TORCH]


def _contents(value: Any, seen: set[int]) -> Iterator[Any]:
    """The tensors and containers that ``value`` is and holds, but for those ``seen``."""
    if not isinstance(value, (torch.Tensor, *_CONTAINERS)) or id(value) in seen:
        return
    seen.add(id(value))
    yield value
    if not isinstance(value, torch.Tensor):
        for part in _parts(value):
            yield from _contents(part, seen)


def _parts(container: Any) -> list[Any]:
    """What ``container`` holds, whatever a class of the user's makes of ``len`` and ``iter``."""
    kind = _kind(container)
    if kind is dict:
        return [*dict.keys(container), *dict.values(container)]
    return [*kind.__iter__(container)]


def _kind(container: Any) -> Any:
    return next(one for one in _CONTAINERS if isinstance(container, one))


def _is_odd(container: Any) -> bool:
    """Whether a class of the user's has another ``len`` or ``iter`` than the container that it extends."""
    own, kind = type(container), _kind(container)
    return any(getattr(own, n) is not getattr(kind, n) for n in ("__len__", "__iter__"))


def _is_kept(now: list[Any], before: list[Any]) -> bool:
    """Whether both hold the same objects, or equal numbers and texts."""
    if len(now) != len(before):
        return False
    return all(map(is_, now, before)) or all(
        a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and a == b)
        for a, b in zip(now, before, strict=True)
    )


_number = attrgetter("_version")


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else int(_number(tensor))
