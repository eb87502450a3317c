# SPDX-License-Identifier: Apache-2.0
"""A compiled graph as bytes, for another process: engines, originals, and no weights that the caller has.

data = save_graph(compiled, bound={0: weight})    # inputs that the engines hold as constants
loaded = LoadedGraph(data)                        # elsewhere: nothing is captured or converted
loaded(weight, x)                                 # binds the engines to this weight

The form is a pickle whose tensors are references: to an input that the graph is bound to, or into a list of
own tensors. So the engines of an inference graph take the weights of the model that it is called with, and
a file holds none of them. Engines that the first call has selected are saved alone; without a call before
they compete at the first call after loading. Unpickling executes code, as ``torch.compiler`` does with the file
around it.
"""

import hashlib
import io
import os
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from blade.dynamo.cluster_module import FirstCall, FxClusterModule
from blade.dynamo.live_graphs import track
from blade.errors import InputError
from blade.graph.fx.calls import SerializedCall, decode_node, encode_node
from blade.runtime.engine import Engine, make_engine

if TYPE_CHECKING:
    from blade.config import Config
    from blade.core.cluster import Cluster
    from blade.report import Report

MOST_BINDINGS = 4
"""Instances of a model that a loaded graph serves at a time; the least recently used one is bound again."""
_MAGIC = b"blade-graph-1\n"
_ENGINE = "__torch__.torch.classes.blade.Engine"
Place = tuple[torch.dtype, torch.device, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class _LoadedCut:
    """What ``FxClusterModule`` needs of a cluster."""

    name: str
    fallback: GraphModule
    num_tensors: int
    orders: Mapping[int, tuple[int, ...]]
    live: bool
    cluster: "Cluster | None"


@dataclass(frozen=True)
class _Unproven:
    """How engines compete after loading: the cluster without its constants, these, and the rules."""

    cluster: bytes
    constants: Mapping[str, torch.Tensor]
    config: "Config"
    derived: bool


@dataclass(frozen=True)
class _SavedCluster:
    """``unproven`` is ``None`` if the engine was selected before it was saved."""

    name: str
    fallback: GraphModule
    num_tensors: int
    orders: Mapping[int, tuple[int, ...]]
    live: bool
    lent: tuple[int, ...]
    engines: Mapping[str, torch.ScriptObject]
    watched: tuple[str, ...]
    unproven: _Unproven | None


@dataclass(frozen=True)
class _SavedGraph:
    """``run``: the pickled graph. ``own``: its tensors, as ``torch.save`` writes them. ``places``: bound inputs.

    ``report`` is pickled apart, as reading it imports what no call needs.
    """

    name: str
    run: bytes
    own: bytes
    places: Mapping[int, Place]
    report: bytes


def save_graph(
    name: str, run: GraphModule, report: "Report", bound: Mapping[int, torch.Tensor]
) -> bytes:
    """The graph ``run``; ``bound`` are the tensors of the inputs that it holds as constants.

    Raises ``InputError`` if something in the graph cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _GraphPickler(file, bound)
    try:
        pickler.dump(run)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        raise InputError(f"the graph {name} cannot be saved: {error}") from error
    own = io.BytesIO()
    torch.save(pickler.own, own)
    places = {i: _place(tensor) for i, tensor in bound.items()}
    data = pickle.dumps(
        _SavedGraph(name, file.getvalue(), own.getvalue(), places, pickle.dumps(report))
    )
    return _MAGIC + hashlib.sha256(data).digest() + data


class LoadedGraph:
    """Has the inputs and outputs of the graph that was saved. Raises ``InputError`` if ``data`` is damaged."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._saved = saved = _read(data)
        self.name = saved.name
        self._own: list[torch.Tensor] = torch.load(io.BytesIO(saved.own), weights_only=True)
        self._lock = threading.Lock()
        self._by_pointers: OrderedDict[tuple[int, ...], GraphModule] = OrderedDict()
        self._last: tuple[tuple[int, ...], GraphModule] | None = None
        track(self)

    def __call__(self, *args: Any) -> Any:
        pointers = tuple(args[i].data_ptr() for i in self._saved.places)
        last = self._last
        run = last[1] if last is not None and last[0] == pointers else self._of(pointers, args)
        return run.forward(*args)

    def save(self) -> bytes:
        """The bytes it was loaded from."""
        return self.data

    def engines(self) -> Mapping[str, Engine]:
        """The engine of each cluster that has one, of the model that was called last."""
        last = self._last
        served = [] if last is None else [m for m in last[1].children() if _is_served(m)]
        return {one.name: one.engine() for one in cast(Any, served)}

    def report(self) -> "Report":
        """The report as of when the graph was saved."""
        found: Report = pickle.loads(self._saved.report)
        return found

    def _of(self, pointers: tuple[int, ...], args: Sequence[Any]) -> GraphModule:
        with self._lock:
            run = self._by_pointers.get(pointers)
            if run is None:
                run = self._bind(args)
                self._by_pointers[pointers] = run
                if len(self._by_pointers) > MOST_BINDINGS:
                    self._by_pointers.popitem(last=False)
            self._by_pointers.move_to_end(pointers)
            self._last = pointers, run
            return run

    def _bind(self, args: Sequence[Any]) -> GraphModule:
        bound = {i: args[i].detach() for i in self._saved.places}
        for i, tensor in bound.items():
            if (got := _place(tensor)) != (want := self._saved.places[i]):
                raise InputError(
                    f"{self.name}: input {i} was a constant of the form {want} when this was compiled, and is "
                    f"{got} now. Call it with the model it was compiled from, or compile it again."
                )
        unpickler = _GraphUnpickler(io.BytesIO(self._saved.run), bound, self._own)
        # engines are made of real tensors, and remain after this call
        with torch.inference_mode(False), torch.no_grad():
            run = unpickler.load()
        assert isinstance(run, GraphModule), run
        return run


def _read(data: bytes) -> _SavedGraph:
    head = len(_MAGIC) + hashlib.sha256().digest_size
    body = data[head:]
    if not data.startswith(_MAGIC):
        raise InputError(
            "this is no graph of blade's, or one of another version: compile it again."
        )
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : head]:
        raise InputError("the saved graph does not match its checksum: the file is damaged.")
    saved = pickle.loads(body)
    assert isinstance(saved, _SavedGraph), saved
    return saved


