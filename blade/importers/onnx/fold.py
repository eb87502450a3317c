# SPDX-License-Identifier: Apache-2.0
"""Small nodes on constants are computed while the model is imported, by ONNX's reference implementation.

Larger ones are left to freezing, which computes them once in torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from blade.importers.onnx.emit.dtypes import ELEMENT_TYPES, numpy_dtype
from blade.importers.onnx.emit.emitter import Emitter
from blade.importers.onnx.emit.table import NodeView
from blade.importers.onnx.emit.types import OutputType
from blade.importers.onnx.emit.values import ConstantValue, Value

MOST_ELEMENTS = 4096

_FOLDED = frozenset(
    """Abs Add And Cast Ceil Clip Concat ConstantOfShape Cos CumSum Div Equal Exp Expand Floor Gather Greater
    GreaterOrEqual Identity Less LessOrEqual Log Max Min Mod Mul Neg NonZero Not OneHot Or Pow Range Reciprocal
    ReduceMax ReduceMin ReduceProd ReduceSum Reshape Round ScatterElements ScatterND Shape Sin Size Slice Split Sqrt
    Squeeze Sub Tile Transpose Trilu Unsqueeze Where""".split()
)


def folded(
    e: Emitter,
    node: NodeView,
    inputs: Sequence[Value | None],
    types: Sequence[OutputType],
) -> tuple[ConstantValue, ...] | None:
    """The outputs of a small node whose inputs are all known, or ``None``."""
    if node.op not in _FOLDED or node.domain or not inputs:
        return None
    given = [None if one is None else e.known(one) for one in inputs]
    if any(known is None for known, one in zip(given, inputs) if one is not None):
        return None
    sizes = [one.size for one in given if one is not None]
    for found in types:
        if found.dtype is None or found.dims is None or found.dtype not in ELEMENT_TYPES:
            return None
        sizes.append(int(np.prod([1 if d is None else d for d in found.dims], dtype=np.float64)))
    if max(sizes, default=0) > MOST_ELEMENTS:
        return None
    return _evaluated(node, inputs, given, types)


def _evaluated(
    node: NodeView,
    inputs: Sequence[Value | None],
    given: Sequence[np.ndarray | None],
    types: Sequence[OutputType],
) -> tuple[ConstantValue, ...] | None:
    feeds, infos = {}, []
    for name, value, array in zip(node.inputs, inputs, given):
        if value is not None and array is not None and name not in feeds:
            assert not hasattr(value, "inner")
            dtype = value.dtype
            assert dtype is not None
            feeds[name] = array.astype(numpy_dtype(dtype))
            infos.append(onnx.helper.make_tensor_value_info(name, ELEMENT_TYPES[dtype], None))
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in node.outputs if name]
    graph = onnx.helper.make_graph([node.proto], "folded", infos, outputs)
    opset = onnx.helper.make_opsetid("", node.version)
    model = onnx.helper.make_model(graph, opset_imports=[opset])
    try:
        results = ReferenceEvaluator(model).run(None, feeds)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None
    made = []
    for name, array, found in zip(node.outputs, results, types):
        assert found.dtype is not None
        made.append(ConstantValue(name, np.asarray(array, numpy_dtype(found.dtype)), found.dtype))
    return tuple(made)
