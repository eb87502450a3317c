# SPDX-License-Identifier: Apache-2.0
"""Cut groups of nodes out of a captured graph: each as FX for backends and as TorchScript to fall back on.

    [extracted] = extract(captured, graph_view, [[0, 1, 2]])
    extracted.cluster.gm, extracted.fallback, extracted.inputs, extracted.outputs

Boundaries carry tensors only: a size of an outside tensor makes that tensor an input. The weights of
``fallback`` are attributes ``const_k`` and the very tensors of ``cluster.gm``'s ``const_k``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from blade.backends.base import Cluster
from blade.capture.captured import Captured
from blade.errors import Refused
from blade.graph.boundary import Boundary, find_boundary
from blade.graph.copier import Copier
from blade.graph.observe import observe_tensors
from blade.graph.program import TENSOR
from blade.graph.to_fx import to_fx
from blade.graph.view import GraphView
from blade.reason import Code

Fixed = Callable[[str, int], bool]
"""(TorchScript name of a cluster input, axis) -> whether the caller declared that size fixed."""


@dataclass(frozen=True)
class Extracted:
    """A group, self-contained.

    ``nodes`` index ``view``; ``inputs`` and ``outputs`` are values of its program, in the order in which
    ``cluster.gm`` and ``fallback`` take and return them.
    """

    cluster: Cluster
    fallback: torch.jit.ScriptModule
    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    view: GraphView


class Fallback(torch.nn.Module):
    """Names the TorchScript class of a cluster's original subgraph."""


def extract(
    captured: Captured,
    view: GraphView,
    groups: Sequence[Sequence[int]],
    fixed: Fixed | None = None,
) -> list[Extracted]:
    """One ``Extracted`` per group, named ``cluster_0`` ... in the given order.

    Raises ``Refused(CONVERSION_FAILED)`` naming the node whose shapes cannot be expressed in FX, or
    the nodes of a group whose results nobody reads.
    """
    boundaries = [find_boundary(view, group) for group in groups]
    for boundary in boundaries:
        if not boundary.outputs:
            names = ", ".join(view.nodes[i].name for i in boundary.nodes)
            raise Refused(Code.CONVERSION_FAILED, f"Nothing reads a result of {names}.")
    count = len(captured.samples)
    runs = [
        _inputs_seen(captured, view, boundaries, run)
        for run in (*captured.samples, *captured.probes)
    ]
    return [
        _extract_one(
            f"cluster_{i}",
            view,
            boundary,
            [run[i] for run in runs[:count]],
            [run[i] for run in runs[count:]],
            fixed,
        )
        for i, boundary in enumerate(boundaries)
    ]


def _extract_one(
    name: str,
    view: GraphView,
    boundary: Boundary,
    samples: list[tuple[torch.Tensor, ...]],
    probes: list[tuple[torch.Tensor, ...]],
    fixed: Fixed | None,
) -> Extracted:
    gm, shape_env = to_fx(view, boundary, [*probes, *samples], fixed)
    cluster = Cluster(
        name=name,
        gm=gm,
        shape_env=shape_env,
        inputs=tuple(view.info(v) for v in boundary.inputs),
        ops=tuple(str(view.nodes[i].target) for i in boundary.nodes),
        samples=tuple(samples),
        probes=tuple(probes),
    )
    fallback = _to_script(view, boundary)
    return Extracted(cluster, fallback, boundary.nodes, boundary.inputs, boundary.outputs, view)


def _inputs_seen(
    captured: Captured, view: GraphView, boundaries: Sequence[Boundary], run: tuple[object, ...]
) -> list[tuple[torch.Tensor, ...]]:
    """The inputs each group receives when the whole graph runs on ``run``."""
    wanted: dict[int, dict[int, bool]] = {}
    for boundary in boundaries:
        for value, line in zip(boundary.inputs, boundary.read_at, strict=True):
            wanted.setdefault(line, {})[value] = view.aliases.may_be_written(value)
    asked = {line: list(values.items()) for line, values in wanted.items()}
    seen = observe_tensors(view.program, captured.module, run, asked)
    return [
        tuple(seen[at, v].detach() for v, at in zip(b.inputs, b.read_at, strict=True))
        for b in boundaries
    ]


def _to_script(view: GraphView, boundary: Boundary) -> torch.jit.ScriptModule:
    """The group as a ScriptModule: a stub with the right signature whose graph is then filled in."""
    holder = Fallback()
    for k, tensor in enumerate(boundary.tensors):
        holder.register_buffer(f"const_{k}", tensor)
    # Equal modules share one TorchScript class by default, and filling one would fill them all.
    script: torch.jit.ScriptModule = torch.jit._recursive.create_script_module(
        holder.eval(), lambda module: (), share_types=False
    )
    script.define(_stub(len(boundary.inputs), len(boundary.outputs)))
    graph = script.graph
    clear(graph)
    this, *parameters = list(graph.inputs())
    names = {value: k for k, value in enumerate(boundary.constants)}

    def place(value: int) -> torch._C.Value | None:
        k = names.get(value)
        if k is None:
            return None
        return get_attribute(graph, this, f"const_{boundary.slots[k]}", TENSOR)

    known = dict(zip(boundary.inputs, parameters, strict=True))
    copier = Copier(view.program, graph, view.cheap, known, place)
    for index in boundary.lines:
        copier.copy(view.program.lines[index])
    results = [copier.value(v) for v in boundary.outputs]
    graph.registerOutput(results[0] if len(results) == 1 else pack(graph, results))
    graph.lint()
    return script


def clear(graph: torch._C.Graph) -> None:
    """Remove the body of ``graph``; its inputs stay."""
    while list(graph.outputs()):
        graph.eraseOutput(0)
    for node in reversed(list(graph.nodes())):
        node.destroy()


def get_attribute(
    graph: torch._C.Graph, owner: torch._C.Value, name: str, kind: torch._C.JitType
) -> torch._C.Value:
    """``owner.name``, appended to ``graph``."""
    node = graph.create("prim::GetAttr", [owner], 1)
    node.s_("name", name)
    graph.appendNode(node)
    node.output().setType(kind)
    return node.output()


def pack(graph: torch._C.Graph, values: Sequence[torch._C.Value]) -> torch._C.Value:
    """A tuple of ``values``, appended to ``graph``."""
    node = graph.create("prim::TupleConstruct", list(values), 1)
    graph.appendNode(node)
    node.output().setType(torch._C.TupleType([v.type() for v in values]))
    return node.output()


def _stub(inputs: int, outputs: int) -> str:
    """Source of a forward with this many tensors in and out; the body only has to type-check."""
    names = [f"x{i}" for i in range(inputs)]
    parameters = "".join(f", {name}: Tensor" for name in names)
    result = "Tensor" if outputs == 1 else f"Tuple[{', '.join(['Tensor'] * outputs)}]"
    made = "torch.empty(0)"
    body = made if outputs == 1 else ", ".join([made] * outputs)
    return f"def forward(self{parameters}) -> {result}:\n    return {body}\n"
