# SPDX-License-Identifier: Apache-2.0
"""Op samples for backends that convert slowly: many samples in one model, one conversion, verdicts one by one.

    for found in judged(backend, SAMPLES, Config()): ...       # per sample: served, or every reason why not

The stages before a backend are the real ones: a model of many samples side by side is traced, viewed, each node
is shown to the backend, and what it takes is cut out, each sample by itself (a unit) and all together. All
together is converted, once; each unit is then verified on its own share of that engine, as production verifies
an engine, while the other samples' inputs stay what they were.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from op_compare import eager, sizes_of
from op_samples import Sample, inputs
from torch import nn
from torch.utils._pytree import tree_leaves

from blade.config import Config
from blade.core.attempt import attempt
from blade.core.backend import Backend
from blade.core.captured import Captured
from blade.core.cluster import Cluster
from blade.core.reason import Code, Reason, Stage
from blade.errors import Refused
from blade.graph.torchscript.boundary_samples import BoundarySamples
from blade.graph.torchscript.extract import Extracted, extract, outline
from blade.graph.torchscript.group import cluster_blocks
from blade.graph.torchscript.view import GraphView, view
from blade.report import Verdict
from blade.verification.verify import verify

IN_ONE_MODEL = 10  # shapes of more take longer than the conversions that are saved
Engine = Any
Convert = Callable[[Cluster], Engine]


@dataclass
class Found:
    """Of one sample: why the support table left nodes out, and how each unit of the rest fared.

    ``ops`` are the overloads in those units that passed.
    """

    sample: str
    refused: list[Reason] = field(default_factory=list)
    verdicts: list[Verdict | Reason] = field(default_factory=list)
    ops: set[str] = field(default_factory=set)

    @property
    def failures(self) -> list[Reason]:
        return [one for one in self.verdicts if isinstance(one, Reason)]


@dataclass(frozen=True)
class Model:
    """Several samples traced as one module; ``owner[k]`` is the sample that node k of ``graph`` is of."""

    captured: Captured
    graph: GraphView
    owner: tuple[str, ...]


class One(nn.Module):
    """The sample of copies of its inputs, so that none of its results shares memory with them."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.sample = sample

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = self.sample.function(*[t.clone() for t in tensors])
        return tuple(t for t in tree_leaves(made) if isinstance(t, torch.Tensor))


class Several(nn.Module):
    """Samples one after the other, each a submodule, by whose name its nodes are told from others'."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        super().__init__()
        self.ones = nn.ModuleList(map(One, samples))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(tensors)
        results: list[torch.Tensor] = []
        for one in self.ones:
            results += one(*[next(given) for _ in one.sample.specs])
        return tuple(results)


class Share:
    """A unit's part of an engine that computes several: the others get their own sample's inputs."""

    def __init__(self, engine: Engine, whole: Extracted, part: Extracted) -> None:
        self.engine = engine
        self.usual = whole.samples[0]
        self.takes = [whole.inputs.index(v) for v in part.inputs]
        self.gives = [whole.outputs.index(v) for v in part.outputs]

    def try_execute(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        given = list(self.usual)
        for place, tensor in zip(self.takes, tensors, strict=True):
            given[place] = tensor
        answers = self.engine.try_execute(given)
        return None if answers is None else [answers[k] for k in self.gives]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def models(samples: Sequence[Sample], count: int = IN_ONE_MODEL) -> Iterator[Model]:
    """All ``samples``, about ``count`` in a model."""
    for start in range(0, len(samples), count):
        yield traced(samples[start : start + count])


def traced(samples: Sequence[Sample]) -> Model:
    """One model, seen at the usual sizes and, as far as its trace holds there, at odd ones."""
    usual = [inputs(s, next(sizes_of(s))) for s in samples]
    module = Several(samples).eval()
    flat = tuple(t for own in usual for t in own)
    with torch.no_grad():
        trace = torch.jit.trace(module, flat, check_trace=False, strict=False)
        odd = [_odd(*one) for one in zip(samples, trace.ones.children(), usual, strict=True)]
        probe = tuple(t for own in odd for t in own)
        captured = Captured(torch.jit.freeze(trace), module, (flat,), (probe,), (), "trace")
    graph = view(captured)
    return Model(captured, graph, tuple(samples[k].name for k in _owners(graph)))


def _odd(
    sample: Sample, trace: Callable[..., Any], usual: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Inputs of odd sizes, where eager and the trace, which may have kept the usual sizes, take them."""
    _, sizes, *_ = sizes_of(sample)
    odd = inputs(sample, sizes)
    if eager(sample, odd) is None:
        return usual
    answer = attempt(Stage.CAPTURE, None, sample.name, lambda: trace(*odd))
    return usual if isinstance(answer, Reason) else odd


