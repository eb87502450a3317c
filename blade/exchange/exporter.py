# SPDX-License-Identifier: Apache-2.0
"""torch's ONNX exporter, run without tracing the graph again.

    model = translate(to_exported(cluster, row_major=True, reduce=reduce))     # an onnx_ir.Model

``torch.onnx.export`` collects its registry anew every time, and decomposes by tracing everything again,
which takes twice as long as all the rest. What is done here is that rest. Its parts are private to torch:
where they have moved, conversions fail and say so.
"""

import logging
from functools import lru_cache
from typing import Any

import torch.fx.experimental._config as symbolic_config
from torch.export import ExportedProgram
from torch.fx import Graph

from blade.exchange.decompose import decompose
from blade.exchange.indices import Indices, flag, make_negative_invalid
from blade.exchange.rewrites import REWRITES

OPSET = 20  # has GELU as an op; attention, of 23, few libraries read


def reduce(graph: Graph, indices: Indices = "raised") -> None:
    """Decompose, in place, what is not translated, or not well; ``indices`` out of range as ``to_onnx`` says."""
    known = {name for name in _registry().functions if isinstance(name, str)}
    decompose(graph, lambda target: target.name() in known, _table(), REWRITES)
    if indices == "raised":
        make_negative_invalid(graph)
    elif indices == "flagged":
        flag(graph)


def translate(program: ExportedProgram) -> Any:
    """``program``, whose ops are all translated, as an ``onnx_ir.Model``."""
    from onnxscript import version_converter
    from torch.onnx._internal.exporter import _core, _fx_passes

    for node in program.graph.nodes:
        node.meta["nn_module_stack"] = {}  # the exporter warns where it is missing
    # sizes of 0 and 1 stay what they are
    with symbolic_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        _fx_passes.insert_type_promotion_nodes(program.graph_module)
        model = _core._exported_program_to_onnx_program(program, registry=_registry()).model
    version_converter.convert_version(model, OPSET)  # most functions are written in 18
    return model


@lru_cache(maxsize=1)
def _registry() -> Any:
    from torch.onnx._internal.exporter import _registration

    log: logging.Logger = _registration.logger
    level = log.level
    log.setLevel(logging.ERROR)  # it warns that torchvision is not installed
    try:
        return _registration.ONNXRegistry.from_torchlib(opset_version=OPSET)
    finally:
        log.setLevel(level)


@lru_cache(maxsize=1)
def _table() -> dict[Any, Any]:
    """The decompositions of everything that has some and is not translated."""
    from torch.onnx._internal.exporter import _decomp

    known = set(_decomp.get_onnx_implemented_overloads(_registry()))
    return dict(_decomp.create_onnx_friendly_decomposition_table(known))
