# SPDX-License-Identifier: Apache-2.0
"""The parser's verdict on each probe of a graph.

    for probe, verdict in zip(probes, parsed(library, model, probes)): ...     # TAKEN, or why not

The parser names the nodes that it does not support. The others count as supported only if the graph without
the named nodes parses as a whole, so it is parsed again, without a new export.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from blade.backends.shared.onnx.model import OnnxModel
from blade.backends.tensorrt.library import TensorRTLibrary
from blade.backends.tensorrt.network import new_network
from blade.backends.tensorrt.op_probe_graph import OpProbe

TAKEN = ""


def parsed(library: TensorRTLibrary, model: OnnxModel, islands: Sequence[OpProbe]) -> list[str]:
    """One verdict per probe, in order."""
    import onnx

    graph = onnx.load_from_string(model.data)
    names = iter(model.outputs)
    outputs = [[next(names) for _ in island.results] for island in islands]
    behind = _nodes_behind(graph.graph.node, outputs)
    verdicts: dict[int, str] = {}
    while len(verdicts) < len(islands):
        left = [k for k in range(len(islands)) if k not in verdicts]
        kept = sorted({n for k in left for n in behind[k]})
        part = _part(graph, kept, [name for k in left for name in outputs[k]])
        words = _errors(library, part)
        refused = {kept[n]: text for n, text in words.items() if n < len(kept)}
        wrong = {k: text for k in left for n, text in refused.items() if n in behind[k]}
        if words and not wrong:  # an error of the whole graph: no node is known to be good
            wrong = dict.fromkeys(left, next(iter(words.values())))
        verdicts |= wrong or dict.fromkeys(left, TAKEN)
    return [verdicts[k] for k in range(len(islands))]


def _nodes_behind(nodes: Sequence[Any], outputs: Sequence[Sequence[str]]) -> list[set[int]]:
    """For each group of outputs, the positions of the nodes that compute them."""
    maker = {name: n for n, node in enumerate(nodes) for name in node.output if name}
    found = []
    for group in outputs:
        seen: set[int] = set()
        waiting = list(group)
        while waiting:
            n = maker.get(waiting.pop())
            if n is not None and n not in seen:
                seen.add(n)
                waiting += nodes[n].input
        found.append(seen)
    return found


def _part(model: Any, kept: Sequence[int], outputs: Sequence[str]) -> bytes:
    """``model`` reduced to some of its nodes and outputs, and the inputs and initializers that these read."""
    import onnx

    part = onnx.ModelProto()
    part.CopyFrom(model)
    graph = part.graph
    nodes = [model.graph.node[n] for n in kept]
    read = {name for node in nodes for name in node.input} | set(outputs)
    for field, keep in (
        (graph.node, nodes),
        (graph.output, [o for o in model.graph.output if o.name in set(outputs)]),
        (graph.input, [i for i in model.graph.input if i.name in read]),
        (graph.initializer, [i for i in model.graph.initializer if i.name in read]),
    ):
        del field[:]
        field.extend(keep)
    data: bytes = part.SerializeToString()
    return data


def _errors(library: TensorRTLibrary, model: bytes) -> Mapping[int, str]:
    """Position of each node that the parser does not support -> its message; empty if it supports all."""
    builder = library.trt.Builder(library.logger)
    network = new_network(library, builder)
    parser = library.trt.OnnxParser(network, library.logger)
    with library.errors() as errors:
        if parser.supports_model_v2(model):
            return {}
    found = {}
    for error in map(parser.get_error, range(parser.num_errors)):
        what = (
            f"ONNX's {error.node_operator()} ({error.desc()})"
            if error.node_operator()
            else error.desc()
        )
        found[error.node()] = f"{library.stamp} does not take {what}"
    return found or {-1: library.said("does not take it", errors)}
