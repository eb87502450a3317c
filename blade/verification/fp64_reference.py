# SPDX-License-Identifier: Apache-2.0
"""The fp64 reference: a cluster computed in fp64, which engine and original are measured against.

truth = Fp64Reference(cluster.gm)
outputs = truth(inputs)             # raises where an op has no fp64 implementation
[third] = truth.of([2])(inputs)     # computes only what that output needs
for number, output in truth.each(inputs): ...    # each as soon as it is computed, and then no longer held

``Fp64Reference(gm, generators.reset)`` resets the random generators first, so that it draws the cluster's
numbers.

Where all that is compared is in 16 bits, ``truth.in_float32()`` is exact enough: its values are in float32, in half the
memory, and its products in fp64 (in float32 they may be of fewer digits, TF32).

Weights are widened once up to ``KEPT`` bytes in all; each of the others is when an op uses it
(``wide_at_use``). Results live until their last use.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

import torch

from blade.graph.fx.interpreter import Interpreter, Schedule, returned, writes_memory
from blade.graph.fx.random_ops import DRAWING, may_draw
from blade.graph.shapes.memory_format import order_of
from blade.process.memory import free_unused
from blade.verification import products_in_parts
from blade.verification.attend_to_seen import attend_to_seen, flash_attend_to_seen
from blade.verification.grouped_products import GROUPED, grouped_product
from blade.verification.products_in_parts import in_fp64
from blade.verification.wide_at_use import (
    LOOKUPS,
    NARROW,
    WideAtUse,
    is_narrow,
    wide_bytes,
    widened,
)

Inputs = tuple[torch.Tensor, ...]

KEPT = 32 << 20
"""Most bytes of weights in fp64 that a reference keeps, and of inputs that a run does."""

_OPS = 32
_MUCH = 256 << 20
"""After so many ops, or bytes of results, it is asked how much of torch's cache is unused: as slow as some ops."""

_OWN: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.scaled_dot_product_attention.default: attend_to_seen,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: flash_attend_to_seen,
    GROUPED: grouped_product,
    # an op in fp64 may lay its result out otherwise than the kernel that the graph was traced with
    torch.ops.aten.view.default: torch.Tensor.reshape,
    torch.ops.aten._unsafe_view.default: torch.Tensor.reshape,
}
# What torch may compute in fewer digits than float32 has.
_PRODUCTS = frozenset(
    "mm bmm addmm baddbmm addbmm addmv addr mv dot vdot matmul linear bilinear einsum _trilinear "
    "_grouped_mm convolution _convolution convolution_backward conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d cdist _cdist_forward _cdist_backward "
    "_euclidean_dist scaled_dot_product_attention lstm gru rnn_tanh rnn_relu lstm_cell gru_cell "
    "_cudnn_rnn _cudnn_rnn_backward _thnn_fused_lstm_cell _thnn_fused_gru_cell".split()
)
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
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
        self.writes = any(map(writes_memory, self.graph.nodes))
        self._wide = torch.float64
        self._weights = _WideTensors(self._wide)
        self._given = _WideTensors(self._wide)
        self._schedule = Schedule(self.graph)
        self._narrow: set[int] = set()
        self._outputs: Sequence[int] | None = None
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
        part._schedule = Schedule(self.graph, outputs, _needed(self.graph, outputs))
        return part

    def in_float32(self) -> "Fp64Reference":
        """Return a reference for values of 16 bits, which computes in float32 but for products."""
        part = copy.copy(self)
        part._wide, part._known = torch.float32, None
        part._weights = _WideTensors(part._wide)
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

        One that the caller does not keep is freed at its last use.
        """
        self._before()
        self._given = _WideTensors(self._wide, inf if self.writes else KEPT)
        self._narrow = {id(t) for t in inputs}
        self.env, self.args_iter = {}, iter(inputs)
        every = returned(self.graph)
        chosen = range(len(every)) if self._outputs is None else self._outputs
        try:
            new = _MUCH
            for place, node in enumerate(self._schedule.nodes):
                if place % _OPS == 0 or new >= _MUCH:
                    free_unused(inputs)  # pieces of ever other sizes fit nothing any more
                    new = 0
                with torch.no_grad():
                    made = self.env[node] = self.run_node(node)
                new += made.nbytes if isinstance(made, torch.Tensor) else 0
                del made
                for k in self._schedule.due.get(node, ()):
                    yield k, self._result(node)
                for unused in self._schedule.unused.get(node, ()):
                    del self.env[unused]
            for k in self._schedule.late:
                yield k, self._result(every[chosen[k]])
        finally:
            self._given, self.env = _WideTensors(self._wide), {}

    def _result(self, node: torch.fx.Node) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = widened(self._once(self.env[node]), self._wide)
        return result

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.target not in _NOT_WIDENED:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        narrow = [
            a if id(a) in self._narrow else _narrowed(a, b, self._wide)
            for a, b in zip(args, n.args, strict=True)
        ]
        made = n.target(*narrow, **kwargs)  # type: ignore[operator]
        return torch.utils._pytree.tree_map(self._widen, made)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target not in LOOKUPS:
            args = torch.utils._pytree.tree_map(self._once, args)
            kwargs = torch.utils._pytree.tree_map(self._widen, kwargs)
        if self._is_unneeded_copy(target, args, kwargs):
            return args[0]
        if not kwargs and (made := products_in_parts.compute(target, args, self._wide)) is not None:
            return made
        in_float64 = self._wide is not torch.float64 and _is_product(target)
        if in_float64:
            args, kwargs = torch.utils._pytree.tree_map(in_fp64, (args, kwargs))
        own = _OWN.get(target)
        made = super().call_function(target, args, kwargs) if own is None else own(*args, **kwargs)
        # Factories without a dtype argument use the default dtype: widen their results as well.
        widen = self._back if in_float64 else self._widen
        return torch.utils._pytree.tree_map(widen, made)

    def _is_unneeded_copy(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a copy, of a value that is wide already, would only take its memory once more.

        Some kernels need the layout that a copy has.
        """
        if target not in _COPIES or self.writes or kwargs.keys() - {"dtype", "memory_format"}:
            return False
        [value] = args
        if kwargs.get("dtype") not in (None, value.dtype):
            return False
        layout = kwargs.get("memory_format") or torch.preserve_format
        if layout is torch.preserve_format:
            return value.is_contiguous() or order_of(value) is not None
        return bool(value.is_contiguous(memory_format=layout))

    def _once(self, value: Any) -> Any:
        """Widen ``value``; an input once per run, a weight once for all runs, if they are few."""
        if isinstance(value, WideAtUse) or not is_narrow(value, self._wide):
            return self._widen(value)
        # results of ops are wide by now: a narrow tensor is an input or an attribute of the module
        return (self._given if id(value) in self._narrow else self._weights).of(value)

    def _widen(self, value: Any) -> Any:
        if isinstance(value, WideAtUse):
            return value
        if isinstance(value, torch.Tensor) and value.dtype is torch.complex64:
            return value if self._wide is torch.float32 else value.to(torch.complex128)
        if isinstance(value, torch.dtype) and value in NARROW:
            return self._wide
        if value is torch.complex64 and self._wide is torch.float64:
            return torch.complex128
        return widened(value, self._wide)

    def _back(self, value: Any) -> Any:
        """The result of an op that ran in fp64."""
        is_wide = isinstance(value, torch.Tensor) and value.dtype is torch.float64
        return value.to(self._wide) if is_wide else value


