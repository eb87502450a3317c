# SPDX-License-Identifier: Apache-2.0
"""The device of ONNX Runtime: threads of the CPU, or a stream of a CUDA device.

    place = ort_device_of(inputs)
    session = ort.InferenceSession(model, options(place), providers=providers(place))
    session.run_with_iobinding(binding, run_options(place))

A session belongs to one ``OrtDevice``, because its threads and its stream are fixed when it is made.
The CUDA part has been tested with a fake library only, never on a GPU.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from blade.backends.onnxruntime.library import LIBRARY

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

_LEGACY_STREAM = 1
"""``cudaStreamLegacy`` is the default stream. Its usual handle, 0, means "none given" to the library."""


class OrtDevice(NamedTuple):
    """``threads`` of the CPU; for a CUDA device also its index and torch's ``stream`` to enqueue on."""

    threads: int
    gpu: int | None = None
    stream: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.gpu is None else torch.device("cuda", self.gpu)


def ort_device_of(tensors: Iterable[torch.Tensor]) -> OrtDevice:
    """The device for a call of this thread: the GPU of the first tensor on one, with torch's current stream."""
    threads = torch.get_num_threads()
    for tensor in tensors:
        if tensor.is_cuda:
            stream = torch.cuda.current_stream(tensor.device).cuda_stream
            return OrtDevice(threads, tensor.device.index, stream or _LEGACY_STREAM)
    return OrtDevice(threads)


def providers(place: OrtDevice) -> list[Any]:
    """The execution providers of ``place``; the first one with a kernel for an op runs it."""
    if place.gpu is None:
        return [CPU]
    settings = {
        "device_id": str(place.gpu),
        "user_compute_stream": str(place.stream),
        "do_copy_in_default_stream": "1",  # copies stay in order with the kernels
        "use_tf32": "0",  # fp32 is verified
    }
    return [(CUDA, settings), CPU]


def options(place: OrtDevice) -> Any:
    """Session options. Threads spin between the ops of a call, since waking them would delay each op, and
    sleep between calls, since spinning would take cores from torch's threads."""
    ort: Any = LIBRARY.load()
    made = ort.SessionOptions()
    made.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    made.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    made.intra_op_num_threads = place.threads
    made.inter_op_num_threads = 1
    made.log_severity_level = 4  # errors are raised
    made.enable_mem_pattern = False  # the library would keep one per set of sizes
    made.add_session_config_entry("session.force_spinning_stop", "1")
    return made


def run_options(place: OrtDevice) -> Any | None:
    """Run options: on a GPU a call only enqueues its work on the stream, as torch's ops do."""
    return None if place.gpu is None else _without_waiting()


@lru_cache(maxsize=1)
def _without_waiting() -> Any:
    ort: Any = LIBRARY.load()
    made = ort.RunOptions()
    made.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return made


@lru_cache(maxsize=1)
def has_cuda() -> bool:
    """Whether the installed library has kernels for CUDA; imports it."""
    try:
        ort: Any = LIBRARY.load()
        return CUDA in ort.get_available_providers()
    except (ImportError, OSError, AttributeError):
        return False
