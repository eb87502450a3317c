# SPDX-License-Identifier: Apache-2.0
"""OpenVINO as a backend: nodes the exporter translates, a cluster as an ONNX model, on the CPU."""

from importlib.metadata import PackageNotFoundError

import torch

from blade.backends.base import Cluster, OpNode
from blade.backends.openvino import session
from blade.config import Config
from blade.exchange.onnx_engine import onnx_engine
from blade.exchange.onnx_model import export_seconds, exporter_version, why_no_onnx
from blade.exchange.onnx_support import why_not_onnx
from blade.reason import Reason
from blade.runtime.engine import register_runner

NAME = session.NAME
DTYPES = (torch.float32, torch.int32, torch.bool)  # int64 is computed in int32 there, fp64 in fp32


class OpenVinoBackend:
    """Through ``torch.onnx``, on the CPU. Weights stay in torch's memory and in the engine's constants."""

    name = NAME

    @property
    def version(self) -> str:
        try:
            return f"{NAME} {session.installed()}, {exporter_version()}"
        except PackageNotFoundError as missing:
            return f"without {missing}"

    def why_unavailable(self) -> str | None:
        return session.why_not_loadable() or why_no_onnx()

    def why_not(self, node: OpNode, config: Config) -> Reason | None:
        return why_not_onnx(node, NAME, DTYPES)

    def estimate_s(self, cluster: Cluster) -> float:
        return export_seconds(cluster)

    def convert(self, cluster: Cluster, config: Config) -> torch.ScriptObject:
        return onnx_engine(cluster, config, NAME, session.installed(), lambda model: model.data)


register_runner(NAME, session.load)