def _is_product(target: Any) -> bool:
    return getattr(getattr(target, "overloadpacket", None), "__name__", "") in _PRODUCTS


class _WideTensors:
    """Tensors in a ``wide`` dtype, kept up to ``most`` bytes; further ones are widened at use."""

    def __init__(self, wide: torch.dtype, most: float | None = None) -> None:
        self._wide, self._left = wide, KEPT if most is None else most
        self._kept: dict[
            int, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # a tensor whose id is a key lives

    def of(self, narrow: torch.Tensor) -> torch.Tensor:
        if (known := self._kept.get(id(narrow))) is None:
            if wide_bytes(narrow, self._wide) > self._left:
                return WideAtUse(narrow, self._wide)
            self._left -= wide_bytes(narrow, self._wide)
            known = self._kept[id(narrow)] = narrow, narrow.to(self._wide)
        return known[1]


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


def _narrowed(value: Any, given: Any, wide: torch.dtype) -> Any:
    """Narrow a widened operand to the dtype and the layout of its node.

    Kernels read a slice of padded rows at once, and refuse a dense copy of it as not aligned. Where the
    layout depends on sizes, rows are padded.
    """
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    like = given.meta["val"]
    if value.dtype == like.dtype != wide:  # an attribute
        return value
    value = widened(value, value.dtype)
    strides = like.stride()
    if not value.numel():
        return value.to(like.dtype)
    if not all(isinstance(s, int) for s in strides):
        rows = value.new_empty(
            (*value.shape[:-1], -(-value.shape[-1] // _ALIGNED) * _ALIGNED), dtype=like.dtype
        )
        return rows[..., : value.shape[-1]].copy_(value)
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, strides, strict=True))
    memory = torch.zeros(extent, dtype=like.dtype, device=value.device)
    once = value[tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)]
    memory.as_strided(once.shape, strides).copy_(once)
    return memory.as_strided(value.shape, strides)
