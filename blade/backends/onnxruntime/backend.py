# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime as a backend: nodes that the exporter translates, clusters as ONNX models."""

import torch

from blade.backends.onnxruntime.device import has_cuda
from blade.backends.onnxruntime.library import LIBRARY
from blade.backends.shared.onnx.engine import engine_version, onnx_engine
from blade.backends.shared.onnx.model import (
    INLINE_BYTES,
    OnnxModel,
    export_seconds,
    external_weights,
    why_no_onnx,
)
from blade.backends.shared.onnx.support import why_not_onnx
from blade.config import Config
from blade.core.backend import Backend
from blade.core.cluster import Cluster, OpNode
from blade.core.reason import Code, Reason
from blade.errors import Refused

NAME = LIBRARY.name
DTYPES = (
    torch.float32,
    torch.int64,
    torch.int32,
    torch.bool,
)  # dtypes that all of its CPU kernels support


class OnnxRuntimeBackend(Backend):
    """ONNX Runtime, through ``torch.onnx``, on the CPU, and on a GPU if the library has kernels for it.

    Weights stay in torch's memory and in the engine's constants.
    """

    name = NAME

    @property
    def version(self) -> str:
        return engine_version(LIBRARY)

    def why_unavailable(self) -> str | None:
        return LIBRARY.why_not_loadable() or why_no_onnx()

    def why_not(self, node: OpNode, config: Config) -> Reason | None:
        return why_not_onnx(node, NAME, DTYPES, _is_served)

    def estimate_s(self, cluster: Cluster) -> float:
        return export_seconds(cluster)

    def convert(self, cluster: Cluster, config: Config) -> torch.ScriptObject:
        device = _device_of(cluster)
        return onnx_engine(cluster, config, LIBRARY, _FORMS[device.type], device=device.type)


def _is_served(device: torch.device) -> bool:
    return device.type == "cpu" or (device.type == "cuda" and has_cuda())


def _weights_as_inputs(model: OnnxModel) -> bytes:
    return model.data


_FORMS = {"cpu": external_weights, "cuda": _weights_as_inputs}
"""Device type -> the model in the form that ``session`` needs."""


def _device_of(cluster: Cluster) -> torch.device:
    """The device of all inputs and outputs; raises ``Refused`` if there are several."""
    graph = cluster.gm.graph
    given = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
    held = [n.meta["val"] for n in graph.nodes if n.op == "get_attr"]
    large = [
        t for t in held if t.numel() * t.element_size() > INLINE_BYTES
    ]  # small constants are in the model
    returned = [n.meta["val"] for n in graph.output_node().all_input_nodes]
    devices = {value.device for value in (*given, *large, *returned)}
    if len(devices) > 1:
        names = " and ".join(sorted(map(str, devices)))
        raise Refused(Code.UNSUPPORTED_DEVICE, f"One engine does not compute on {names}.")
    return devices.pop() if devices else torch.device("cpu")
