# SPDX-License-Identifier: Apache-2.0
"""Serialize a cluster as bytes and a file of tensors, for another process.

    save_tensors(cluster, path)          # or an open file
    data = encode_cluster(cluster)
    cluster = decode_cluster(data, path)         # elsewhere: same graph, same symbols, same guards

The graph is stored as a list of calls. Its symbolic shapes are not stored: they are computed again from the
same inputs under the same rules, as in the conversion to FX, hence with the same result. Declarations about
sizes that are no guards are not stored: the copy assumes less and guards more.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from blade.core.cluster import Cluster, ValueInfo
from blade.core.torch_modes import dispatched_in_python, oblivious_to_sizes
from blade.graph.fx.calls import SerializedCall, decode_node, encode_node
from blade.graph.shapes.shape_functions import result_of
from blade.graph.shapes.symbolic import UnspecializedFakeMode, UnspecializedShapeEnv

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _SerializedInput:
    """A placeholder's tensor: its sizes (hints where symbolic), strides, and which axes are symbolic."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dynamic: tuple[bool, ...]


@dataclass(frozen=True)
class _SerializedCluster:
    name: str
    calls: tuple[SerializedCall, ...]
    examples: tuple[_SerializedInput, ...]
    inputs: tuple[ValueInfo, ...]
    ops: tuple[str, ...]
    updates: tuple[int, ...]
    traced: bool = False


def encode_cluster(cluster: Cluster) -> bytes:
    """Serialize ``cluster`` without its tensors; raises what ``pickle`` raises for odd arguments."""
    return pickle.dumps(_serialized(cluster))


def describe_cluster(cluster: Cluster) -> str:
    """All that ``encode_cluster`` stores but the name and sources, as a text that is equal in every process."""
    parcel = _serialized(cluster)
    calls = [
        (
            c.op,
            c.name,
            c.target if isinstance(c.target, str) else _name_of(c.target),
            c.args,
            c.kwargs,
        )
        for c in parcel.calls
    ]
    return repr((calls, parcel.examples, parcel.inputs, parcel.ops, parcel.updates))


def _name_of(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _serialized(cluster: Cluster) -> _SerializedCluster:
    nodes = list(cluster.gm.graph.nodes)
    return _SerializedCluster(
        name=cluster.name,
        calls=tuple(map(encode_node, nodes)),
        examples=tuple(_example(n.meta["val"]) for n in nodes if n.op == "placeholder"),
        inputs=cluster.inputs,
        ops=cluster.ops,
        updates=cluster.updates,
        traced=cluster.traced,
    )


def constants_of(cluster: Cluster) -> dict[str, torch.Tensor]:
    """Return the tensors that ``cluster.gm`` reads, by attribute name, in program order."""
    read = [str(n.target) for n in cluster.gm.graph.nodes if n.op == "get_attr"]
    return {name: attrgetter(name)(cluster.gm) for name in dict.fromkeys(read)}


def save_tensors(cluster: Cluster, file: Path | IO[bytes], *, with_constants: bool = True) -> None:
    """Write samples, probes and, with ``with_constants``, constants in the format of ``torch.save``."""
    torch.save(
        {
            "constants": constants_of(cluster) if with_constants else {},
            "samples": [tuple(map(_alone, one)) for one in cluster.samples],
            "probes": [tuple(map(_alone, one)) for one in cluster.probes],
        },
        file,
    )


def decode_cluster(
    data: bytes, path: Path, known: Callable[[str], torch.Tensor] | None = None
) -> Cluster:
    """Restore the cluster. ``known`` gives the constants by name; by default they are in the file."""
    parcel = pickle.loads(data)
    assert isinstance(parcel, _SerializedCluster), parcel
    # mapped, not read: weights are paged in at their first use
    tensors = torch.load(path, mmap=True, weights_only=True)
    bare = _decode(parcel, known or tensors["constants"].__getitem__)
    return replace(bare, samples=tensors["samples"], probes=tensors["probes"])


def decode_bare_cluster(data: bytes, known: Mapping[str, torch.Tensor], live: bool) -> Cluster:
    """Restore the cluster with the constants ``known``, and without samples and probes."""
    parcel = pickle.loads(data)
    assert isinstance(parcel, _SerializedCluster), parcel
    return replace(_decode(parcel, known.__getitem__), live=live)


def _decode(parcel: _SerializedCluster, known: Callable[[str], torch.Tensor]) -> Cluster:
    root = torch.nn.Module()
    for name in dict.fromkeys(str(c.target) for c in parcel.calls if c.op == "get_attr"):
        root.register_buffer(name, known(name))
    gm, shape_env = _decode_graph(parcel, root)
    return Cluster(
        name=parcel.name,
        gm=gm,
        shape_env=shape_env,
        inputs=parcel.inputs,
        ops=parcel.ops,
        updates=parcel.updates,
        traced=parcel.traced,
    )


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a view of a larger tensor, which would be saved as a whole."""
    tensor = tensor.detach()
    small = tensor.untyped_storage().nbytes() <= 2 * tensor.numel() * tensor.element_size()
    return tensor if small else tensor.clone()


def _example(fake: torch.Tensor) -> _SerializedInput:
    return _SerializedInput(
        dtype=fake.dtype,
        device=fake.device,
        shape=tuple(_hint(n) for n in fake.shape),
        stride=tuple(_hint(n) for n in fake.stride()),
        dynamic=tuple(isinstance(n, torch.SymInt) for n in fake.shape),
    )


def _hint(size: int | torch.SymInt) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def _decode_graph(
    parcel: _SerializedCluster, root: torch.nn.Module
) -> tuple[torch.fx.GraphModule, ShapeEnv]:
    env = UnspecializedShapeEnv()
    mode = UnspecializedFakeMode(env)
    graph = torch.fx.Graph()
    nodes: dict[str, torch.fx.Node] = {}
    inputs = iter(parcel.examples)
    oblivious = oblivious_to_sizes()
    with oblivious, torch.no_grad():
        for call in parcel.calls:
            node = nodes[call.name] = decode_node(call, graph, nodes)
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


def _fake_input(mode: UnspecializedFakeMode, name: str, like: _SerializedInput) -> torch.Tensor:
    real = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device)
    dims = [DimDynamic.DYNAMIC if free else DimDynamic.STATIC for free in like.dynamic]
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=dims)
    return mode.from_tensor(real, source=ConstantSource(name), symbolic_context=context)


def _compute(mode: UnspecializedFakeMode, node: torch.fx.Node) -> Any:
    def value(argument: torch.fx.Node) -> Any:
        return argument.meta["val"]

    args: Sequence[Any] = torch.fx.map_arg(node.args, value)
    kwargs: dict[str, Any] = torch.fx.map_arg(node.kwargs, value)
    assert callable(node.target), node
    with mode, dispatched_in_python():
        return result_of(node.target, args, kwargs)
