# SPDX-License-Identifier: Apache-2.0
"""The fp64 reference: a cluster computed in fp64, which engine and original are measured against.

truth = Fp64Reference(cluster.gm)            # weights are widened once
outputs = truth(inputs)             # raises where an op has no fp64 implementation
[third] = truth.of([2])(inputs)     # computes only what that output needs

``Fp64Reference(gm, generators.reset)`` resets the random generators first, so that it draws the cluster's
numbers.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from blade.graph.fx.interpreter import Interpreter
from blade.graph.fx.random_ops import DRAWING
from blade.verification.rng_replay import may_draw

Inputs = tuple[torch.Tensor, ...]

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
# Lookups lose nothing in a narrow table, of which they read few rows.
_LOOKUPS = (torch.ops.aten.embedding.default, torch.ops.aten.index_select.default)
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
    """Runs an FX graph with every float tensor, constant and dtype argument widened to fp64."""

    def __init__(self, gm: torch.fx.GraphModule, before: Callable[[], None] = lambda: None) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self._before = before
        self._widened: dict[
            int, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # keeps the tensor: its id is the key
        self._given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
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

    def of(self, outputs: Sequence[int]) -> "Fp64Reference":
        """Return a reference for these outputs only; random ops draw in any case."""
        part = copy.copy(self)
        part._outputs = outputs
        part._needed = _needed(self.graph, outputs)
        return part

    def __call__(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        self._before()
        self._given, self._narrow = {}, {id(t) for t in inputs}
        with torch.no_grad():
            outputs = self.run(*inputs, enable_io_processing=False)
        chosen = outputs if self._outputs is None else [outputs[i] for i in self._outputs]
        wide = tuple(map(self._once, chosen))
        self._given = {}
        return wide

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
        if target not in _LOOKUPS:
            args = torch.utils._pytree.tree_map(self._once, args)
            kwargs = torch.utils._pytree.tree_map(_widen, kwargs)
        # Factories without a dtype argument use the default dtype: widen their results as well.
        return torch.utils._pytree.tree_map(_widen, super().call_function(target, args, kwargs))

    def _once(self, value: Any) -> Any:
        """Widen ``value``; an input once per run, a weight once for all runs."""
        if not isinstance(value, torch.Tensor) or value.dtype not in _NARROW:
            return _widen(value)
        # results of ops are wide by now: a narrow tensor is an input or an attribute of the module
        known = self._given if id(value) in self._narrow else self._widened
        if id(value) not in known:
            known[id(value)] = value, _widen(value)
        return known[id(value)][1]


def _needed(graph: torch.fx.Graph, outputs: Sequence[int]) -> set[torch.fx.Node]:
    returned = graph.output_node().args[0]
    assert isinstance(returned, (list, tuple)), returned
    pending = [*(returned[i] for i in outputs), *filter(may_draw, graph.nodes)]
    found: set[torch.fx.Node] = set()
    while pending:
        node = pending.pop()
        if isinstance(node, torch.fx.Node) and node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def _narrowed(value: Any, given: Any) -> Any:
    """Narrow a widened operand to the dtype of its node."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(given.meta["val"].dtype)
    return value


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dtype in _NARROW:
            return value.double()
        return value.to(torch.complex128) if value.dtype == torch.complex64 else value
    if isinstance(value, torch.dtype) and value in _NARROW:
        return torch.float64
    return torch.complex128 if value is torch.complex64 else value
