# SPDX-License-Identifier: Apache-2.0
"""The fp64 reference: a cluster computed in fp64, which engine and original are measured against.

truth = Fp64Reference(cluster.gm)
outputs = truth(inputs)             # raises where an op has no fp64 implementation
[third] = truth.of([2])(inputs)     # computes only what that output needs
for number, output in truth.each(inputs): ...    # each as soon as it is computed, and then no longer held

``Fp64Reference(gm, generators.reset)`` resets the random generators first, so that it draws the cluster's
numbers.

Weights are widened once up to ``KEPT`` bytes in all; each of the others is when an op uses it
(``wide_at_use``). Results live until their last use.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

import torch

from blade.graph.fx.interpreter import Interpreter, last_uses, returned
from blade.graph.fx.random_ops import DRAWING
from blade.process.memory import free_unused
from blade.verification.grouped_products import GROUPED, grouped_product
from blade.verification.rng_replay import may_draw
from blade.verification.wide_at_use import LOOKUPS, NARROW, WideAtUse, attend, wide_bytes, widened

Inputs = tuple[torch.Tensor, ...]

KEPT = 32 << 20
"""Most bytes of weights in fp64 that a reference keeps, and of inputs that a run does."""

_OPS = 32
"""After so many it is asked how much of torch's cache is unused, which takes as long as some of them."""

_OWN: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.scaled_dot_product_attention.default: attend,
    GROUPED: grouped_product,
    # an op in fp64 may lay its result out otherwise than the kernel that the graph was traced with
    torch.ops.aten.view.default: torch.Tensor.reshape,
    torch.ops.aten._unsafe_view.default: torch.Tensor.reshape,
}
_ALIGNED = 8
"""Elements: attention kernels want rows of 16 bytes."""
# These run in their own dtypes: in fp64, random ops draw in another order from the same generator, and
# attention kernels of a GPU do not exist.
_NOT_WIDENED = (
    *DRAWING,
    *(
        getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{end}").default
        for kernel in ("cudnn", "flash", "efficient")
        for end in ("", "_backward")
    ),
)


