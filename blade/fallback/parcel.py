# SPDX-License-Identifier: Apache-2.0
"""A cluster as bytes and a file of tensors, so that another process can have an equal one.

    save_tensors(cluster, path)
    data = pack(cluster)
    cluster = unpack(data, path)         # elsewhere: same graph, same symbols, same guards

The graph travels as a list of calls. Its symbolic shapes are not stored: they are computed again as
``graph.to_fx`` did, from the same inputs under the same rules, hence with the same result. What was
declared of a size (and is no guard) does not travel: the copy relies on less and guards more.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
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

from blade.backends.base import Cluster, ValueInfo

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Ref:
    """Another node, as an argument."""

    name: str


@dataclass(frozen=True)
class _Call:
    """One FX node. ``target`` is the text of an ATen overload, a picklable function, or a name."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    source: str | None


@dataclass(frozen=True)
class _Input:
    """A placeholder's tensor: its sizes (hints where symbolic), strides, and which axes are symbolic."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dynamic: tuple[bool, ...]


@dataclass(frozen=True)
class _Parcel:
    name: str
    calls: tuple[_Call, ...]
    examples: tuple[_Input, ...]
    inputs: tuple[ValueInfo, ...]
    ops: tuple[str, ...]
    updates: tuple[int, ...]


def pack(cluster: Cluster) -> bytes:
    """Everything of ``cluster`` but its tensors; raises what ``pickle`` raises for odd arguments."""
    nodes = list(cluster.gm.graph.nodes)
    return pickle.dumps(
        _Parcel(
            name=cluster.name,
            calls=tuple(_call(node) for node in nodes),
            examples=tuple(_example(n.meta["val"]) for n in nodes if n.op == "placeholder"),
            inputs=cluster.inputs,
            ops=cluster.ops,
            updates=cluster.updates,
        )
    )


def constants(cluster: Cluster) -> dict[str, torch.Tensor]:
    """The tensors ``cluster.gm`` reads, by attribute name, in program order."""
    read = [str(n.target) for n in cluster.gm.graph.nodes if n.op == "get_attr"]
    return {name: attrgetter(name)(cluster.gm) for name in dict.fromkeys(read)}


def save_tensors(cluster: Cluster, path: Path, *, with_constants: bool = True) -> None:
    """Samples, probes and (unless they are elsewhere) constants, in the format of ``torch.save``."""
    torch.save(
        {
            "constants": constants(cluster) if with_constants else {},
            "samples": [tuple(map(_alone, one)) for one in cluster.samples],
            "probes": [tuple(map(_alone, one)) for one in cluster.probes],
        },
        path,
    )


def unpack(data: bytes, path: Path, known: Callable[[str], torch.Tensor] | None = None) -> Cluster:
    """The cluster again. ``known`` gives the constants by name; by default they are in the file."""
    parcel = pickle.loads(data)
    assert isinstance(parcel, _Parcel), parcel
    # mapped, not read: weights are paged in where they are used
    tensors = torch.load(path, mmap=True, weights_only=True)
    root = torch.nn.Module()
    for name in dict.fromkeys(str(c.target) for c in parcel.calls if c.op == "get_attr"):
        root.register_buffer(name, known(name) if known else tensors["constants"][name])
    gm, shape_env = _rebuild(parcel, root)
    return Cluster(
        name=parcel.name,
        gm=gm,
        shape_env=shape_env,
        inputs=parcel.inputs,
        ops=parcel.ops,
        samples=tensors["samples"],
        probes=tensors["probes"],
        updates=parcel.updates,
    )


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A view of something larger would be saved with all of it."""
    tensor = tensor.detach()
    small = tensor.untyped_storage().nbytes() <= 2 * tensor.numel() * tensor.element_size()
    return tensor if small else tensor.clone()


def _call(node: torch.fx.Node) -> _Call:
    target = node.target
    text = f"torch.ops.{target}" if isinstance(target, torch._ops.OpOverload) else None
    args, kwargs = _unlinked(node.args), _unlinked(node.kwargs)
    return _Call(node.op, node.name, text or target, args, kwargs, node.meta.get("source"))


def _unlinked(value: Any) -> Any:
    """In plain containers: FX's own would need FX's pickling."""
    if isinstance(value, torch.fx.Node):
        return _Ref(value.name)
    if isinstance(value, dict):
        return {key: _unlinked(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(_unlinked, value))
    return value


def _example(fake: torch.Tensor) -> _Input:
    return _Input(
        dtype=fake.dtype,
        device=fake.device,
        shape=tuple(_hint(n) for n in fake.shape),
        stride=tuple(_hint(n) for n in fake.stride()),
        dynamic=tuple(isinstance(n, torch.SymInt) for n in fake.shape),
    )


def _hint(size: int | torch.SymInt) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def _rebuild(parcel: _Parcel, root: torch.nn.Module) -> tuple[torch.fx.GraphModule, ShapeEnv]:
    env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    mode = FakeTensorMode(shape_env=env)
    graph = torch.fx.Graph()
    nodes: dict[str, torch.fx.Node] = {}
    inputs = iter(parcel.examples)
    oblivious = symbolic_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with oblivious, torch.no_grad():
        for call in parcel.calls:
            args, kwargs = _linked((call.args, call.kwargs), nodes)
            target = _target(call.target)
            node = graph.create_node(call.op, target, args, kwargs, name=call.name)
            nodes[call.name] = node
            if call.op == "placeholder":
                node.meta["val"] = _fake_input(mode, call.name, next(inputs))
            elif call.op == "get_attr":
                node.meta["val"] = mode.from_tensor(
                    attrgetter(call.target)(root), static_shapes=True
                )
            elif call.op == "call_function":
                node.meta["val"] = _compute(mode, node)
            if call.source is not None:
                node.meta["source"] = call.source
    graph.lint()
    return torch.fx.GraphModule(root, graph), env


def _linked(value: Any, nodes: dict[str, torch.fx.Node]) -> Any:
    if isinstance(value, _Ref):
        return nodes[value.name]
    if isinstance(value, dict):
        return {key: _linked(one, nodes) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_linked(one, nodes) for one in value)
    return value


def _target(target: Any) -> Any:
    if isinstance(target, str) and target.startswith("torch.ops."):
        return attrgetter(target.removeprefix("torch.ops."))(torch.ops)
    return target


def _fake_input(mode: FakeTensorMode, name: str, like: _Input) -> torch.Tensor:
    real = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device)
    dims = [DimDynamic.DYNAMIC if free else DimDynamic.STATIC for free in like.dynamic]
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=dims)
    return mode.from_tensor(real, source=ConstantSource(name), symbolic_context=context)


def _compute(mode: FakeTensorMode, node: torch.fx.Node) -> Any:
    def value(argument: torch.fx.Node) -> Any:
        return argument.meta["val"]

    args: Sequence[Any] = torch.fx.map_arg(node.args, value)
    kwargs: dict[str, Any] = torch.fx.map_arg(node.kwargs, value)
    assert callable(node.target), node
    with mode, enable_python_dispatcher():
        return node.target(*args, **kwargs)
