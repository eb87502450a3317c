# SPDX-License-Identifier: Apache-2.0
"""The search behind ``python -m blade bisect``, for one backend.

found = Bisecting(captured, graph_view, backend, config).find(plan.labels)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from blade.backends.base import Backend
from blade.capture.captured import Captured
from blade.capture.compare import find_differences
from blade.cli.bisect import Found
from blade.config import Config
from blade.fallback.attempt import attempt
from blade.fallback.bisect import find_culprit
from blade.fallback.candidates import convert_and_verify
from blade.fallback.cluster_module import cluster_module
from blade.fallback.reproducer import write
from blade.graph.boundary import find_boundary
from blade.graph.extract import Extracted, outline
from blade.graph.group import group
from blade.graph.samples import Samples
from blade.graph.splice import splice
from blade.graph.view import GraphView
from blade.progress import announce
from blade.reason import Code, Reason, Stage

Placed = tuple[Extracted, torch.jit.ScriptModule]


@dataclass(frozen=True)
class Bisecting:
    """What every step needs."""

    captured: Captured
    view: GraphView
    backend: Backend
    config: Config

    def find(self, labels: Sequence[frozenset[str]]) -> Found:
        """The first difference; clusters are those of this backend alone, in program order."""
        own = [label & {self.backend.name.lower()} for label in labels]
        groups = group(self.view, own, min_size=self.config.min_cluster_size).groups
        self._samples.record(find_boundary(self.view, one.nodes) for one in groups)
        nothing = Found(self.backend.name, len(groups), None, None, None, None, ())
        placed: list[Placed] = []
        failed: list[Reason] = []
        for k, one in enumerate(groups):
            announce(self.backend.name, k, len(groups), f"cluster_{k}")
            built = self._build(f"cluster_{k}", one.nodes)
            if not isinstance(built, Reason):
                placed.append(built)
            elif built.stage is Stage.VERIFY:
                node, why = self._culprit(f"cluster_{k}", one.nodes, built)
                seen = self.view.nodes[node]
                found = replace(nothing, cluster=f"cluster_{k}", op=seen.name, source=seen.source)
                return replace(found, reason=why, not_built=tuple(failed))
            else:
                failed.append(built)
        return replace(self._whole(nothing, placed), not_built=tuple(failed))

    def _whole(self, nothing: Found, placed: Sequence[Placed]) -> Found:
        """With all clusters in place; if the model then differs, the cluster that makes it differ."""
        announce(f"{self.backend.name}, the whole model")

        def why_differs(rows: Sequence[int]) -> Reason | None:
            module = splice(self.captured, [placed[k] for k in rows])
            references, original = self.captured.references, self.captured.original
            for one, why in find_differences(module, references, original=original):
                detail = f"at {one.what} the module differs from the original: {why}"
                name = placed[rows[-1]][0].name
                return Reason(Stage.VERIFY, Code.WRONG_VALUES, self.backend.name, name, detail)
            return None

        if not placed or (reason := why_differs(range(len(placed)))) is None:
            return nothing
        last, reason = find_culprit(range(len(placed)), reason, why_differs)
        return replace(nothing, cluster=placed[last][0].name, reason=reason)

    def _culprit(self, name: str, nodes: Sequence[int], reason: Reason) -> tuple[int, Reason]:
        def why_fails(prefix: Sequence[int]) -> Reason | None:
            announce(f"{self.backend.name}, bisecting", what=f"{name}[:{len(prefix)}]")
            built = self._build(f"{name}[:{len(prefix)}]", prefix)
            # What cannot be built has no values that could differ.
            return built if isinstance(built, Reason) and built.stage is Stage.VERIFY else None

        return find_culprit(nodes, reason, why_fails)

    def _build(self, name: str, nodes: Sequence[int]) -> Placed | Reason:
        """A verified engine in its module, or why there is none."""
        extracted = attempt(Stage.CONVERT, None, name, lambda: self._extract(name, nodes))
        if isinstance(extracted, Reason):
            return extracted
        made = convert_and_verify(extracted.cluster, extracted.fallback, self.backend, self.config)
        if isinstance(made, Reason):
            if self.config.dump_dir is not None:
                write(self.config.dump_dir / "failures", extracted, self.backend, made, self.config)
            return made
        return extracted, cluster_module(extracted, made[0])

    def _extract(self, name: str, nodes: Sequence[int]) -> Extracted:
        [found] = outline(
            self.captured, self.view, [nodes], fixed=self._is_fixed, samples=self._samples
        )
        named = replace(found, name=name)
        _ = named.cluster  # what has no form in FX raises here
        return named

    @cached_property
    def _samples(self) -> Samples:
        return Samples(self.captured, self.view)

    def _is_fixed(self, name: str, axis: int) -> bool:
        """Whether the user declared one size for this axis of the graph's input ``name``."""
        _, *inputs = (v.debugName() for v in self.captured.module.graph.inputs())
        return name in inputs and (inputs.index(name), axis) in self.captured.fixed
