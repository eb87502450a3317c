# SPDX-License-Identifier: Apache-2.0
"""The contract between blade and a backend: three questions, one product.

A backend says whether it can work here at all (``why_unavailable``), which nodes it takes
(``why_not``) and turns a cluster of such nodes into an engine (``convert``). It receives the cluster
as FX over ATen ops with symbolic shapes; it never sees TorchScript.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from blade.config import Config
from blade.reason import Reason


@dataclass(frozen=True)
class ValueInfo:
    """What is known of one value from running the samples; ``None`` means unknown.

    ``shape`` is an example, the sizes at the first sample: other calls have other sizes. A ``constant`` tensor
    is one of the model's own. ``is_size``: a 0-d integer tensor that trace made of a size; it is made
    anew wherever it is needed, on the device of the op that needs it.
    """

    kind: str  # "tensor", "int", "float", "bool", "list", "str", "none", "other"
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    rank: int | None = None
    shape: tuple[int, ...] | None = field(default=None, compare=False)
    constant: bool = field(default=False, compare=False)
    is_size: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class OpNode:
    """One op of the captured graph, as a backend judges it.

    ``target`` is the ATen overload (``torch.ops.aten.add.Tensor``). ``args``/``kwargs`` are bound to
    the schema; a constant argument is its Python value, anything else is a ``ValueInfo`` (or a list
    of them).
    """

    name: str
    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[ValueInfo, ...]
    source: str = ""


def values_in(args: Any) -> Iterator[ValueInfo]:
    """The values among the arguments of an ``OpNode``, those in lists included; constants are not."""
    for arg in args:
        if isinstance(arg, ValueInfo):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from values_in(arg)


@dataclass(frozen=True)
class Cluster:
    """A convex group of ops, self-contained.

    ``gm`` takes one placeholder per entry of ``inputs`` (tensors, in this order) and returns a tuple
    of tensors. Constants are ``get_attr`` nodes over ``gm``'s attributes ``const_0`` ... that are the
    very tensors (no copy) the fallback uses. ``node.meta["val"]`` of every node holds a fake tensor, or a
    SymInt, made under ``shape_env``; ``shape_env.guards`` are the facts the shapes rely on.
    ``samples`` are real inputs, one tuple per sample of the user; ``probes`` the same for the shapes
    capture derived from them (all checked to run on the user's model). ``calibration`` are the inputs at further
    samples, of which only values are of interest: each time it is gone through, the model runs again.
    ``updates``: indices of inputs that are written to: the last results of ``gm`` are not returned but are the new
    contents of these, in order. Nodes of ``aten.copy_`` tell a backend of them.
    ``live``: the constants stay the caller's, who may write to them at any time, also behind autograd's back.
    """

    name: str
    gm: torch.fx.GraphModule
    shape_env: ShapeEnv
    inputs: tuple[ValueInfo, ...]
    ops: tuple[str, ...]
    samples: Sequence[tuple[torch.Tensor, ...]] = field(default=())
    probes: Sequence[tuple[torch.Tensor, ...]] = field(default=())
    calibration: Iterable[tuple[torch.Tensor, ...]] = field(default=())
    live: bool = False
    updates: tuple[int, ...] = ()


def device_of(cluster: Cluster) -> torch.device:
    """Where the cluster computes: all its ops are on one device."""
    for node in cluster.gm.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor):
            return value.device
    return torch.device("cpu")


class Backend(Protocol):
    """What a folder under ``blade/backends`` provides, one line in the registry.

    It is pickled into the process that converts, unless it has ``in_process = True``, which says that
    its conversions cannot hang or crash. The runner of its engines (``runtime.engine.register_runner``)
    is registered where its module is imported. ``survey(nodes, config)``, if it has it, is told all nodes of a
    graph before ``why_not`` is asked about each: for what a library answers about many ops at once. ``precisions``,
    if it has it, names the reduced precisions it can compute in ("fp16", "bf16", "int8"). ``version``, if it has it, is
    a text that differs wherever its engines for the same cluster and config may differ: then engines, verdicts and
    timings are kept on disk. ``estimate_s(cluster)``, if it has it, is about how many seconds a conversion takes:
    one that does not fit into the rest of ``Config.time_budget`` is not begun. ``lossy = True`` says that its
    engines answer less exactly than the original on purpose: it is used only where the config allows that, and
    verified against ``Config.accuracy_budget``. One that is exact unless it is permitted to be less names those
    permissions in ``lossy_with`` ("enable_fp16"). ``note``, if it has it, is what ``doctor`` tells of it besides.
    ``expect(device)``, if it has it, is told where a model is that will be captured, for what is slow to start.
    """

    name: str

    def why_unavailable(self) -> str | None:
        """``None`` where the backend works in this process, else a sentence with the fix."""

    def why_not(self, node: OpNode, config: Config) -> Reason | None:
        """``None`` if ``convert`` will take ``node``; reads the same table ``convert`` does."""

    def convert(self, cluster: Cluster, config: Config) -> torch.ScriptObject:
        """Compile ``cluster`` to a ``torch.classes.blade.Engine``; raises on failure."""
