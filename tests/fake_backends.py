# SPDX-License-Identifier: Apache-2.0
"""Backends that do what real ones only do on a bad day: refuse, raise, answer wrongly or slowly.

    with registered(Fake("fake", run=wrong_values)):
        optimized = blade.optimize(model, x, Config(optimization_pipeline="fake", timing=False))

A ``Fake`` runs its cluster's FX graph, so without a fault it is right (and not fast). With
``in_process=False`` it converts as third-party backends do, in a process apart; its faults are then
functions of a module, such as this one, and its engines carry what they compute in their payload.
"""

import copy
import ctypes
import functools
import gc
import itertools
import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sympy
import torch

from blade.backends import registry
from blade.config import Config
from blade.core.backend import Backend
from blade.core.cluster import Cluster, OpNode
from blade.core.reason import Code, Reason, Stage
from blade.errors import ConfigError, Refused

Tensors = Sequence[torch.Tensor]
# (outputs of the original, inputs, number of the call) -> what the engine answers
Fault = Callable[[list[torch.Tensor], Tensors, int], Tensors]
F = Callable[..., Any]


def produces(*codes: Code) -> Callable[[F], F]:
    """Marks a test as the one that produces ``codes``; test_reason_codes.py checks that all are claimed."""
    assert all(isinstance(code, Code) for code in codes)
    return lambda test: test


def nothing(*anything: object) -> None:
    """No fault."""


def right(outputs: list[torch.Tensor], inputs: Tensors, call: int) -> Tensors:
    return outputs


def wrong_values(outputs: list[torch.Tensor], inputs: Tensors, call: int) -> Tensors:
    return [o * 1.001 if o.is_floating_point() else ~o for o in outputs]


def puts_nan(outputs: list[torch.Tensor], inputs: Tensors, call: int) -> Tensors:
    outputs[0].flatten()[-1:].fill_(torch.nan)
    return outputs


def wrong_shape(outputs: list[torch.Tensor], inputs: Tensors, call: int) -> Tensors:
    return [o.unsqueeze(0) for o in outputs]


def wrong_dtype(outputs: list[torch.Tensor], inputs: Tensors, call: int) -> Tensors:
    return [o.double() for o in outputs]


def too_many(outputs: list[torch.Tensor], inputs: Tensors, call: int) -> Tensors:
    return [*outputs, outputs[0]]


def writes_its_input(outputs: list[torch.Tensor], inputs: Tensors, call: int) -> Tensors:
    inputs[0].zero_()
    return outputs


def raises(outputs: list[torch.Tensor], inputs: Tensors, call: int) -> Tensors:
    raise RuntimeError("the device caught fire")


def is_slow(outputs: list[torch.Tensor], inputs: Tensors, call: int) -> Tensors:
    time.sleep(0.05)
    return outputs


def runs_out_of_memory(outputs: list[torch.Tensor], inputs: Tensors, call: int) -> Tensors:
    raise torch.OutOfMemoryError("tried to allocate 64 GiB")


def runs_out_of_host_memory(outputs: list[torch.Tensor], inputs: Tensors, call: int) -> Tensors:
    raise MemoryError


def crashes(outputs: list[torch.Tensor], inputs: Tensors, call: int) -> Tensors:
    ctypes.string_at(0)
    raise AssertionError("this line is not reached")


