# SPDX-License-Identifier: Apache-2.0
"""A Python function -> the FX graph the compiler gets: ATen ops as written, symbolic sizes.

Tracing through TorchScript is tested elsewhere; here hundreds of one-op graphs have to be cheap.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_config
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from blade.graph.shapes.shape_functions import result_of
from blade.graph.shapes.symbolic import UnspecializedFakeMode, UnspecializedShapeEnv

DYNAMIC, STATIC = DimDynamic.DYNAMIC, DimDynamic.STATIC


def trace(
    function: Callable[..., Any],
    samples: Sequence[torch.Tensor],
    dynamic: Sequence[Sequence[bool]],
) -> tuple[torch.fx.GraphModule, ShapeEnv]:
    """FX of ``function``; ``dynamic`` tells per sample which axes are symbols."""
    shape_env = UnspecializedShapeEnv()
    oblivious = symbolic_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    # inference mode: composite ops reach the recorder whole
    recorder = _Recorder(UnspecializedFakeMode(shape_env))
    # the order that a package finds best for the sizes of the sample would be one for these alone
    as_written = torch.backends.opt_einsum.flags(enabled=False)
    with oblivious, as_written, torch.inference_mode():
        inputs = [recorder.input(*one) for one in zip(samples, dynamic, strict=True)]
        with recorder:
            results = function(*inputs)
        results = results if isinstance(results, (list, tuple)) else (results,)
        recorder.graph.output(tuple(recorder.node_of(r) for r in results))
    return torch.fx.GraphModule(recorder.root, recorder.graph), shape_env


def ops_of(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> set[Any]:
    """The ATen overloads that ``function`` calls."""
    with torch.inference_mode(), _Listener() as listener:
        function(*[t.clone() for t in inputs])
    return listener.seen


class _Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, fake: UnspecializedFakeMode) -> None:
        super().__init__()
        self.fake = fake
        self.graph = torch.fx.Graph()
        self.root = torch.nn.Module()
        self.nodes: dict[int, torch.fx.Node] = {}
        self.kept: list[Any] = []  # ids are only unique among living tensors

    def input(self, sample: torch.Tensor, dynamic: Sequence[bool]) -> torch.Tensor:
        context = StatelessSymbolicContext(
            dynamic_sizes=[DYNAMIC if d else STATIC for d in dynamic]
        )
        node = self.graph.placeholder(f"x{len(self.nodes)}")
        source = ConstantSource(node.name)
        with torch.inference_mode(False):
            made = self.fake.from_tensor(sample, source=source, symbolic_context=context)
        return self.keep(node, made)

    def keep(self, node: torch.fx.Node, made: Any) -> Any:
        node.meta["val"] = made
        self.kept.append(made)
        self.nodes[id(made)] = node
        return made

    def node_of(self, tensor: torch.Tensor) -> torch.fx.Node:
        if id(tensor) not in self.nodes:  # a constant of the function
            name = f"const_{len(self.kept)}"
            self.root.register_buffer(name, tensor)
            node = self.graph.get_attr(name)
            with torch.inference_mode(False):
                self.keep(node, self.fake.from_tensor(tensor, static_shapes=True))
            self.kept.append(tensor)
            self.nodes[id(tensor)] = node
        return self.nodes[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self.node_of, (args, kwargs or {}))
        real_args, real_kwargs = tree_map_only(
            torch.fx.Node, lambda n: n.meta["val"], (args, kwargs)
        )
        with torch.inference_mode(False), torch.no_grad(), self.fake, enable_python_dispatcher():
            made = result_of(func, real_args, real_kwargs)
        if not isinstance(made, (torch.Tensor, list, tuple)):
            return made  # a size, a device
        node = self.graph.call_function(func, args, kwargs)
        node.meta["val"] = made
        self.kept.append(made)
        if isinstance(made, torch.Tensor):
            return self.keep(node, made)
        if isinstance(made, (list, tuple)):
            for k, part in enumerate(made):
                self.keep(self.graph.call_function(operator.getitem, (node, k)), part)
        return made
