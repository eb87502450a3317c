# SPDX-License-Identifier: Apache-2.0
"""Insert casts, so that a cluster computes its products in 16 bits in a strongly typed network.

    halved = to_half(cluster, torch.float16)    # same inputs, outputs and constants, casts in between

Networks are strongly typed: TensorRT computes every op in the graph's types, and no flag lets it choose. So
casts follow autocast: products and convolutions in 16 bits, sums and exponentials in float32, everything else
in the type of its operands (the wider of two). Outputs are cast back. The type is float16, or bfloat16 if a
sample has magnitudes that float16 cannot hold.
"""

from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from blade.backends.shared.half_precision import HALF_OPS, choose, name_of
from blade.core.cluster import Cluster
from blade.core.torch_modes import dispatched_in_python
from blade.graph.shapes.shape_functions import result_of

# Sums and exponentials, by op names without overload: autocast's list for CUDA.
WIDE = frozenset(
    "softmax _softmax log_softmax _log_softmax layer_norm native_layer_norm group_norm native_group_norm "
    "batch_norm _native_batch_norm_legit_no_training instance_norm rms_norm norm linalg_vector_norm sum mean prod "
    "cumsum cumprod var std var_mean std_mean logsumexp exp expm1 log log2 log10 log1p pow rsqrt reciprocal acos asin "
    "cosh erfinv sinh tan softplus renorm cosine_similarity dist cdist square "
    "quantize_per_tensor quantize_per_channel dequantize_per_tensor dequantize_per_channel "
    "fake_quantize_per_tensor_affine fake_quantize_per_channel_affine".split()
)


def to_half(cluster: Cluster, dtype: torch.dtype | None = None) -> Cluster:
    """``cluster`` with casts. ``dtype`` is float16 or bfloat16; by default the result of ``choose``."""
    # The ops and sizes are as before, so all answers about sizes are known.
    with cluster.shape_env.suppress_guards():
        return replace(cluster, gm=_CastInserter(cluster, dtype or choose(cluster)).run())


class _CastInserter:
    """Copies a graph; ``forms[node][dtype]`` is the node's copy, cast to ``dtype``."""

    def __init__(self, cluster: Cluster, dtype: torch.dtype) -> None:
        self.gm, self.dtype = cluster.gm, dtype
        self.graph = Graph()
        self.forms: dict[Node, dict[torch.dtype | None, Node]] = {}
        first = next(iter(cluster.gm.graph.nodes)).meta["val"]
        self.mode = first.fake_mode

    def run(self) -> GraphModule:
        for node in self.gm.graph.nodes:
            if node.op == "output":
                self._output(node)
            elif node.op == "call_function":
                self._call(node)
            else:
                copied = self.graph.node_copy(node)
                copied.meta = dict(node.meta)
                self.forms[node] = {None: copied}
        self.graph.lint()
        return GraphModule(self.gm, self.graph)

    def _call(self, node: Node) -> None:
        name = name_of(node.target)
        if name in HALF_OPS:
            want: torch.dtype | None = self.dtype
        elif name in WIDE or self._is_mixed(node) or self._is_large(node):
            want = torch.float32
        else:
            want = None
        copied = self.graph.node_copy(node, lambda n: self._as(n, want))
        copied.meta = {**node.meta, "val": self._value(copied)}
        self.forms[node] = {None: copied}

    def _is_mixed(self, node: Node) -> bool:
        """Whether some operands are now in 16 bits and others are not."""
        dtypes = {_dtype(self.forms[n][None]) for n in node.all_input_nodes}
        return self.dtype in dtypes and torch.float32 in dtypes

    def _is_large(self, node: Node) -> bool:
        """Whether a number among the arguments would overflow, as the fill values of masks do."""
        largest = torch.finfo(self.dtype).max
        numbers = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, (int, float))]
        return any(abs(a) > largest for a in numbers if abs(a) != inf)

    def _as(self, node: Node, want: torch.dtype | None) -> Node:
        """``node``'s copy, in float32 or 16 bits if it was originally float32."""
        plain = self.forms[node][None]
        have = _dtype(plain)
        if want is None or want == have or _dtype(node) != torch.float32 or have is None:
            return plain
        if want not in self.forms[node]:
            self.forms[node][want] = self._cast(plain, want)
        return self.forms[node][want]

    def _cast(self, node: Node, dtype: torch.dtype) -> Node:
        cast = self.graph.call_function(torch.ops.aten.to.dtype, (node, dtype))
        cast.meta = {"val": self._value(cast)}
        return cast

    def _output(self, node: Node) -> None:
        (returned,) = node.args
        assert isinstance(returned, (list, tuple)), returned
        given = []
        for one in returned:
            assert isinstance(one, Node), one
            dtype = _dtype(one)
            plain = self.forms[one][None]
            given.append(plain if _dtype(plain) == dtype or dtype is None else self._as(one, dtype))
        self.graph.output(tuple(given))

    def _value(self, node: Node) -> Any:
        args = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with torch.no_grad(), self.mode, dispatched_in_python():
            return result_of(node.target, args[0], args[1])


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta["val"]
    return value.dtype if isinstance(value, torch.Tensor) else None
