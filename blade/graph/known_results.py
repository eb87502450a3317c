# SPDX-License-Identifier: Apache-2.0
"""Results of ops on fake tensors, each distinct call made once: the layers of a model repeat each other's.

    results = Results()
    made = results.of(aten.linear.default, (x, w, b), {})       # made.value; made.is_shared: an earlier call's
    settle(outputs, {node: made, ..})                           # their values as if each call had been made by itself

A shape function on symbols takes milliseconds, and what it returns depends on the dtypes, sizes and strides of what
it is given. So do the guards it adds, which are there already when a call is repeated. What differs is whose memory a
result has: of two results that are one fake tensor, each seems to be a view of the other. ``settle`` is for
the few nodes of which that is asked, a graph's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from blade.graph.leaves import tensors_in
from blade.graph.shapes import result_of

_PLAIN = (int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Made:
    """What a call returned. ``borrowed``: places among its arguments' tensors whose memory it may have."""

    value: Any
    borrowed: frozenset[int] = frozenset()
    is_shared: bool = False


class Results:
    """Of the calls of one graph."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Made] = {}
        self._forms: dict[Hashable, int] = {}
        self._numbers: dict[int, tuple[int, FakeTensor]] = {}  # kept alive: ids stay their own

    def of(
        self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Made:
        """What ``target`` returns, under the fake mode of the tensors it is given."""
        key = self._key(target, args, kwargs)
        if key is not None and (known := self._known.get(key)) is not None:
            return replace(known, is_shared=True)
        value = result_of(target, args, kwargs)
        given = [_storage(t) for t in tensors_in((tuple(args), dict(kwargs)))]
        own = {_storage(t) for t in tensors_in(value)}
        made = Made(value, frozenset(k for k, storage in enumerate(given) if storage in own))
        if key is not None and not free_unbacked_symbols(value):  # a new name each time
            self._known[key] = made
        return made

    def _key(
        self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Hashable | None:
        """``None`` for what may return something else the next time, or changes what it is given."""
        if not isinstance(target, OpOverload) or target._schema.is_mutable:
            return None
        try:
            return target, self._word(tuple(args)), self._word(tuple(sorted(kwargs.items())))
        except TypeError:  # something without a form
            return None

    def _word(self, value: Any) -> Hashable:
        """The same for arguments that are alike; raises ``TypeError`` for those of which that is not known."""
        if isinstance(value, FakeTensor):
            return "tensor", self._number(value)
        if isinstance(value, _SYMBOLIC):
            return type(value), value.node.expr
        if isinstance(value, float):
            return "float", repr(value)  # -0.0 is not 0.0
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, (list, tuple)):
            return tuple(map(self._word, value))
        raise TypeError(type(value))

    def _number(self, tensor: FakeTensor) -> int:
        known = self._numbers.get(id(tensor))
        if known is None:
            number = self._forms.setdefault(_form(tensor), len(self._forms))
            known = self._numbers[id(tensor)] = (number, tensor)
        return known[0]


def _form(tensor: FakeTensor) -> Hashable:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(tensor.layout)
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    flags = (tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), type(tensor))
    return tensor.dtype, tensor.device, flags, tuple(map(_expression, sizes))


def _expression(size: Any) -> Hashable:
    return size.node.expr if isinstance(size, _SYMBOLIC) else int(size)


def _storage(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def settle(outputs: Sequence[Node], made: Mapping[Node, Made]) -> None:
    """Give ``outputs``, and what they are views of, values with memory of their own.

    ``made``: how the values of a graph's calls came about; to be used under the mode they were made in.
    """
    done: dict[Node, bool] = {}  # whether its value is another one now

    def renewed(node: Node) -> bool:
        if node not in done:
            how = made.get(node)
            done[node] = how is not None and again(node, how)
        return done[node]

    def again(node: Node, how: Made) -> bool:
        lenders = [n for k, n in enumerate(_operands(node)) if k in how.borrowed]
        changed = [renewed(n) for n in lenders]
        if not any(changed) and not how.is_shared:
            return False
        values = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        node.meta["val"] = result_of(node.target, *values)
        return True

    for node in outputs:
        renewed(node)


def _operands(node: Node) -> Iterator[Node]:
    """Whose each tensor is that a call is given, in the order of ``Made.borrowed``."""
    for leaf in torch.utils._pytree.tree_leaves((node.args, node.kwargs)):
        if isinstance(leaf, Node):
            yield from (leaf for _ in tensors_in(leaf.meta["val"]))