class Fp64Reference(Interpreter):
    """Runs an FX graph with every float tensor, constant and dtype argument widened to fp64.

    ``writes``: an op of the graph does, maybe to an input.
    """

    def __init__(self, gm: torch.fx.GraphModule, before: Callable[[], None] = lambda: None) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._before = before
        writes = any(n.op == "call_function" and _is_mutable(n.target) for n in self.graph.nodes)
        self._weights, self._given = _WideTensors(), _WideTensors()
        self.writes, self._input_bytes = writes, inf if writes else KEPT
        self._last_uses = last_uses(self.graph, until_the_end=writes)
        self._narrow: set[int] = set()
        self._outputs: Sequence[int] | None = None
        self._needed: set[torch.fx.Node] = set()
        self._known: tuple[Inputs, Sequence[torch.Tensor]] | None = None

    def remember(self, inputs: Inputs, outputs: Sequence[torch.Tensor]) -> None:
        """Store the outputs of these inputs."""
        self._known = inputs, outputs

    def known(self, inputs: Inputs) -> Sequence[torch.Tensor] | None:
        """Return the stored outputs of these very tensors."""
        if self._known is None or self._known[0] is not inputs:
            return None
        outputs = self._known[1]
        return outputs if self._outputs is None else [outputs[i] for i in self._outputs]

    def forget(self) -> None:
        """Release the stored outputs."""
        self._known = None

    def of(self, outputs: Sequence[int]) -> "Fp64Reference":
        """Return a reference for these outputs only; random ops draw in any case."""
        part = copy.copy(self)
        part._outputs = outputs
        part._needed = _needed(self.graph, outputs)
        return part

    @property
    def count(self) -> int:
        """How many outputs are chosen."""
        return len(returned(self.graph) if self._outputs is None else self._outputs)

    def __call__(self, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Return the chosen outputs."""
        found = dict(self.each(inputs))
        return tuple(found[k] for k in range(len(found)))

    def each(self, inputs: Inputs) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the chosen outputs with their numbers among them, in the order in which they are computed.

        One that the caller does not keep is freed at its last use. Where the graph writes, all come at its end.
        """
        self._before()
        self._given, self._narrow = _WideTensors(self._input_bytes), {id(t) for t in inputs}
        self.env, self.args_iter = {}, iter(inputs)
        every = returned(self.graph)
        chosen = range(len(every)) if self._outputs is None else self._outputs
        due: dict[torch.fx.Node, list[int]] = {}
        for k, i in enumerate(chosen):
            due.setdefault(every[i], []).append(k)
        try:
            *nodes, _ = self.graph.nodes
            for place, node in enumerate(nodes):
                if place % _OPS == 0:  # pieces of ever other sizes fit nothing any more
                    free_unused(inputs)
                with torch.no_grad():
                    self.env[node] = self.run_node(node)
                for k in () if self.writes else due.pop(node, ()):
                    yield k, self._result(node)
                for unused in self._last_uses.get(node, ()):
                    del self.env[unused]
            for node, numbers in due.items():
                for k in numbers:
                    yield k, self._result(node)
        finally:
            self._given, self.env = _WideTensors(), {}

    def _result(self, node: torch.fx.Node) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = widened(self._once(self.env[node]))
        return result

    def run_node(self, n: torch.fx.Node) -> Any:
        if self._outputs is not None and n.op == "call_function" and n not in self._needed:
            return None
        if n.target not in _NOT_WIDENED:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        narrow = [_narrowed(a, b) for a, b in zip(args, n.args, strict=True)]
        made = n.target(*narrow, **kwargs)  # type: ignore[operator]
        return torch.utils._pytree.tree_map(_widen, made)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target not in LOOKUPS:
            args = torch.utils._pytree.tree_map(self._once, args)
            kwargs = torch.utils._pytree.tree_map(_widen, kwargs)
        if target in _OWN:
            return _OWN[target](*args, **kwargs)
        # Factories without a dtype argument use the default dtype: widen their results as well.
        return torch.utils._pytree.tree_map(_widen, super().call_function(target, args, kwargs))

    def _once(self, value: Any) -> Any:
        """Widen ``value``; an input once per run, a weight once for all runs, if they are few."""
        if not isinstance(value, torch.Tensor) or value.dtype not in NARROW:
            return _widen(value)
        # results of ops are wide by now: a narrow tensor is an input or an attribute of the module
        return (self._given if id(value) in self._narrow else self._weights).of(value)


class _WideTensors:
    """Tensors in fp64, kept up to ``most`` bytes; further ones are widened at use."""

    def __init__(self, most: float | None = None) -> None:
        self._left = KEPT if most is None else most
        self._kept: dict[
            int, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # a tensor whose id is a key lives

    def of(self, narrow: torch.Tensor) -> torch.Tensor:
        if (known := self._kept.get(id(narrow))) is None:
            if wide_bytes(narrow) > self._left:
                return WideAtUse(narrow)
            self._left -= wide_bytes(narrow)
            known = self._kept[id(narrow)] = narrow, narrow.double()
        return known[1]


def _is_mutable(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _needed(graph: torch.fx.Graph, outputs: Sequence[int]) -> set[torch.fx.Node]:
    every = returned(graph)
    pending = [*(every[i] for i in outputs), *filter(may_draw, graph.nodes)]
    found: set[torch.fx.Node] = set()
    while pending:
        node = pending.pop()
        if isinstance(node, torch.fx.Node) and node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def _narrowed(value: Any, given: Any) -> Any:
    """Narrow a widened operand to the dtype and the layout of its node.

    Kernels read a slice of padded rows at once, and refuse a dense copy of it as not aligned. Where the
    layout depends on sizes, rows are padded.
    """
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    like = given.meta["val"]
    if value.dtype == like.dtype:  # an input, which lies as the caller laid it out
        return value
    wide = widened(value)
    strides = like.stride()
    if not wide.numel():
        return wide.to(like.dtype)
    if not all(isinstance(s, int) for s in strides):
        rows = wide.new_empty(
            (*wide.shape[:-1], -(-wide.shape[-1] // _ALIGNED) * _ALIGNED), dtype=like.dtype
        )
        return rows[..., : wide.shape[-1]].copy_(wide)
    extent = 1 + sum((n - 1) * s for n, s in zip(wide.shape, strides, strict=True))
    memory = torch.zeros(extent, dtype=like.dtype, device=wide.device)
    once = wide[tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)]
    memory.as_strided(once.shape, strides).copy_(once)
    return memory.as_strided(wide.shape, strides)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dtype in NARROW:
            return value.double()
        return value.to(torch.complex128) if value.dtype == torch.complex64 else value
    if isinstance(value, torch.dtype) and value in NARROW:
        return torch.float64
    return torch.complex128 if value is torch.complex64 else value