def _is_served(module: torch.nn.Module) -> bool:
    return isinstance(module, FxClusterModule)


def _place(tensor: torch.Tensor) -> Place:
    return tensor.dtype, tensor.device, tuple(tensor.shape), tuple(tensor.stride())


class _GraphPickler(pickle.Pickler):
    """Writes references for tensors; ``own`` are those that are not of ``bound``."""

    def __init__(self, file: io.BytesIO, bound: Mapping[int, torch.Tensor]) -> None:
        super().__init__(file)
        self.own: list[torch.Tensor] = []
        self._numbers: dict[Any, int] = {}
        self._bound: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for i, tensor in bound.items():
            self._bound.setdefault(_memory(tensor), []).append((i, tensor))

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        tensor = obj.detach()  # without attributes, such as a loaded runner
        if tensor.layout is not torch.strided or not tensor.numel():
            return self._own_tensor(len(self.own), tensor)
        if (memory := _memory(tensor)) not in self._bound:
            return self._own_tensor((memory, _place(tensor), tensor.storage_offset()), tensor)
        for i, whole in self._bound[memory]:
            start = tensor.storage_offset() - whole.storage_offset()
            last = start + _reach(tensor)
            if whole.dtype == tensor.dtype and start >= 0 and last <= _reach(whole):
                return "input", i, tuple(tensor.shape), tensor.stride(), start
        raise pickle.PicklingError("a constant shares memory with a parameter in another way")

    def _own_tensor(self, key: Any, tensor: torch.Tensor) -> tuple[str, int]:
        if key not in self._numbers:
            self._numbers[key] = len(self.own)
            self.own.append(tensor)
        return "own", self._numbers[key]

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FxClusterModule):
            return _load_cluster, (_saved_cluster(obj),)
        if isinstance(obj, GraphModule):
            return _load_graph, _take_apart(obj)
        if isinstance(obj, torch.ScriptObject) and obj._type().qualified_name() == _ENGINE:
            return _load_engine, _engine_parts(obj)
        return NotImplemented


