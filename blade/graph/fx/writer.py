# SPDX-License-Identifier: Apache-2.0
"""Writes an FX graph of ATen ops over symbolic sizes, call by call.

    writer = FxWriter()
    x = writer.place("x0", stand_in, [DimDynamic.DYNAMIC, DimDynamic.STATIC], "%x.1")
    y = writer.emit(torch.ops.aten.relu.default, (x,), {}, "model.py:7")
    gm = writer.finish([y])                       # writer.shape_env.guards: relations that the sizes rely on

Each call runs on fake tensors, only to learn the shapes and the guards they rely on; equal calls run once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.utils._pytree import tree_map_only

from blade.core.torch_modes import dispatched_in_python, oblivious_to_sizes
from blade.graph.shapes.loops import run_loop
from blade.graph.shapes.memo import MemoizedResult, ResultMemo, is_data_dependent, settle
from blade.graph.shapes.observed_layout import in_observed_layout
from blade.graph.shapes.padding_sizes import shortened
from blade.graph.shapes.symbolic import UnspecializedFakeMode, UnspecializedShapeEnv, is_symbolic

CANNOT = (
    *(RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError, KeyError),
    ZeroDivisionError,
)
"""Errors of torch's shape functions for shapes that they cannot express."""


@contextmanager
def writing() -> Iterator[None]:
    """A context for using ``FxWriter``: a size whose hint is 1 must not be taken for a broadcast axis."""
    oblivious = oblivious_to_sizes()
    with oblivious, torch.no_grad():
        yield


