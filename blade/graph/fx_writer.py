# SPDX-License-Identifier: Apache-2.0
"""An FX graph of ATen ops over symbolic sizes, written call by call.

    writer = Writer()
    x = writer.place("x0", stand_in, [DimDynamic.DYNAMIC, DimDynamic.STATIC], "%x.1")
    y = writer.emit(torch.ops.aten.relu.default, (x,), {}, "model.py:7")
    gm = writer.finish([y])                       # writer.shape_env.guards: what the sizes rely on

Each call is made on fake tensors, only to learn the shapes and the guards they rely on; calls that are alike, once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_config
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._pytree import tree_map_only

from blade.graph.as_observed import as_observed
from blade.graph.known_results import Made, Results, settle
from blade.graph.scalars import is_symbolic

CANNOT = (
    *(RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError, KeyError),
    ZeroDivisionError,
)
"""What torch's shape functions raise for shapes they cannot express."""


@contextmanager
def writing() -> Iterator[None]:
    """To be active while a ``Writer`` is at work: a size whose hint is 1 must not be taken for a broadcast axis."""
    oblivious = symbolic_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with oblivious, torch.no_grad():
        yield


class _Environment(ShapeEnv):
    """Sizes whose guards say nothing of the line of Python that asked: it is this package's, and to tell it from
    torch's own imports torch's exporter and Inductor, half a second."""

    def _get_user_frame(self) -> FrameType | None:
        return inspect.currentframe()


class Writer:
    """The graph so far. Every node has the fake value it stands for in ``meta["val"]``."""

    def __init__(self) -> None:
        self.shape_env = _Environment(specialize_zero_one=False, duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.shape_env)
        # ``results`` is asked first; keeping what it makes takes as long again
        self.mode.cache_enabled = False
        self.graph = torch.fx.Graph()
        self.root = torch.nn.Module()
        self.results = Results()
        self.made: dict[torch.fx.Node, Made] = {}

    def place(
        self, name: str, like: torch.Tensor, sizes: Sequence[DimDynamic], source: str
    ) -> torch.fx.Node:
        """An input; of a dynamic size, that of ``like`` is the hint."""
        node = self.graph.placeholder(name)
        if any(size is not DimDynamic.STATIC for size in sizes):
            node.meta["val"] = self.mode.from_tensor(
                like,
                source=ConstantSource(name),
                symbolic_context=StatelessSymbolicContext(dynamic_sizes=list(sizes)),
            )
        else:  # as good, in a tenth of the time: an optimizer's graph has hundreds of them
            with self.mode:
                node.meta["val"] = _blank(like)
        node.meta["source"] = source
        return node

    def hold(self, slot: int, tensor: torch.Tensor, source: str) -> torch.fx.Node:
        """The constant ``const_{slot}``: ``tensor`` itself."""
        self.root.register_buffer(f"const_{slot}", tensor)
        node = self.graph.get_attr(f"const_{slot}")
        if _is_whole(tensor):  # as good, and quick: a model has hundreds of them
            with self.mode:
                node.meta["val"] = _blank(tensor)
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
        """A call; raises one of ``CANNOT`` where its shapes cannot be expressed."""
        fake_args = torch.fx.map_arg(tuple(args), value_of)
        fake_kwargs = torch.fx.map_arg(dict(kwargs), value_of)
        # Without the Python dispatcher, ops that decompose in C++ (pad, upsample) take the sample's
        # sizes for constants, and some shape functions fail on symbols.
        with self.mode, enable_python_dispatcher():
            made = self.results.of(target, fake_args, fake_kwargs)
        node = self.graph.call_function(target, tuple(args), dict(kwargs))
        node.meta["val"] = made.value
        self.made[node] = made
        node.meta["source"] = source
        return node

    def lay_out(self, node: torch.fx.Node, order: Sequence[int] | None) -> None:
        """Give ``node``'s result the order in memory that the model's run showed (``as_observed``)."""
        with self.mode:
            self.made[node] = as_observed(self.made[node], order)
        node.meta["val"] = self.made[node].value

    def copy(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        like: Any,
        source: str,
    ) -> torch.fx.Node:
        """A call whose results are known to be like ``like``: a tensor of static sizes, or several or none of them."""
        node = self.graph.call_function(target, tuple(args), dict(kwargs))
        with self.mode:
            node.meta["val"] = tree_map_only(torch.Tensor, _blank, like)
        node.meta["source"] = source
        return node

    def size(self, tensor: torch.fx.Node, axis: int, source: str) -> Any:
        """The size of ``tensor`` along ``axis``: a number if it is known, else a node."""
        size = tensor.meta["val"].shape[axis]
        if not is_symbolic(size):
            return size
        return self.emit(torch.ops.aten.sym_size.int, (tensor, axis), {}, source)

    def number(self, function: Callable[..., Any], inputs: Sequence[Any], source: str) -> Any:
        """``function`` of numbers: computed now if all are known; an input, if it comes to the same."""
        if not any(isinstance(i, torch.fx.Node) and is_symbolic(value_of(i)) for i in inputs):
            return function(*map(value_of, inputs))
        node = self.emit(function, tuple(inputs), {}, source)
        made = node.meta["val"]
        same = next((i for i in inputs if _same_number(value_of(i), made)), None)
        if is_symbolic(made) and same is None:
            return node
        self.graph.erase_node(node)
        return made if same is None else same

    def finish(self, outputs: Sequence[torch.fx.Node]) -> torch.fx.GraphModule:
        with self.mode, enable_python_dispatcher():
            settle(outputs, self.made)
        self.graph.output(tuple(outputs))
        self.graph.lint()
        return torch.fx.GraphModule(self.root, self.graph)


def value_of(node: Any) -> Any:
    """What a node stands for; anything else is itself."""
    return node.meta["val"] if isinstance(node, torch.fx.Node) else node


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether its sizes and strides are all that a fake tensor can know of it."""
    flags = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return tensor.layout is torch.strided and not flags and tensor.storage_offset() == 0


def _blank(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def _same_number(a: Any, b: Any) -> bool:
    """Whether a and b are one symbolic expression (``size + 0``, ``int(size)``)."""
    return is_symbolic(a) and type(a) is type(b) and bool(a.node.expr == b.node.expr)
