# SPDX-License-Identifier: Apache-2.0
"""TensorRT as a backend: engines for clusters on CUDA devices.

    Config(optimization_pipeline="TensorRT")      # or "auto": one candidate among others

An engine is verified and timed on the GPU, so ``optimize`` needs one. TensorRT-RTX can build without:
``build.build_engine(cluster, config)`` parses, builds, and fills the cache, where ``optimize`` on the machine
with the GPU finds the plan.
"""

from collections.abc import Sequence
from operator import attrgetter

import torch

from blade.backends.shared.onnx.model import exporter_version, why_no_onnx
from blade.backends.tensorrt import library, parser
from blade.backends.tensorrt.build import build_engine
from blade.config import Config
from blade.core.backend import Backend
from blade.core.cluster import Cluster, OpNode
from blade.core.reason import Reason
from blade.errors import BackendError
from blade.runtime.engine import make_engine

NAME = "tensorrt"
BUILD_ONLY = (
    "To build engines here for another machine, use blade.backends.tensorrt.build.build_engine: with the same "
    "BLADE_CACHE_DIR, optimize finds them there."
)


class TensorRTBackend(Backend):
    """NVIDIA's TensorRT (10 and later) or TensorRT-RTX, whichever is installed."""

    name = NAME
    precisions = ("fp16", "bf16")
    reduced_precision_with = ("enable_fp16", "enable_bf16")

    @property
    def version(self) -> str:
        return f"{library.find_library().stamp}, {exporter_version()}"

    def why_unavailable(self) -> str | None:
        if (why := why_no_onnx()) is not None:
            return why
        name, why = library.installed(), library.why_no_device()
        if name is not None and why is not None:  # do not load its 100 MB in vain
            return (
                f"{name} is installed, but its engines run on CUDA devices, and {why}. {BUILD_ONLY}"
            )
        try:
            return library.why_not_device(library.find_library())
        except BackendError as error:
            return str(error)

    def survey(self, nodes: Sequence[OpNode], config: Config) -> None:
        parser.survey(nodes, config)

    def why_not(self, node: OpNode, config: Config) -> Reason | None:
        return parser.why_not(node, config)

    def estimate_s(self, cluster: Cluster) -> float:
        """Seconds to export and build: about 10 for BERT-base."""
        return 3.0 + 0.03 * len(cluster.ops)

    def convert(self, cluster: Cluster, config: Config) -> torch.ScriptObject:
        built = build_engine(cluster, config)
        held = [attrgetter(name)(cluster.gm) for name in built.constants]
        limits = {"max_failures": config.max_failures}
        return make_engine(cluster.name, self.name, built.program, built.payload(), held, limits)
