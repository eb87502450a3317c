# SPDX-License-Identifier: Apache-2.0
"""OpenVINO as a backend, on the CPU: nodes that the exporter translates, clusters as ONNX models."""

from operator import attrgetter

import torch

from blade.backends.openvino import int64_bounds as integers
from blade.backends.openvino.session import LIBRARY
from blade.backends.openvino.support import why_not_here
from blade.backends.shared.onnx.engine import engine_version, onnx_engine
from blade.backends.shared.onnx.model import export_seconds, why_no_onnx
from blade.backends.shared.onnx.support import why_not_onnx
from blade.config import Config
from blade.core.backend import Backend
from blade.core.cluster import Cluster, OpNode
from blade.core.reason import Reason

NAME = LIBRARY.name
DTYPES = (torch.float32, torch.int64, torch.int32, torch.bool)  # OpenVINO computes fp64 in fp32


class OpenVinoBackend(Backend):
    """OpenVINO through ``torch.onnx``. Weights stay in torch's memory and in the engine's constants."""

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
