# SPDX-License-Identifier: Apache-2.0
"""Extracts groups of nodes from a captured graph, as FX for backends and as TorchScript for the fallback.

    [extracted] = extract(captured, graph_view, [[0, 1, 2]])
    extracted.cluster.gm, extracted.fallback, extracted.inputs, extracted.outputs

Only tensors cross boundaries: a size of an outside tensor makes that tensor an input, and a plain number
crosses as a 0-d tensor (boundary_scalars.py), which ``fallback`` reads. The weights of ``fallback`` are
attributes ``const_k``, the same tensors as ``cluster.gm``'s ``const_k``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from blade.core import torchscript
from blade.core.captured import Captured
from blade.core.cluster import Cluster, ValueInfo
from blade.core.reason import Code
from blade.errors import Refused
from blade.graph.torchscript.boundary import Boundary, find_boundary
from blade.graph.torchscript.boundary_samples import BoundarySamples, Inputs
from blade.graph.torchscript.boundary_scalars import number_dtype, tensor_info_of
from blade.graph.torchscript.copier import Copier
from blade.graph.torchscript.program import TENSOR
from blade.graph.torchscript.to_fx import to_fx
from blade.graph.torchscript.view import GraphView

Fixed = Callable[[str, int], bool]
"""(TorchScript name of a cluster input, axis) -> whether the user declared that size fixed."""


@dataclass(frozen=True)
class Extracted:
    """A self-contained group.

    ``nodes`` index ``view``. ``inputs`` and ``outputs`` are values of its program in the order of the
    arguments and results of ``cluster.gm`` and ``fallback``. ``varied``: whether several runs reached the
    group. ``answers``: what ``fallback`` returns at each sample and probe, if it is known.
    """

    name: str
    fallback: torch.jit.ScriptModule
    boundary: Boundary
    view: GraphView
    samples: tuple[Inputs, ...]
    probes: tuple[Inputs, ...]
    varied: bool
    fixed: Fixed | None
    origins: tuple[int, ...] = ()  # per sample: the captured sample it comes from
    first_run: int = 0  # the first captured sample that reaches it, counted on through the probes
    calibration: Iterable[Inputs] = ()
    answers: tuple[Inputs, ...] = ()

    @property
    def nodes(self) -> tuple[int, ...]:
        return self.boundary.nodes

    @property
    def inputs(self) -> tuple[int, ...]:
        return self.boundary.inputs

    @property
    def outputs(self) -> tuple[int, ...]:
        return self.boundary.outputs

    @property
    def has_cluster(self) -> bool:
        """Whether ``cluster`` was made already."""
        return "cluster" in vars(self)

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster for backends, made on first use. Raises ``Refused`` as ``extract`` does."""
        examples = [*self.probes, *self.samples]
        gm, shape_env = to_fx(
            self.view, self.boundary, examples, self.fixed, self.varied, self.samples
        )
        return Cluster(
            name=self.name,
            gm=gm,
            shape_env=shape_env,
            inputs=tuple(_info(self.view, v) for v in self.inputs),
            ops=tuple(str(self.view.nodes[i].target) for i in self.nodes),
            samples=self.samples,
            probes=self.probes,
            calibration=self.calibration,
        )

    def declared(self) -> tuple[object, ...]:
        """The parts of ``cluster`` that follow neither from the graph of ``fallback`` nor from the inputs."""
        names = [self.view.program.values[v].debugName() for v in self.inputs]
        axes = {k: range(t.dim()) for k, t in enumerate((*self.samples, *self.probes)[0])}
        fixed = [
            (k, axis)
            for k, name in enumerate(names)
            for axis in axes[k]
            if self.fixed is not None and self.fixed(name, axis)
        ]
        return (self.varied, fixed, [_info(self.view, v) for v in self.inputs])


@dataclass(frozen=True)
class _CalibrationInputs:
    """Inputs of a group at the calibration samples; each iteration runs the module again."""

    samples: BoundarySamples
    boundary: Boundary

    def __iter__(self) -> Iterator[Inputs]:
        return self.samples.further(self.boundary)


_READERS = {"IntType": "aten::Int", "FloatType": "aten::Float", "BoolType": "aten::Bool"}


class FallbackModule(torch.nn.Module):
    """Names the TorchScript class of a cluster's original subgraph."""


def extract(
    captured: Captured,
    view: GraphView,
    groups: Sequence[Sequence[int]],
    fixed: Fixed | None = None,
    samples: BoundarySamples | None = None,
) -> list[Extracted]:
    """One ``Extracted`` per group, named ``cluster_0`` ... in the given order.

    ``samples`` caches observed values between calls. Raises ``Refused(CONVERSION_FAILED)`` naming the node
    whose shapes cannot be expressed in FX, or the nodes of a group whose results are unused.
    """
    every = outline(captured, view, groups, fixed, samples)
    for one in every:
        _ = one.cluster  # raises if FX cannot express it
    return every


def outline(
    captured: Captured,
    view: GraphView,
    groups: Sequence[Sequence[int]],
    fixed: Fixed | None = None,
    samples: BoundarySamples | None = None,
) -> list[Extracted]:
    """``extract`` without the conversion to FX, which may still fail later."""
    boundaries = [find_boundary(view, group) for group in groups]
    for boundary in boundaries:
        assert len({view.program.lines[i].block for i in boundary.lines}) == 1, boundary.nodes
        if not boundary.outputs:
            names = ", ".join(view.nodes[i].name for i in boundary.nodes)
            raise Refused(Code.CONVERSION_FAILED, f"Nothing reads a result of {names}.")
    samples = BoundarySamples(captured, view) if samples is None else samples
    samples.record(boundaries)
    return [
        _extract_one(f"cluster_{i}", view, boundary, samples, fixed)
        for i, boundary in enumerate(boundaries)
    ]


