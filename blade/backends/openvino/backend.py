# SPDX-License-Identifier: Apache-2.0
"""OpenVINO as a backend: nodes the exporter translates, a cluster as an ONNX model, on the CPU."""

import torch

from blade.backends.base import Cluster, OpNode
from blade.backends.openvino import session
from blade.backends.openvino.session import LIBRARY
from blade.config import Config
from blade.exchange.onnx_engine import engine_version, onnx_engine
from blade.exchange.onnx_model import export_seconds, why_no_onnx
from blade.exchange.onnx_support import why_not_onnx
from blade.reason import Reason
from blade.runtime.engine import register_runner

NAME = LIBRARY.name
DTYPES = (torch.float32, torch.int32, torch.bool)  # int64 is computed in int32 there, fp64 in fp32


class OpenVinoBackend:
    """Through ``torch.onnx``, on the CPU. Weights stay in torch's memory and in the engine's constants."""

    name = NAME

    @property
    def version(self) -> str:
        return engine_version(LIBRARY)

    def why_unavailable(self) -> str | None:
        return LIBRARY.why_not_loadable() or why_no_onnx()

    def why_not(self, node: OpNode, config: Config) -> Reason | None:
        return why_not_onnx(node, NAME, DTYPES)

    def estimate_s(self, cluster: Cluster) -> float:
        return export_seconds(cluster)

    def convert(self, cluster: Cluster, config: Config) -> torch.ScriptObject:
        return onnx_engine(cluster, config, LIBRARY, lambda model: model.data)


register_runner(NAME, session.load)