class Gate:
    """A conversion that waits until it may go on."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, cluster: Any) -> None:
        self.reached.set()
        assert self.open.wait(300.0)


def fails_to_convert(cluster: Cluster) -> None:
    raise ValueError("no idea what to do with this")


def refuses_to_convert(cluster: Cluster) -> None:
    raise Refused(Code.UNSUPPORTED_DTYPE, "Not in this precision.")


def wants_another_config(cluster: Cluster) -> None:
    raise ConfigError("Config.enable_int8=True: this backend has no int8.")


def crashes_converting(cluster: Cluster) -> None:
    ctypes.string_at(0)


def aborts_converting(cluster: Cluster) -> None:
    sys.stderr.write("assertion failed: operand 3 is no tensor")
    sys.stderr.flush()
    os.abort()


def exits_converting(cluster: Cluster) -> None:
    sys.exit(3)


def meets_another_converting(cluster: Cluster) -> None:
    """Goes on once two conversions are here at the same time; raises if nobody comes."""
    folder = Path(os.environ["BLADE_CACHE_DIR"])
    (folder / f"meeting-{os.getpid()}").touch()
    for _ in range(600):
        if len(list(folder.glob("meeting-*"))) > 1:
            return
        time.sleep(0.1)
    raise TimeoutError("nobody else converts")


def hangs_converting(cluster: Cluster) -> None:
    time.sleep(600)


def fills_memory_converting(cluster: Cluster) -> None:
    bytearray(1 << 31)


class PythonEngine:
    """What ``torch.classes.blade.Engine`` looks like from Python, without the C++ runtime.

    ``declines`` names why a call goes to the original, ``None`` for one that is served.
    """

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        run: Fault = right,
        declines: Callable[[Tensors], Code | None] = lambda inputs: None,
        unavailable: str = "",
    ) -> None:
        self._run, self._declines, self._unavailable = run, declines, unavailable
        self._compute = torch.fx.Interpreter(gm)
        self._stats: dict[str, int] = {"calls": 0}
        self._error = ""

    def try_execute(self, inputs: list[torch.Tensor]) -> list[torch.Tensor] | None:
        self._count("calls")
        if (code := self._declines(inputs)) is not None:
            self._count(code.value)
            return None
        try:
            outputs = list(self._compute.run(*inputs))
            answer = list(self._run(outputs, inputs, self._stats["calls"]))
        except RuntimeError as error:
            self._error = str(error)
            self._count(Code.ENGINE_RAISED.value)
            return None
        self._count("engine_runs")
        return answer

    def stats(self) -> dict[str, int]:
        return dict(self._stats)

    def rearm(self) -> None: ...

    def trim(self) -> None: ...

    def backend(self) -> str:
        return "python"

    def last_error(self) -> str:
        return self._error

    def why_unavailable(self) -> str:
        return self._unavailable

    def _count(self, what: str) -> None:
        self._stats[what] = self._stats.get(what, 0) + 1


class Fake(Backend):
    """A backend with faults on request.

    ``refuses``: kinds it says no to in ``why_not``. ``chokes_on``: kinds at which ``convert`` raises.
    ``spoils``: kinds whose presence in a cluster makes ``convert`` and ``run`` faulty; by default
    they always are. ``even_only``: the engine's guard wants an even first size of its first input.
    """

    # attributes of the class, so that those of an instance may differ
    precisions: Collection[str] = ()
    reduced_precision_with: Collection[str] = ()
    version: str | None = None

    def __init__(
        self,
        name: str = "fake",
        *,
        unavailable: str | None = None,
        refuses: Sequence[str] = (),
        chokes_on: Sequence[str] = (),
        spoils: Sequence[str] | None = None,
        convert: Callable[[Cluster], None] = nothing,
        run: Fault = right,
        even_only: bool = False,
        load: Callable[[], None] = nothing,
        in_process: bool = True,
        reduced_precision: bool = False,
        estimate_s: float | None = None,
        version: str | None = None,
    ) -> None:
        self.name, self.in_process = name, in_process
        self.reduced_precision = reduced_precision
        self.version = version
        if estimate_s is not None:
            self.estimate_s = functools.partial(_takes, estimate_s)  # type: ignore[method-assign]
        self.unavailable = unavailable
        self.refuses, self.chokes_on, self.spoils = refuses, chokes_on, spoils
        self.on_convert, self.run, self.on_load = convert, run, load
        self.even_only = even_only
        self.converted: list[tuple[str, ...]] = []
        self._kept: dict[bytes, tuple[torch.fx.GraphModule, Fault]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For the process that converts: what was converted here stays here."""
        return {**self.__dict__, "converted": [], "_kept": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.register()

    def why_unavailable(self) -> str | None:
        return self.unavailable

    def why_not(self, node: OpNode, config: Config) -> Reason | None:
        kind = node.target._schema.name
        if kind not in self.refuses:
            return None
        detail = f"{self.name} does not take {kind}."
        return Reason(Stage.SUPPORT, Code.UNSUPPORTED_OP, self.name, node.name, detail)

    def convert(self, cluster: Cluster, config: Config) -> torch.ScriptObject:
        from blade.runtime.engine import make_engine

        kinds = [_kind(node) for node in cluster.gm.graph.nodes]
        self.converted.append(tuple(kind for kind in kinds if kind))
        for kind in self.chokes_on:
            if kind in kinds:
                raise ValueError(f"no idea what to do with {kind}")
        spoiled = self.spoils is None or any(kind in kinds for kind in self.spoils)
        if spoiled:
            self.on_convert(cluster)
        fault = self.run if spoiled else right
        payload = self._keep(cluster.gm, fault) if self.in_process else _pack(cluster.gm, fault)
        self.register()
        limits = {"max_failures": config.max_failures}
        held = [getattr(cluster.gm, attribute) for attribute in _weights(cluster.gm)]
        return make_engine(
            cluster.name, self.name, _program(cluster, self.even_only), payload, held, limits
        )

    def register(self) -> None:
        """The runner, for which a package would have an entry point."""
        from blade.runtime.engine import register_runner

        register_runner(self.name, self._load)

    def _keep(self, gm: torch.fx.GraphModule, fault: Fault) -> bytes:
        """Graph and fault stay in this process; the payload is a key to them."""
        key = f"{self.name}-{next(_keys)}".encode()
        self._kept[key] = gm, fault
        return key

    def _load(
        self, name: str, payload: torch.Tensor, constants: list[torch.Tensor], program: str
    ) -> Callable[[list[torch.Tensor]], Tensors]:
        self.on_load()
        data = bytes(payload.numpy())
        gm, fault = self._kept[data] if data in self._kept else pickle.loads(data)
        for attribute, tensor in zip(_weights(gm), constants, strict=True):
            setattr(gm, attribute, tensor)
        calls = itertools.count()

        def run(inputs: list[torch.Tensor]) -> Tensors:
            return fault(list(gm(*inputs)), inputs, next(calls))  # from several threads at once

        return run


class Watched(Fake):
    """Knows which of the functions behind its engines are still there."""

    def __init__(self, name: str, **faults: Any) -> None:
        super().__init__(name, **faults)
        self.loaded: list[weakref.ref[Any]] = []

    def _load(
        self, name: str, payload: torch.Tensor, constants: list[torch.Tensor], program: str
    ) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
        made = super()._load(name, payload, constants, program)
        self.loaded.append(weakref.ref(made))
        return made

    def alive(self) -> int:
        gc.collect()
        return sum(one() is not None for one in self.loaded)


def _takes(seconds: float, cluster: Cluster) -> float:
    return seconds


_keys = itertools.count()
_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
    torch.uint8: "u8",
}