def outline_bare(view: GraphView, name: str, group: Sequence[int]) -> Extracted:
    """A group whose engines exist already, without inputs to verify them."""
    boundary = find_boundary(view, group)
    return Extracted(name, _to_script(view, boundary), boundary, view, (), (), False, None)


def _extract_one(
    name: str, view: GraphView, boundary: Boundary, samples: BoundarySamples, fixed: Fixed | None
) -> Extracted:
    at_samples, at_probes = samples.of(boundary)
    if not at_probes and not at_samples:
        raise Refused(Code.UNKNOWN_TYPE, f"No sample reaches {view.nodes[boundary.nodes[0]].name}.")
    return Extracted(
        name=name,
        fallback=_to_script(view, boundary),
        boundary=boundary,
        view=view,
        samples=tuple(at_samples),
        probes=tuple(at_probes),
        varied=samples.varied(boundary),
        fixed=fixed,
        origins=tuple(samples.origins(boundary)),
        first_run=samples.first_run(boundary),
        calibration=_CalibrationInputs(samples, boundary),
        answers=_known_answers(view, boundary, samples),
    )


def _known_answers(
    view: GraphView, boundary: Boundary, samples: BoundarySamples
) -> tuple[Inputs, ...]:
    """The results of the runs that ``view`` was made from, if the group computes them from the model's own inputs.

    Then ``fallback`` runs the same ops on the same tensors, but in a graph that writes in place.
    """
    if not boundary.inputs or view.aliases.written or not samples.are_given(boundary):
        return ()
    if not all(value in run for run in view.results for value in boundary.outputs):
        return ()
    return tuple(tuple(run[value] for value in boundary.outputs) for run in view.results)


def _info(view: GraphView, value: int) -> ValueInfo:
    number = number_dtype(view.program, value)
    return view.info(value) if number is None else tensor_info_of(view.program, value)


def _to_script(view: GraphView, boundary: Boundary) -> torch.jit.ScriptModule:
    """The group as a ScriptModule: a stub with the right signature, then filled with the graph."""
    holder = FallbackModule()
    for k, tensor in enumerate(boundary.tensors):
        holder.register_buffer(f"const_{k}", tensor)
    script = torchscript.without_methods(holder.eval())
    script.define(_stub(len(boundary.inputs), len(boundary.outputs)))
    graph = script.graph
    clear(graph)
    graph.setInsertPoint(graph.block())
    this, *parameters = list(graph.inputs())
    names = {value: k for k, value in enumerate(boundary.constants)}

    def place(value: int) -> torch._C.Value | None:
        k = names.get(value)
        if k is None:
            return None
        return get_attribute(graph, this, f"const_{boundary.slots[k]}", TENSOR)

    known = {
        value: _read_number(graph, parameter, view.program.values[value].type())
        if number_dtype(view.program, value)
        else parameter
        for value, parameter in zip(boundary.inputs, parameters, strict=True)
    }
    copier = Copier(view.program, graph, view.scalar_lines, known, place)
    for index in boundary.lines:
        copier.copy(view.program.lines[index])
    results = [copier.value(v) for v in boundary.outputs]
    graph.registerOutput(results[0] if len(results) == 1 else pack(graph, results))
    graph.lint()
    return script


def _read_number(
    graph: torch._C.Graph, tensor: torch._C.Value, kind: torch._C.JitType
) -> torch._C.Value:
    """The int, float or bool in a 0-d tensor."""
    node = graph.create(_READERS[kind.kind()], [tensor], 1)
    graph.insertNode(node)
    node.output().setType(kind)
    return node.output()


def clear(graph: torch._C.Graph) -> None:
    """Remove the body of ``graph``; its inputs stay."""
    while list(graph.outputs()):
        graph.eraseOutput(0)
    for node in reversed(list(graph.nodes())):
        node.destroy()


def get_attribute(
    graph: torch._C.Graph, owner: torch._C.Value, name: str, kind: torch._C.JitType
) -> torch._C.Value:
    """``owner.name``, at the insertion point of ``graph``."""
    node = graph.create("prim::GetAttr", [owner], 1)
    node.s_("name", name)
    graph.insertNode(node)
    node.output().setType(kind)
    return node.output()


def pack(graph: torch._C.Graph, values: Sequence[torch._C.Value]) -> torch._C.Value:
    """A tuple of ``values``, at the insertion point of ``graph``."""
    node = graph.create("prim::TupleConstruct", list(values), 1)
    graph.insertNode(node)
    node.output().setType(torch._C.TupleType([v.type() for v in values]))
    return node.output()


def _stub(inputs: int, outputs: int) -> str:
    """Source of a forward with this many tensors in and out; its body only has to type-check."""
    names = [f"x{i}" for i in range(inputs)]
    parameters = "".join(f", {name}: Tensor" for name in names)
    result = "Tensor" if outputs == 1 else f"Tuple[{', '.join(['Tensor'] * outputs)}]"
    made = "torch.empty(0)"
    body = made if outputs == 1 else ", ".join([made] * outputs)
    return f"def forward(self{parameters}) -> {result}:\n    return {body}\n"
