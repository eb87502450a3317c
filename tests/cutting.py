# SPDX-License-Identifier: Apache-2.0
"""Small models captured by hand, cut into clusters, put together again without engines."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from blade.core.captured import Captured
from blade.core.reason import Code
from blade.fallback.cluster_module import cluster_module
from blade.graph.torchscript.extract import Extracted, extract
from blade.graph.torchscript.group import cluster_blocks
from blade.graph.torchscript.splice import splice
from blade.graph.torchscript.view import GraphView, view

Sample = tuple[Any, ...]


class Plain(torch.nn.Module):
    """A function as a module, for tracing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def trace(model: torch.nn.Module | Callable[..., Any], sample: Sample, *probes: Sample) -> Captured:
    """``model`` traced on a copy of ``sample`` and frozen."""
    module = model if isinstance(model, torch.nn.Module) else Plain(model)
    with torch.no_grad():
        traced = torch.jit.trace(
            module.eval(), copy.deepcopy(sample), check_trace=False, strict=False
        )
    return Captured(torch.jit.freeze(traced), module, (sample,), probes, (), "trace")


def script(
    model: torch.nn.Module, sample: Sample, *probes: Sample, keep: Sequence[str] = ()
) -> Captured:
    """``model`` scripted and frozen, with the attributes ``keep`` preserved."""
    frozen = torch.jit.freeze(torch.jit.script(model.eval()), preserved_attrs=list(keep))
    return Captured(frozen, model, (sample,), probes, (), "script")


def groups_of(seen: GraphView, loops: bool = True) -> list[tuple[int, ...]]:
    """The groups clustering makes if one backend takes all that is not pinned, with ``loops`` whole ones."""
    apart = {*seen.excluded, *(() if loops else seen.loops)}
    labels = [
        frozenset[str]() if index in apart else frozenset({"any"})
        for index in range(len(seen.nodes))
    ]
    return [found.nodes for found in cluster_blocks(seen, labels).groups]


def cut(captured: Captured, loops: bool = True) -> list[Extracted]:
    """All clusters of ``captured``."""
    seen = view(captured)
    return extract(captured, seen, groups_of(seen, loops))


def rebuilt(captured: Captured, loops: bool = True) -> torch.jit.ScriptModule:
    """``captured`` with every cluster cut out and called, without engines."""
    return splice(captured, [(c, cluster_module(c, None)) for c in cut(captured, loops)])


def pins(captured: Captured) -> dict[str, Code]:
    """Op name -> why it is pinned, for pinned nodes."""
    seen = view(captured)
    return {
        seen.program.lines[seen.units[i].lines[0]].kind: r.code for i, r in seen.excluded.items()
    }


def ops(clusters: Sequence[Extracted]) -> list[list[str]]:
    """Names of the ATen ops in each cluster."""
    return [[op.removeprefix("aten.").split(".")[0] for op in c.cluster.ops] for c in clusters]


def run(module: Callable[..., Any], inputs: Sample) -> tuple[Any, Sample]:
    """What ``module`` answers, and its inputs afterwards."""
    own = copy.deepcopy(inputs)
    with torch.no_grad():
        return module(*own), own


def assert_same(module: Callable[..., Any], captured: Captured, *more: Sample) -> None:
    """``module`` answers, and leaves its inputs, exactly as the captured graph does."""
    for inputs in (*captured.samples, *captured.probes, *more):
        expected, left_expected = run(captured.module, inputs)
        answer, left = run(module, inputs)
        torch.testing.assert_close(answer, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(left, left_expected, rtol=0, atol=0)


def assert_fx_same(clusters: Sequence[Extracted]) -> None:
    """FX graph and fallback of each cluster agree at all its samples and probes."""
    for extracted in clusters:
        runs = [*extracted.cluster.samples, *extracted.cluster.probes]
        assert runs, extracted.cluster.name
        for inputs in runs:
            with torch.no_grad():
                fx = extracted.cluster.gm(*inputs)
                script = extracted.fallback(*inputs)
            answer = (script,) if isinstance(script, torch.Tensor) else script
            torch.testing.assert_close(fx, answer, rtol=1e-6, atol=1e-6)