def _owners(graph: GraphView) -> list[int]:
    """Per node which of the submodules ``ones`` it is of: by its scope; what freezing makes has only neighbours."""
    scopes = [re.search(r"\bones\.(\d+)", node.source) for node in graph.nodes]
    known = {k: int(found[1]) for k, found in enumerate(scopes) if found}
    while len(known) < len(scopes):
        pairs = [pair for a, b, _ in graph.edges for pair in ((a, b), (b, a))]
        fresh = {a: known[b] for a, b in pairs if a not in known and b in known}
        assert fresh, [n for k, n in enumerate(graph.nodes) if k not in known]
        known |= fresh
    return [known[k] for k in range(len(scopes))]


def judged(
    backend: Backend, samples: Sequence[Sample], config: Config, count: int = IN_ONE_MODEL
) -> Iterator[Found]:
    """What became of each sample."""
    for model in models(samples, count):
        yield from judge(model, backend, config)


def judge(model: Model, backend: Backend, config: Config) -> list[Found]:
    """The same for the samples of one model."""
    found = {name: Found(name) for name in model.owner}
    rounds = _rounds(model, backend, config, found)
    known = BoundarySamples(model.captured, model.graph)
    for groups in rounds:
        parts = outline(model.captured, model.graph, groups, samples=known)
        units = [(model.owner[part.nodes[0]], part) for part in parts]
        ops = {name: part.cluster.ops for name, part in units}
        for name, verdict in _verdicts(model, units, known, backend, config):
            found[name].verdicts.append(verdict)
            found[name].ops.update(ops[name] if isinstance(verdict, Verdict) else ())
    return list(found.values())


def _rounds(
    model: Model, backend: Backend, config: Config, found: Mapping[str, Found]
) -> list[list[tuple[int, ...]]]:
    """What ``backend`` takes: in the first round the first group of every sample, and so on.

    Groups of one round are of different samples, so that they make one convex group together.
    """
    labels: list[frozenset[str]] = []
    for k, (node, name) in enumerate(zip(model.graph.nodes, model.owner, strict=True)):
        why = model.graph.excluded.get(k) or backend.why_not(node, config)
        if why is not None:
            found[name].refused.append(why)
        labels.append(frozenset() if why else frozenset({name}))
    rounds: list[list[tuple[int, ...]]] = []
    seen: dict[str, int] = {}
    for one in cluster_blocks(model.graph, labels).groups:
        name = model.owner[one.nodes[0]]
        place = seen[name] = seen.get(name, -1) + 1
        rounds += [[] for _ in range(place + 1 - len(rounds))]
        rounds[place].append(one.nodes)
    return rounds


def _verdicts(
    model: Model,
    units: Sequence[tuple[str, Extracted]],
    known: BoundarySamples,
    backend: Backend,
    config: Config,
) -> Iterator[tuple[str, Verdict | Reason]]:
    """Of each of ``units``; what cannot be converted together is halved until it is told who is to blame."""
    nodes = sorted(node for _, part in units for node in part.nodes)

    def converted() -> tuple[Extracted, Engine]:
        [whole] = extract(model.captured, model.graph, [nodes], samples=known)
        engine: Engine = backend.convert(whole.cluster, config)
        if engine.try_execute(list(whole.samples[0])) is None:
            why = engine.why_unavailable() or engine.last_error() or str(engine.stats())
            raise Refused(Code.ENGINE_RAISED, why)
        return whole, engine

    name = units[0][0] if len(units) == 1 else f"{len(units)} samples"
    made = attempt(Stage.CONVERT, backend.name, name, converted)
    if isinstance(made, Reason) and len(units) > 1:
        half = len(units) // 2
        yield from _verdicts(model, units[:half], known, backend, config)
        yield from _verdicts(model, units[half:], known, backend, config)
    elif isinstance(made, Reason):
        yield name, made
    else:
        whole, engine = made
        for name, part in units:
            if not {*part.inputs} <= {*whole.inputs} or not {*part.outputs} <= {*whole.outputs}:
                # freezing left a node that two samples share
                yield from _verdicts(model, [(name, part)], known, backend, config)
                continue
            share: Any = Share(engine, whole, part)
            yield name, verify(part.cluster, share, part.fallback, backend.name)
