# SPDX-License-Identifier: Apache-2.0
"""An engine of a library that runs ONNX: the model in the payload, the weights among the constants.

engine = onnx_engine(cluster, config, LIBRARY, lambda model: model.data)
"""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from operator import attrgetter

import torch

from blade.backends.shared.library_payload import LibraryHeader, pack
from blade.backends.shared.library_sessions import OptionalLibrary
from blade.backends.shared.onnx.model import OnnxModel, exporter_version, to_onnx
from blade.config import Config
from blade.core.cluster import Cluster
from blade.graph.fx.check_indices import OutOfRangePolicy
from blade.runtime.engine import make_engine


def engine_version(library: OptionalLibrary) -> str:
    """The versions that engines depend on besides the cluster and the config."""
    try:
        return f"{library.name} {library.installed()}, {exporter_version()}"
    except PackageNotFoundError as missing:
        return f"without {missing}"


def onnx_engine(
    cluster: Cluster,
    config: Config,
    library: OptionalLibrary,
    data_of: Callable[[OnnxModel], bytes],
    *,
    device: str = "cpu",
    indices: OutOfRangePolicy = "raised",
) -> torch.ScriptObject:
    """``data_of`` returns the model in the format that ``library`` reads, to compute on ``device``.
    ``indices``: how it treats indices out of range (``to_onnx``).

    Raises what ``to_onnx`` raises.
    """
    model = to_onnx(cluster, config, indices=indices)
    head = LibraryHeader(
        weights=tuple(model.weights),
        inputs=model.inputs,
        outputs=model.outputs,
        orders=model.orders,
        device=device,
    )
    constants = [attrgetter(name)(cluster.gm) for name in model.weights.values()]
    payload = pack(head, library.stamp(), data_of(model))
    limits = {"max_failures": config.max_failures}
    return make_engine(cluster.name, library.name, model.program, payload, constants, limits)
