# SPDX-License-Identifier: Apache-2.0
"""Stands in for the part of TensorRT's Python API that needs a GPU: runtime, engine, context, refitter.

What is faked: "device memory" is the host's, a plan is the name of a Python function on tensors, and
``execute_async_v3`` computes before it returns. What is kept, from NVIDIA's API documentation: the order in
which calls have to come, what each refuses, what is per context and what per engine, that one context may not be
used by two threads at once, and that memory is known by its address alone. Nothing here says anything
about NVIDIA's own code; the real library's builder and parser are tested by the other files of this folder.
"""

import ctypes
import enum
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

Function = Callable[..., Sequence[torch.Tensor]]
FUNCTIONS: dict[str, Function] = {}
ALIGNMENT = 1  # of real devices: 256

__version__ = "99.1.2"


class Severity(enum.Enum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class ILogger:
    Severity = Severity

    def __init__(self) -> None:
        self.constructed = True  # real ones crash if a subclass forgets the base class


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    INT64 = 8
    BF16 = 7


class TensorIOMode(enum.Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


TORCH = {
    DataType.FLOAT: torch.float32,
    DataType.HALF: torch.float16,
    DataType.BF16: torch.bfloat16,
    DataType.INT32: torch.int32,
    DataType.INT64: torch.int64,
    DataType.BOOL: torch.bool,
}


def make_plan(
    function: str,
    inputs: Sequence[tuple[str, str, Sequence[Sequence[Sequence[int]]]]],
    outputs: Sequence[tuple[str, str]],
    weights: Sequence[str] = (),
    version: str = __version__,
) -> bytes:
    """``inputs``: (name, dtype, per profile [min, opt, max]); ``outputs``: (name, dtype)."""
    fields = ("function", "inputs", "outputs", "weights", "version")
    values = (function, inputs, outputs, weights, version)
    return json.dumps(dict(zip(fields, values, strict=True))).encode()


class Runtime:
    """``unsupported``: what TensorRT-RTX says on a device it does not run on."""

    unsupported: str | None = None

    def __init__(self, logger: ILogger) -> None:
        assert logger.constructed
        self.logger = logger

    def deserialize_cuda_engine(self, plan: bytes) -> "Engine | None":
        why = self.unsupported
        try:
            content = json.loads(plan)
        except ValueError:
            why = "the plan is damaged"
        if why is not None:
            self.logger.log(Severity.ERROR, why)
            return None
        return Engine(content, self.logger)


class Engine:
    """``ICudaEngine``: read by any number of threads."""

    device_memory_size_v2 = 4096

    def __init__(self, content: dict[str, Any], logger: ILogger) -> None:
        self.content, self.logger = content, logger
        self.weights: dict[str, torch.Tensor] = {}
        self.contexts: list[Context] = []
        self.tensors = [(n, d, TensorIOMode.INPUT) for n, d, _ in content["inputs"]]
        self.tensors += [(n, d, TensorIOMode.OUTPUT) for n, d in content["outputs"]]

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.content["inputs"][0][2])

    def get_tensor_name(self, index: int) -> str:
        return self.tensors[index][0]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return self._find(name)[2]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self._find(name)[1]]

    def is_shape_inference_io(self, name: str) -> bool:
        return False

    def create_execution_context(
        self,
        strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC,
    ) -> "Context":
        assert set(self.weights) == set(self.content["weights"]), "not refitted"
        made = Context(self, strategy)
        self.contexts.append(made)
        return made

    def _find(self, name: str) -> tuple[str, str, TensorIOMode]:
        return next(one for one in self.tensors if one[0] == name)