def _program(cluster: Cluster, even_only: bool) -> str:
    """Guards and outputs, as FORMAT.md has them, for an engine that is a Python function."""
    from blade.program.registers import Registers

    registers = Registers()
    for i, node in enumerate(n for n in cluster.gm.graph.nodes if n.op == "placeholder"):
        for axis, size in enumerate(map(_size, node.meta["val"].shape)):
            register = registers.dim(i, axis)
            if isinstance(size, sympy.Symbol) and not registers.is_bound(size):
                registers.bind(size, register)
    guards = []
    if even_only:
        two, zero = registers.of(2), registers.of(0)
        rest = registers.compare("mod", registers.dim(0, 0), two)
        guards.append(f"guard {registers.compare('eq', rest, zero)} the first size is even")
    slots = []
    for i, node in enumerate(cluster.gm.graph.output_node().args[0]):
        value = node.meta["val"]
        sizes = [registers.of(_size(n)) for n in value.shape]
        text = ("slot", i, "output", _DTYPES[value.dtype], len(sizes), *sizes)
        slots.append(" ".join(map(str, text)))
    inputs = [f"input {i} {_DTYPES[v.dtype]} cpu {v.rank}" for i, v in enumerate(cluster.inputs)]
    lines = ["blade.disc 1", "isa", f"inputs {len(inputs)}", *inputs]
    lines += [f"registers {len(registers.lines)}"]
    lines += [f"reg {i} {text}" for i, text in enumerate(registers.lines)]
    lines += [f"guards {len(guards)}", *guards, f"slots {len(slots)}", *slots, "instructions 0"]
    lines += [" ".join(["outputs", str(len(slots)), *map(str, range(len(slots)))]), "end"]
    return "\n".join(lines) + "\n"


def _size(size: int | torch.SymInt) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _weights(gm: torch.fx.GraphModule) -> list[str]:
    return list(dict.fromkeys(str(n.target) for n in gm.graph.nodes if n.op == "get_attr"))


def _pack(gm: torch.fx.GraphModule, fault: Fault) -> bytes:
    """Without the weights, which travel as the engine's constants."""
    empty = {attribute: torch.empty(0) for attribute in _weights(gm)}
    plain = torch.fx.GraphModule(empty, copy.deepcopy(gm.graph))
    for node in plain.graph.nodes:
        node.meta.clear()
    return pickle.dumps((plain, fault))


def _kind(node: torch.fx.Node) -> str:
    return str(node.target._schema.name) if isinstance(node.target, torch._ops.OpOverload) else ""


@contextmanager
def registered(*backends: Fake) -> Iterator[None]:
    """``backends`` are known to the registry inside the block."""
    for backend in backends:
        registry.register(backend)
        if not backend.in_process:
            backend.register()
    try:
        yield
    finally:
        for backend in backends:
            registry.unregister(backend.name)
