# SPDX-License-Identifier: Apache-2.0
"""Pass an ONNX graph and its weights to TensorRT's parser, to build or to refit.

    held = give_weights(parser, graph, {"const_0": tensor}, "parse")     # keep ``held`` until built

The parser reads the weights in place (TensorRT 10.12 and later); older parsers get a copy of the graph that
contains the weights.
"""

from collections.abc import Mapping
from typing import Any

import torch

from blade.backends.tensorrt.library import TensorRTLibrary
from blade.core.reason import Code
from blade.errors import Refused

_WHOLE = {"parse": "parse", "refit": "refit_from_bytes"}  # methods of older parsers


def new_network(library: TensorRTLibrary, builder: Any) -> Any:
    """An empty, strongly typed network: it computes in the types of its tensors."""
    strong = library.flag("NetworkDefinitionCreationFlag", "STRONGLY_TYPED")
    return builder.create_network(0 if strong is None else 1 << int(strong))


def parse(
    library: TensorRTLibrary, network: Any, graph: bytes, weights: Mapping[str, torch.Tensor]
) -> list[Any]:
    """Fill ``network`` from ``graph``. Returns the memory that must live until the engine is built.

    Raises ``Refused(UNSUPPORTED_OP)`` with the nodes that the parser does not support.
    """
    parser = library.trt.OnnxParser(network, library.logger)
    with library.errors() as errors:
        held = give_weights(parser, graph, weights, "parse")
    if held is None:
        words = [_sentence(parser.get_error(i)) for i in range(parser.num_errors)]
        raise Refused(Code.UNSUPPORTED_OP, library.said("does not take it", words or errors))
    return [*held, parser]


def give_weights(
    parser: Any, graph: bytes, weights: Mapping[str, torch.Tensor], what: str
) -> list[Any] | None:
    """Call ``what`` ("parse" or "refit") on ``graph`` with ``weights``; returns the memory that the parser
    reads, or ``None`` if it failed."""
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    if not weights or not hasattr(parser, "load_model_proto"):
        whole = _filled(graph, on_host) if weights else graph
        return [whole] if getattr(parser, _WHOLE[what])(whole) else None
    if not parser.load_model_proto(graph):
        return None
    for name, tensor in on_host.items():
        if not parser.load_initializer(name, tensor.data_ptr(), tensor.nbytes):
            return None
    return list(on_host.values()) if getattr(parser, f"{what}_model_proto")() else None


def _sentence(error: Any) -> str:
    operator, name = error.node_operator(), error.node_name()
    where = f"{operator} {name}".strip()
    return f"{where}: {error.desc()}" if where else str(error.desc())


def _filled(graph: bytes, weights: Mapping[str, torch.Tensor]) -> bytes:
    import onnx

    model = onnx.load_from_string(graph)
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.raw_data = weights[tensor.name].flatten().view(torch.uint8).numpy().tobytes()
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    data: bytes = model.SerializeToString()
    return data
