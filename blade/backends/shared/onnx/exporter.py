# SPDX-License-Identifier: Apache-2.0
"""torch's ONNX exporter, run without tracing the graph again.

    model = translate(to_exported(cluster, row_major=True, reduce=reduce))     # an onnx_ir.Model

``torch.onnx.export`` rebuilds its registry every time, and decomposes by tracing everything again, which
takes twice as long as all other steps. This module runs only these other steps. They are private to torch: if
they have moved, conversions fail with a reason.
"""

import logging
from functools import lru_cache
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Graph

from blade.core.torch_modes import oblivious_to_sizes
from blade.graph.fx.check_indices import OutOfRangePolicy, flag, make_negative_invalid
from blade.graph.fx.decompose import decompose
from blade.graph.fx.decomposition_table import REWRITES

OPSET = 20  # has GELU as an op; few libraries support attention, which is in 23


def reduce(graph: Graph, indices: OutOfRangePolicy = "raised") -> None:
    """Decompose, in place, ops that are not translated, or not well; ``indices`` as in ``to_onnx``."""
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
        node.meta["nn_module_stack"] = {}  # the exporter warns if it is missing
    # sizes of 0 and 1 are not specialized
    with oblivious_to_sizes():
        _fx_passes.insert_type_promotion_nodes(program.graph_module)
        model = _core._exported_program_to_onnx_program(program, registry=_registry()).model
    version_converter.convert_version(model, OPSET)  # most functions are written for 18
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
    """The decompositions of all ops that have one and are not translated."""
    from torch.onnx._internal.exporter import _decomp

    known = set(_decomp.get_onnx_implemented_overloads(_registry()))
    return dict(_decomp.create_onnx_friendly_decomposition_table(known))