class FxWriter:
    """The graph so far. Every node has its fake value in ``meta["val"]``."""

    def __init__(self, around: FxWriter | None = None) -> None:
        """``around``: this one writes the body of a loop in that graph, under the same symbols."""
        if around is None:
            self.shape_env = UnspecializedShapeEnv()
            self.mode = UnspecializedFakeMode(self.shape_env)
            # ``results`` caches calls already; torch's cache would double the time
            self.mode.cache_enabled = False
        else:
            self.shape_env, self.mode = around.shape_env, around.mode
        self.graph = torch.fx.Graph()
        self.root = torch.nn.Module()
        self.results: ResultMemo = ResultMemo() if around is None else around.results
        self.made: dict[torch.fx.Node, MemoizedResult] = {}
        self.loops = 0

    def place(
        self, name: str, like: torch.Tensor, sizes: Sequence[DimDynamic], source: str
    ) -> torch.fx.Node:
        """An input; a dynamic size takes its hint from ``like``."""
        node = self.graph.placeholder(name)
        if any(size is not DimDynamic.STATIC for size in sizes):
            placed = self.mode.from_tensor(
                like,
                source=_source(name),
                symbolic_context=StatelessSymbolicContext(dynamic_sizes=list(sizes)),
            )
            with self.mode:  # its offset in memory is a symbol too, which a cluster has no use for
                node.meta["val"] = blank(placed)
        else:  # equivalent in a tenth of the time: an optimizer's graph has hundreds of inputs
            with self.mode:
                node.meta["val"] = blank(like)
        node.meta["source"] = source
        return node

    def hold(self, slot: int, tensor: torch.Tensor, source: str) -> torch.fx.Node:
        """The constant ``const_{slot}``: ``tensor`` itself."""
        self.root.register_buffer(f"const_{slot}", tensor)
        node = self.graph.get_attr(f"const_{slot}")
        if _is_whole(tensor):  # equivalent and faster: a model has hundreds of constants
            with self.mode:
                node.meta["val"] = blank(tensor)
        else:
            node.meta["val"] = self.mode.from_tensor(tensor, static_shapes=True)
        node.meta["source"] = source
        return node

    def emit(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        source: str,
    ) -> torch.fx.Node:
        """A call; raises one of ``CANNOT`` if its shapes cannot be expressed."""
        if is_data_dependent(target):
            self._separate(target, args, kwargs)
        fake_args = torch.fx.map_arg(tuple(args), value_of)
        fake_kwargs = torch.fx.map_arg(dict(kwargs), value_of)
        # Without the Python dispatcher, ops that decompose in C++ (pad, upsample) treat the sample's
        # sizes as constants, and some shape functions fail on symbols.
        with self.mode, dispatched_in_python():
            made = self.results.of(target, fake_args, fake_kwargs)
        node = self.graph.call_function(target, tuple(args), dict(kwargs))
        node.meta["val"] = made.value
        self.made[node] = made
        node.meta["source"] = source
        return node

    def _separate(
        self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Give operands fake tensors of their own: one remembers its item and how many elements are true."""
        operands: list[torch.fx.Node] = []
        torch.fx.map_arg((tuple(args), dict(kwargs)), operands.append)
        if target is torch.ops.aten.index.Tensor:
            operands = [n for n in operands if n.meta["val"].dtype in (torch.bool, torch.uint8)]
        with self.mode, dispatched_in_python():
            settle(operands, self.made)

    def lay_out(self, node: torch.fx.Node, order: Sequence[int] | None) -> None:
        """Give ``node``'s result the memory order observed when the model ran (``in_observed_layout``)."""
        with self.mode:
            self.made[node] = in_observed_layout(self.made[node], order)
        node.meta["val"] = self.made[node].value

    def copy(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        like: Any,
        source: str,
    ) -> torch.fx.Node:
        """A call whose results are known to look like ``like``: static tensors, one, several or none."""
        node = self.graph.call_function(target, tuple(args), dict(kwargs))
        with self.mode:
            node.meta["val"] = tree_map_only(torch.Tensor, blank, like)
        node.meta["source"] = source
        return node

    def size(self, tensor: torch.fx.Node, axis: int, source: str) -> Any:
        """The size of ``tensor`` along ``axis``: a number if known, else a node."""
        size = tensor.meta["val"].shape[axis]
        if not is_symbolic(size):
            return size
        return self.emit(torch.ops.aten.sym_size.int, (tensor, axis), {}, source)

    def number(self, function: Callable[..., Any], inputs: Sequence[Any], source: str) -> Any:
        """``function`` of numbers: computed now if all are known; an input if the result equals it."""
        if not any(isinstance(i, torch.fx.Node) and is_symbolic(value_of(i)) for i in inputs):
            return function(*map(value_of, inputs))
        node = self.emit(function, tuple(inputs), {}, source)
        made = node.meta["val"] = shortened(node.meta["val"])
        same = next((i for i in inputs if _same_number(value_of(i), made)), None)
        if is_symbolic(made) and same is None:
            return node
        self.graph.erase_node(node)
        return made if same is None else same

    def begin_iteration(self, count: Any, given: Sequence[Any]) -> list[torch.fx.Node]:
        """The inputs of a loop's body: the iteration index, then the state and what every iteration reads.

        ``given``: fake tensors, and indices of loops around this one.
        """
        hint = max(0, min(2, _hint(count) - 1))
        symbol = self.shape_env.create_unspecified_symbol(
            hint, _source(f"index_{id(self)}"), DimDynamic.DYNAMIC
        )
        number = self.shape_env.create_symintnode(symbol, hint=hint)
        index = self.graph.placeholder("index")
        index.meta["val"] = number
        nodes = [index]
        for k, like in enumerate(given):
            node = self.graph.placeholder(f"x{k}")
            with self.mode:
                node.meta["val"] = _like(like) if isinstance(like, torch.Tensor) else like
            nodes.append(node)
        return nodes

    def drop(self, inputs: Sequence[torch.fx.Node], outputs: Sequence[torch.fx.Node]) -> None:
        """Erase ``inputs`` and calls that ``outputs`` do not need."""
        needed, pending = set(outputs), [*outputs]
        while pending:
            fresh = [n for n in pending.pop().all_input_nodes if n not in needed]
            needed.update(fresh)
            pending += fresh
        for node in reversed(self.graph.nodes):
            if node in inputs or (node.op == "call_function" and node not in needed):
                self.graph.erase_node(node)

    def loop(
        self,
        body: FxWriter,
        count: Any,
        state: Sequence[torch.fx.Node],
        given: Sequence[torch.fx.Node],
        outputs: Sequence[torch.fx.Node],
        fewest: int,
        source: str,
    ) -> torch.fx.Node:
        """The call of a loop whose body returns ``outputs``: the new state, then results of the iteration."""
        name, self.loops = f"loop_{self.loops}", self.loops + 1
        new, results = outputs[: len(state)], outputs[len(state) :]
        for before, after in zip(state, new, strict=True):
            _require_form(before.meta["val"], after.meta["val"])
        self.root.add_module(name, body.finish(outputs))
        held = self.graph.get_attr(name)
        node = self.graph.call_function(run_loop, (held, count, tuple(state), tuple(given), fewest))
        with self.mode:
            final = [_like(n.meta["val"]) for n in new]
            every = [_like(n.meta["val"], value_of(count)) for n in results]
        node.meta["val"] = (*final, *every)
        node.meta["source"] = source
        return node

    def finish(self, outputs: Sequence[torch.fx.Node]) -> torch.fx.GraphModule:
        with self.mode, dispatched_in_python():
            settle(outputs, self.made)
        self.graph.output(tuple(outputs))
        self.graph.lint()
        return torch.fx.GraphModule(self.root, self.graph)


def _source(name: str) -> Any:
    from torch._dynamo.source import ConstantSource  # loads Inductor, and that Triton

    return ConstantSource(name)


def _hint(number: Any) -> int:
    value = value_of(number)
    return int(value.node.hint) if isinstance(value, torch.SymInt) else int(value)


def _like(value: torch.Tensor, *front: Any) -> torch.Tensor:
    return torch.empty((*front, *value.shape), dtype=value.dtype, device=value.device)


def _require_form(before: torch.Tensor, after: torch.Tensor) -> None:
    """The state has one dtype and shape; sizes that are equal in the sample become a guard."""
    if before.dtype != after.dtype or before.dim() != after.dim():
        raise TypeError(
            f"a loop changes {before.dtype} of rank {before.dim()} to {after.dtype} of rank {after.dim()}"
        )
    for a, b in zip(before.shape, after.shape, strict=True):
        if a != b:
            raise ValueError(f"a loop changes the size {a} of its state to {b}")


def value_of(node: Any) -> Any:
    """The fake value of a node; any other object is returned unchanged."""
    return node.meta["val"] if isinstance(node, torch.fx.Node) else node


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether sizes and strides describe ``tensor`` completely."""
    flags = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return tensor.layout is torch.strided and not flags and tensor.storage_offset() == 0


def blank(like: torch.Tensor) -> torch.Tensor:
    """A tensor like ``like`` in memory of its own."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def _same_number(a: Any, b: Any) -> bool:
    """Whether a and b are the same symbolic expression (``size + 0``, ``int(size)``)."""
    return is_symbolic(a) and type(a) is type(b) and bool(a.node.expr == b.node.expr)
