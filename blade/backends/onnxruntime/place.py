# SPDX-License-Identifier: Apache-2.0
"""Where ONNX Runtime computes: on threads of the CPU, or on a stream of a CUDA device.

    place = place_of(inputs)
    session = ort.InferenceSession(model, options(place), providers=providers(place))
    session.run_with_iobinding(binding, run_options(place))

A session belongs to one place, since its threads and its stream are settled when it is made.
What concerns CUDA has run with a stand-in for the library only, never on a GPU.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

_LEGACY_STREAM = 1
"""``cudaStreamLegacy`` names the default stream, whose own handle, 0, the library takes for "none given"."""


class Place(NamedTuple):
    """``threads`` of the CPU; on a CUDA device also its index and the ``stream`` of torch that work is put on."""

    threads: int
    gpu: int | None = None
    stream: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.gpu is None else torch.device("cuda", self.gpu)


def place_of(tensors: Iterable[torch.Tensor]) -> Place:
    """That of the calling thread; the GPU is that of the first tensor on one, and torch's current stream there."""
    threads = torch.get_num_threads()
    for tensor in tensors:
        if tensor.is_cuda:
            stream = torch.cuda.current_stream(tensor.device).cuda_stream
            return Place(threads, tensor.device.index, stream or _LEGACY_STREAM)
    return Place(threads)


def providers(place: Place) -> list[Any]:
    """What a session of ``place`` computes with: the first one that has a kernel for an op."""
    if place.gpu is None:
        return [CPU]
    settings = {
        "device_id": str(place.gpu),
        "user_compute_stream": str(place.stream),
        "do_copy_in_default_stream": "1",  # copies keep their order with the kernels
        "use_tf32": "0",  # fp32 is what is verified
    }
    return [(CUDA, settings), CPU]


def options(place: Place) -> Any:
    """Threads spin during a call, from one op to the next, and sleep between calls: if they went on spinning
    they would take the cores from torch's own, and if they always slept each op would wait for them to wake."""
    import onnxruntime as ort

    made = ort.SessionOptions()
    made.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    made.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    made.intra_op_num_threads = place.threads
    made.inter_op_num_threads = 1
    made.log_severity_level = 4  # what fails is raised
    made.enable_mem_pattern = False  # one is kept for every set of sizes ever seen
    made.add_session_config_entry("session.force_spinning_stop", "1")
    return made


def run_options(place: Place) -> Any | None:
    """On a GPU a call only puts its work on the stream, as torch's own ops do."""
    return None if place.gpu is None else _without_waiting()


@lru_cache(maxsize=1)
def _without_waiting() -> Any:
    import onnxruntime as ort

    made = ort.RunOptions()
    made.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return made


@lru_cache(maxsize=1)
def has_cuda() -> bool:
    """Whether the library that is installed has kernels for CUDA; imports it."""
    try:
        import onnxruntime as ort

        return CUDA in ort.get_available_providers()
    except (ImportError, OSError, AttributeError):
        return False
