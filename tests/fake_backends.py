# SPDX-License-Identifier: Apache-2.0
"""Backends that do what real ones only do on a bad day: refuse, raise, answer wrongly or slowly.

    with registered(Fake("fake", run=wrong_values)):
        optimized = blade.optimize(model, x, Config(optimization_pipeline="fake", timing=False))

A ``Fake`` interprets its cluster's FX graph, so without a fault it is right (and not fast).
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from blade.backends import registry
from blade.backends.base import Cluster, OpNode
from blade.config import Config
from blade.reason import Code, Reason, Stage

Tensors = Sequence[torch.Tensor]
# (outputs of the original, inputs, number of the call) -> what the engine answers
Fault = Callable[[list[torch.Tensor], Tensors, int], Tensors]
F = Callable[..., Any]


def produces(*codes: Code) -> Callable[[F], F]:
    """Marks a test as the one that produces ``codes``; test_reason_codes.py checks that all are claimed."""
    assert all(isinstance(code, Code) for code in codes)
    return lambda test: test


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

    def last_error(self) -> str:
        return self._error

    def why_unavailable(self) -> str:
        return self._unavailable

    def _count(self, what: str) -> None:
        self._stats[what] = self._stats.get(what, 0) + 1


class Fake:
    """A backend with faults on request.

    ``refuses``: kinds it says no to in ``why_not``. ``chokes_on``: kinds at which ``convert`` raises.
    ``spoils``: kinds whose presence in a cluster makes the engine answer with ``run``; by default
    it always does. ``guard``: lines of the engine's program after its inputs (see FORMAT.md).
    """

    def __init__(
        self,
        name: str = "fake",
        *,
        unavailable: str | None = None,
        refuses: Sequence[str] = (),
        chokes_on: Sequence[str] = (),
        spoils: Sequence[str] | None = None,
        convert: Callable[[Cluster], None] = lambda cluster: None,
        run: Fault = right,
        guard: str = "registers 0\nguards 0",
        load: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.unavailable = unavailable
        self.refuses, self.chokes_on, self.spoils = refuses, chokes_on, spoils
        self.on_convert, self.run, self.guard, self.on_load = convert, run, guard, load
        self.converted: list[tuple[str, ...]] = []
        self._graphs: dict[bytes, torch.fx.GraphModule] = {}
        self._faults: dict[bytes, Fault] = {}

    def why_unavailable(self) -> str | None:
        return self.unavailable

    def why_not(self, node: OpNode, config: Config) -> Reason | None:
        kind = node.target._schema.name
        if kind not in self.refuses:
            return None
        detail = f"{self.name} does not take {kind}."
        return Reason(Stage.SUPPORT, Code.UNSUPPORTED_OP, self.name, node.name, detail)

    def convert(self, cluster: Cluster, config: Config) -> torch.ScriptObject:
        from blade.runtime.engine import make_engine, register_runner

        kinds = [_kind(node) for node in cluster.gm.graph.nodes]
        self.converted.append(tuple(kind for kind in kinds if kind))
        for kind in self.chokes_on:
            if kind in kinds:
                raise ValueError(f"no idea what to do with {kind}")
        self.on_convert(cluster)
        key = f"{self.name}-{next(_keys)}".encode()
        self._graphs[key] = cluster.gm
        spoiled = self.spoils is None or any(kind in kinds for kind in self.spoils)
        self._faults[key] = self.run if spoiled else right
        register_runner(self.name, self._load)
        limits = {"max_failures": config.max_failures}
        return make_engine(cluster.name, self.name, self._program(cluster), key, (), limits)

    def _program(self, cluster: Cluster) -> str:
        inputs = [
            f"input {i} {_DTYPES[v.dtype]} cpu {v.rank}" for i, v in enumerate(cluster.inputs)
        ]
        head = ["blade.disc 1", "isa", f"inputs {len(inputs)}", *inputs, self.guard]
        return "\n".join([*head, "slots 0", "instructions 0", "outputs 0", "end"]) + "\n"

    def _load(
        self, name: str, payload: torch.Tensor, constants: list[torch.Tensor], program: str
    ) -> Callable[[list[torch.Tensor]], Tensors]:
        self.on_load()
        key = bytes(payload.tolist())
        compute = torch.fx.Interpreter(self._graphs[key])
        fault, calls = self._faults[key], itertools.count()

        def run(inputs: list[torch.Tensor]) -> Tensors:
            return fault(list(compute.run(*inputs)), inputs, next(calls))

        return run


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


def _kind(node: torch.fx.Node) -> str:
    return str(node.target._schema.name) if isinstance(node.target, torch._ops.OpOverload) else ""


@contextmanager
def registered(*backends: Fake) -> Iterator[None]:
    """``backends`` are known to the registry inside the block."""
    for backend in backends:
        registry.register(backend)
    try:
        yield
    finally:
        for backend in backends:
            registry.unregister(backend.name)
