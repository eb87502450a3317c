# SPDX-License-Identifier: Apache-2.0
"""Memoizes results of ops on fake tensors: layers of a model repeat the same calls.

    results = ResultMemo()
    made = results.of(aten.linear.default, (x, w, b), {})       # made.value; made.is_shared: an earlier call's
    settle(outputs, {node: made, ..})                           # values as if each call had been made separately

A shape function on symbols takes milliseconds, and its result depends on the dtypes, sizes and strides of
its arguments. So do the guards it adds, which exist already when a call is repeated. Only the memory of
results differs: two results that are one fake tensor look like views of each other. ``settle`` corrects
this for the few nodes where it matters, a graph's outputs.
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

from blade.core.pytree import tensors_in
from blade.graph.shapes.shape_functions import result_of

_COMPOSED: tuple[Callable[..., Any], ...] = (
    torch.ops.aten.where.default,
    torch.ops.aten.nonzero_numpy.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.tensor_split.tensor_indices_or_sections,
)
"""Ops without a tag of their own, made of ops that have one."""

_PLAIN = (int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class MemoizedResult:
    """The result of a call. ``borrowed``: positions of argument tensors whose memory it may share."""

    value: Any
    borrowed: frozenset[int] = frozenset()
    is_shared: bool = False


class ResultMemo:
    """The memo of one graph's calls."""

    def __init__(self) -> None:
        self._known: dict[Hashable, MemoizedResult] = {}
        self._forms: dict[Hashable, int] = {}
        self._numbers: dict[
            int, tuple[int, FakeTensor]
        ] = {}  # keeps tensors alive, so that ids stay unique

    def of(
        self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> MemoizedResult:
        """The result of ``target``, under the fake mode of its arguments."""
        key = self.key(target, args, kwargs)
        if key is not None and (known := self._known.get(key)) is not None:
            return replace(known, is_shared=True)
        value = result_of(target, args, kwargs)
        given = [_storage(t) for t in tensors_in((tuple(args), dict(kwargs)))]
        own = {_storage(t) for t in tensors_in(value)}
        made = MemoizedResult(
            value, frozenset(k for k, storage in enumerate(given) if storage in own)
        )
        if key is not None and not free_unbacked_symbols(
            value
        ):  # unbacked symbols: new names in each call
            self._known[key] = made
        return made

    def key(
        self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Hashable | None:
        """A key of the call; ``None`` for calls that may differ next time or change their arguments."""
        if not isinstance(target, OpOverload) or target._schema.is_mutable:
            return None
        try:
            return target, self._word(tuple(args)), self._word(tuple(sorted(kwargs.items())))
        except TypeError:  # an argument without a key
            return None

    def _word(self, value: Any) -> Hashable:
        """A key, equal for equivalent arguments; raises ``TypeError`` for arguments of unknown kind."""
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


def is_data_dependent(target: Callable[..., Any]) -> bool:
    """Whether elements of the operands decide a number or sizes, which their fake tensors remember."""
    tags = getattr(target, "tags", ())
    return (
        target in _COMPOSED
        or torch.Tag.data_dependent_output in tags
        or torch.Tag.dynamic_output_shape in tags
    )


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


def settle(outputs: Sequence[Node], made: Mapping[Node, MemoizedResult]) -> None:
    """Give ``outputs``, and the tensors that they are views of, values with memory of their own.

    ``made``: the memoized result behind each node's value; call this under the mode of the calls.
    """
    done: dict[Node, bool] = {}  # node -> whether its value was replaced

    def renewed(node: Node) -> bool:
        if node not in done:
            how = made.get(node)
            done[node] = how is not None and again(node, how)
        return done[node]

    def again(node: Node, how: MemoizedResult) -> bool:
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
    """The node of each argument tensor of a call, in the order of ``MemoizedResult.borrowed``."""
    for leaf in torch.utils._pytree.tree_leaves((node.args, node.kwargs)):
        if isinstance(leaf, Node):
            yield from (leaf for _ in tensors_in(leaf.meta["val"]))
