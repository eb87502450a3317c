# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime as a backend: nodes the exporter translates, a cluster as an ONNX model."""

import torch

from blade.backends.base import Cluster, OpNode
from blade.backends.onnxruntime import session
from blade.backends.onnxruntime.place import has_cuda
from blade.backends.onnxruntime.session import LIBRARY
from blade.config import Config
from blade.errors import Refused
from blade.exchange.onnx_engine import engine_version, onnx_engine
from blade.exchange.onnx_model import (
    INLINE_BYTES,
    OnnxModel,
    export_seconds,
    external_weights,
    why_no_onnx,
)
from blade.exchange.onnx_support import why_not_onnx
from blade.reason import Code, Reason
from blade.runtime.engine import register_runner

NAME = LIBRARY.name
DTYPES = (
    torch.float32,
    torch.int64,
    torch.int32,
    torch.bool,
)  # those that its CPU kernels have in common


class OnnxRuntimeBackend:
    """Through ``torch.onnx``, on the CPU, and on a GPU where the library has kernels for it.

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
"""By device, the model as ``session`` wants it."""


def _device_of(cluster: Cluster) -> torch.device:
    """The one that everything that goes in and comes out is on; raises ``Refused`` for several."""
    graph = cluster.gm.graph
    given = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
    held = [n.meta["val"] for n in graph.nodes if n.op == "get_attr"]
    large = [
        t for t in held if t.numel() * t.element_size() > INLINE_BYTES
    ]  # small ones are in the model
    returned = [n.meta["val"] for n in graph.output_node().all_input_nodes]
    devices = {value.device for value in (*given, *large, *returned)}
    if len(devices) > 1:
        names = " and ".join(sorted(map(str, devices)))
        raise Refused(Code.UNSUPPORTED_DEVICE, f"One engine does not compute on {names}.")
    return devices.pop() if devices else torch.device("cpu")


register_runner(NAME, session.load)
