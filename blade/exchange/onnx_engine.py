# SPDX-License-Identifier: Apache-2.0
"""An engine of a library that runs ONNX: the model in the payload, the weights among the constants.

engine = onnx_engine(cluster, config, "openvino", installed(), lambda model: model.data)
"""

from collections.abc import Callable
from operator import attrgetter

import torch

from blade.backends.base import Cluster
from blade.config import Config
from blade.exchange.onnx_model import OnnxModel, to_onnx
from blade.exchange.payload import Head, pack
from blade.runtime.engine import make_engine


def onnx_engine(
    cluster: Cluster,
    config: Config,
    library: str,
    version: str,
    data_of: Callable[[OnnxModel], bytes],
) -> torch.ScriptObject:
    """``data_of`` gives the model in the form that ``library`` reads. Raises what the exporter refuses."""
    model = to_onnx(cluster, config)
    head = Head(
        library=library,
        version=version,
        weights=tuple(model.weights),
        inputs=model.inputs,
        outputs=model.outputs,
        orders=model.orders,
    )
    constants = [attrgetter(name)(cluster.gm) for name in model.weights.values()]
    payload = pack(head, data_of(model))
    limits = {"max_failures": config.max_failures}
    return make_engine(cluster.name, library, model.program, payload, constants, limits)
