# SPDX-License-Identifier: Apache-2.0
"""OpenVINO as a backend: nodes the exporter translates, a cluster as an ONNX model, on the CPU."""

from operator import attrgetter

import torch

from blade.backends.base import Cluster, OpNode
from blade.backends.openvino import integers, session
from blade.backends.openvino.session import LIBRARY
from blade.backends.openvino.support import why_not_here
from blade.config import Config
from blade.exchange.onnx_engine import engine_version, onnx_engine
from blade.exchange.onnx_model import export_seconds, why_no_onnx
from blade.exchange.onnx_support import why_not_onnx
from blade.reason import Reason
from blade.runtime.engine import register_runner

NAME = LIBRARY.name
DTYPES = (torch.float32, torch.int64, torch.int32, torch.bool)  # fp64 is computed in fp32 there


class OpenVinoBackend:
    """Through ``torch.onnx``, on the CPU. Weights stay in torch's memory and in the engine's constants."""

    name = NAME

    @property
    def version(self) -> str:
        return engine_version(LIBRARY)

    def why_unavailable(self) -> str | None:
        return LIBRARY.why_not_loadable() or why_no_onnx()

    def why_not(self, node: OpNode, config: Config) -> Reason | None:
        return (
            why_not_onnx(node, NAME, DTYPES) or why_not_here(node) or integers.why_not(node, NAME)
        )

    def estimate_s(self, cluster: Cluster) -> float:
        return export_seconds(cluster)

    def convert(self, cluster: Cluster, config: Config) -> torch.ScriptObject:
        integers.check_bounds(cluster)
        return onnx_engine(cluster, config, LIBRARY, attrgetter("data"), indices="flagged")


register_runner(NAME, session.load)