class Context:
    """``IExecutionContext``: of one thread at a time, which it checks."""

    def __init__(self, engine: Engine, strategy: ExecutionContextAllocationStrategy) -> None:
        self.engine, self.strategy = engine, strategy
        self.profile: int | None = None
        self.memory: tuple[int, int] | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.streams: list[int] = []
        self.threads: set[int] = set()
        self._in_use = threading.Lock()

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        if not 0 <= profile < self.engine.num_optimization_profiles:
            return False
        self.profile, self.shapes, self.addresses = (
            profile,
            {},
            {},
        )  # "invalidates all dynamic bindings"
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        assert self.strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        assert address and address % ALIGNMENT == 0 and size >= self.engine.device_memory_size_v2
        self.memory = address, size

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        _, _, profiles = next(one for one in self.engine.content["inputs"] if one[0] == name)
        assert self.profile is not None
        low, _, high = profiles[self.profile]
        inside = len(shape) == len(low) and all(a <= n <= b for a, n, b in zip(low, shape, high))
        if not inside:
            text = f"{name}: {list(shape)} is not in profile {self.profile}, {low} to {high}"
            self.engine.logger.log(Severity.ERROR, text)
            return False
        self.shapes[name] = tuple(shape)
        return True

    def infer_shapes(self) -> list[str]:
        return [n for n, _, _ in self.engine.content["inputs"] if n not in self.shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self.shapes:
            return self.shapes[name]
        if self.infer_shapes():
            return (-1,)
        empty = [
            torch.zeros(self.shapes[n], dtype=TORCH[DataType[d]]) for n, d, _ in self._inputs()
        ]
        results = self._function()(*empty, **self.engine.weights)
        names = [n for n, _ in self.engine.content["outputs"]]
        return tuple(results[names.index(name)].shape)

    def set_tensor_address(self, name: str, address: int) -> bool:
        if not address:
            return False
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert self._in_use.acquire(blocking=False), "one context, two threads"
        try:
            return self._execute(stream)
        finally:
            self._in_use.release()

    def _execute(self, stream: int) -> bool:
        names = [n for n, _, _ in self.engine.tensors]
        if self.infer_shapes() or self.memory is None or set(names) - set(self.addresses):
            self.engine.logger.log(Severity.ERROR, "a shape, an address or the memory is not set")
            return False
        self.streams.append(stream)
        self.threads.add(threading.get_ident())
        given = [_at(self.addresses[n], self.shapes[n], d) for n, d, _ in self._inputs()]
        results = self._function()(*given, **self.engine.weights)
        for (name, dtype), result in zip(self.engine.content["outputs"], results, strict=True):
            _at(self.addresses[name], tuple(result.shape), dtype).copy_(result)
        return True

    def _inputs(self) -> list[tuple[str, str, Any]]:
        found: list[tuple[str, str, Any]] = self.engine.content["inputs"]
        return found

    def _function(self) -> Function:
        return FUNCTIONS[self.engine.content["function"]]


class Refitter:
    def __init__(self, engine: Engine, logger: ILogger) -> None:
        self.engine, self.given = engine, dict[str, torch.Tensor]()

    def refit_cuda_engine(self) -> bool:
        if set(self.given) != set(self.engine.content["weights"]):
            return False  # get_missing_weights is not empty
        self.engine.weights = self.given
        return True


def as_graph(initializers: dict[str, tuple[str, list[int]]]) -> bytes:
    """An ONNX model without nodes, whose doc_string says what ``OnnxParserRefitter`` finds in it."""
    text = json.dumps(initializers).encode()
    assert len(text) < 128  # a length of one byte
    return b"\x32" + bytes([len(text)]) + text + b"\x3a\x00"


class OnnxParserRefitter:
    """Finds weights by the names of a graph's initializers; here these are JSON: name -> [dtype, shape]."""

    num_errors = 0

    def __init__(self, refitter: Refitter, logger: ILogger) -> None:
        self.refitter = refitter
        self.graph: dict[str, tuple[str, list[int]]] = {}
        self.held: dict[str, tuple[int, int]] = {}

    def load_model_proto(self, graph: bytes, path: str | None = None) -> bool:
        self.graph = json.loads(graph[2:-2])
        return True

    def load_initializer(self, name: str, address: int, size: int) -> bool:
        if name not in self.graph:
            return False
        self.held[name] = address, size
        return True

    def refit_model_proto(self) -> bool:
        for name, (address, size) in self.held.items():
            dtype, shape = self.graph[name]
            weight = _at(address, tuple(shape), dtype).clone()
            if weight.nbytes != size:
                return False
            self.refitter.given[name] = weight
        return True


def _at(address: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """The tensor whose elements lie at ``address``, row by row."""
    kind = TORCH[DataType[dtype]]
    empty = torch.empty(shape, dtype=kind)
    if not empty.numel():
        return empty
    memory = (ctypes.c_uint8 * empty.nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=kind).reshape(shape)
