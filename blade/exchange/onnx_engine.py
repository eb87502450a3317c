# SPDX-License-Identifier: Apache-2.0
"""An engine of a library that runs ONNX: the model in the payload, the weights among the constants.

engine = onnx_engine(cluster, config, LIBRARY, lambda model: model.data)
"""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from operator import attrgetter

import torch

from blade.backends.base import Cluster
from blade.config import Config
from blade.exchange.indices import Indices
from blade.exchange.library import Library
from blade.exchange.onnx_model import OnnxModel, exporter_version, to_onnx
from blade.exchange.payload import Head, pack
from blade.runtime.engine import make_engine

MODEL = "model.onnx"


def engine_version(library: Library) -> str:
    """What engines depend on besides the cluster and the config."""
    try:
        return f"{library.name} {library.installed()}, {exporter_version()}"
    except PackageNotFoundError as missing:
        return f"without {missing}"


def onnx_engine(
    cluster: Cluster,
    config: Config,
    library: Library,
    data_of: Callable[[OnnxModel], bytes],
    *,
    device: str = "cpu",
    indices: Indices = "raised",
) -> torch.ScriptObject:
    """``data_of`` gives the model in the form that ``library`` reads, to compute on ``device``. ``indices``:
    what it does with those out of range (``to_onnx``).

    Raises what the exporter refuses.
    """
    model = to_onnx(cluster, config, indices=indices)
    head = Head(
        weights=tuple(model.weights),
        inputs=model.inputs,
        outputs=model.outputs,
        orders=model.orders,
        device=device,
    )
    constants = [attrgetter(name)(cluster.gm) for name in model.weights.values()]
    payload = pack(head, library.stamp(), {MODEL: data_of(model)})
    limits = {"max_failures": config.max_failures}
    return make_engine(cluster.name, library.name, model.program, payload, constants, limits)