class _GraphUnpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, bound: Mapping[int, torch.Tensor], own: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(file)
        self._bound, self._own = bound, own

    def persistent_load(self, pid: Any) -> Any:
        kind, number, *layout = pid
        if kind == "own":
            return self._own[number]
        tensor = self._bound[number]
        shape, stride, start = layout
        if (tuple(tensor.shape), tensor.stride(), 0) == (shape, stride, start):
            return tensor
        return tensor.as_strided(shape, stride, tensor.storage_offset() + start)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _reach(tensor: torch.Tensor) -> int:
    """Elements from the first to the last in memory."""
    return sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _take_apart(gm: GraphModule) -> tuple[tuple[SerializedCall, ...], dict[str, Any]]:
    nodes = list(gm.graph.nodes)
    names = dict.fromkeys(str(n.target) for n in nodes if n.op in ("get_attr", "call_module"))
    return tuple(map(encode_node, nodes)), {name: attrgetter(name)(gm) for name in names}


def _load_graph(calls: Sequence[SerializedCall], attributes: dict[str, Any]) -> GraphModule:
    root = torch.nn.Module()
    for name, value in attributes.items():
        _attach(root, name, value)
    graph = Graph()
    nodes: dict[str, Node] = {}
    for call in calls:
        nodes[call.name] = decode_node(call, graph, nodes)
    return GraphModule(root, graph)


def _attach(root: torch.nn.Module, name: str, value: Any) -> None:
    """Make ``value`` the attribute ``name``, a path. The originals' constants are buffers."""
    *path, last = name.split(".")
    for step in path:
        if not hasattr(root, step):
            root.add_module(step, torch.nn.Module())
        root = cast(torch.nn.Module, getattr(root, step))
    if isinstance(value, torch.Tensor):
        root.register_buffer(last, value)
    else:
        setattr(root, last, value)


def _saved_cluster(served: FxClusterModule) -> _SavedCluster:
    cut, how = served.cut, served.first_call  # read first: it goes with the first call
    engines, cluster = served.standing()
    unproven = None
    if cluster is not None:
        from blade.fallback.cluster_codec import constants_of, encode_cluster

        assert how is not None, cut.name
        unproven = _Unproven(
            encode_cluster(cluster), constants_of(cluster), how.config, how.derived
        )
    return _SavedCluster(
        name=cut.name,
        fallback=cut.fallback,
        num_tensors=cut.num_tensors,
        orders=dict(cut.orders),
        live=cut.live,
        lent=served.lent,
        engines=engines,
        watched=tuple(name for name in served.watched if name in engines),
        unproven=unproven,
    )


def _load_cluster(saved: _SavedCluster) -> torch.nn.Module:
    if not saved.engines:  # the original was faster
        return saved.fallback
    cluster, how = None if saved.unproven is None else _unproven(saved.unproven, saved.live), None
    cut = _LoadedCut(
        saved.name, saved.fallback, saved.num_tensors, saved.orders, saved.live, cluster
    )
    if saved.unproven is not None:
        from blade.timing.stopwatch import Stopwatch
        from blade.timing.time_budget import TimeBudget

        spent, config = Stopwatch(), saved.unproven.config
        budget = TimeBudget(config.time_budget, clock=spent)
        how = FirstCall(config, saved.unproven.derived, budget, spent)
    return FxClusterModule(cut, saved.engines, saved.watched, how, saved.lent)


def _unproven(saved: _Unproven, live: bool) -> "Cluster":
    from blade.fallback.cluster_codec import decode_bare_cluster

    return decode_bare_cluster(saved.cluster, saved.constants, live)


def _engine_parts(engine: Any) -> tuple[Any, ...]:
    _, words, numbers, tensors = engine._get_method("__getstate__")()
    limits = {name: value for name, value in numbers.items() if name != "checksum"}
    return (*words, limits, tensors)


def _load_engine(
    name: str,
    backend: str,
    program: str,
    signature: str,
    limits: Mapping[str, int],
    tensors: Sequence[torch.Tensor],
) -> torch.ScriptObject:
    payload, *constants = tensors
    made: Any = make_engine(name, backend, program, payload, constants, limits)
    if signature:
        cast(Engine, made).set_signature(signature)
    if os.environ.get("BLADE_ENGINES") or os.environ.get("BLADE_TRUSTED_KEYS"):
        # the runtime applies these rules to engines of files, not to those that this process makes
        method: Callable[[str], Any] = made._get_method
        method("__setstate__")(method("__getstate__")())
    return cast(torch.ScriptObject, made)
