# SPDX-License-Identifier: Apache-2.0
"""The search behind ``python -m blade bisect``, for one backend.

found = BisectSearch(captured, graph_view, backend, config).find(plan.labels)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from blade.capture.equivalence import find_differences
from blade.cli.shared.bisect_result import BisectResult
from blade.config import Config
from blade.core.attempt import attempt
from blade.core.backend import Backend
from blade.core.captured import Captured
from blade.core.progress import announce
from blade.core.reason import Code, Reason, Stage
from blade.fallback.bisect import Failure, bisect, find_culprit
from blade.fallback.cluster_module import cluster_module
from blade.graph.torchscript.boundary import find_boundary
from blade.graph.torchscript.boundary_samples import BoundarySamples
from blade.graph.torchscript.extract import Extracted
from blade.graph.torchscript.group import cluster_blocks
from blade.graph.torchscript.splice import splice
from blade.graph.torchscript.view import GraphView
from blade.selection.build_candidates import convert_and_verify
from blade.selection.candidate_builder import CandidateBuilder, SubCluster
from blade.selection.reproducer import write

Placed = tuple[Extracted, torch.jit.ScriptModule]


@dataclass(frozen=True)
class BisectSearch:
    """The search for one backend."""

    captured: Captured
    view: GraphView
    backend: Backend
    config: Config

    def find(self, labels: Sequence[frozenset[str]]) -> BisectResult:
        """The first difference; only this backend's clusters are compared, in program order."""
        own = [label & {self.backend.name.lower()} for label in labels]
        groups = cluster_blocks(self.view, own, min_size=self.config.min_cluster_size).groups
        self._builder.samples.record(find_boundary(self.view, one.nodes) for one in groups)
        nothing = BisectResult(self.backend.name, len(groups), None, None, None, None, ())
        placed: list[Placed] = []
        failed: list[Reason] = []
        for k, one in enumerate(groups):
            announce(self.backend.name, k, len(groups), f"cluster_{k}")
            built = self._build(f"cluster_{k}", one.nodes)
            if not isinstance(built, Reason):
                placed.append(built)
            elif built.stage is Stage.VERIFY:
                node, why = self._culprit(Failure(f"cluster_{k}", one.nodes, one.label, built))
                seen = self.view.nodes[node]
                found = replace(nothing, cluster=f"cluster_{k}", op=seen.name, source=seen.source)
                return replace(found, reason=why, not_built=tuple(failed))
            else:
                failed.append(built)
        return replace(self._whole(nothing, placed), not_built=tuple(failed))

    def _whole(self, nothing: BisectResult, placed: Sequence[Placed]) -> BisectResult:
        """Compare the model with all clusters in place; if it differs, find the cluster that causes it."""
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

    def _culprit(self, failure: Failure) -> tuple[int, Reason]:
        def build(name: str, prefix: Sequence[int]) -> Reason | None:
            announce(f"{self.backend.name}, bisecting", what=name)
            built = self._build(name, prefix)
            # A cluster that cannot be built has no values that could differ.
            return built if isinstance(built, Reason) and built.stage is Stage.VERIFY else None

        return bisect(failure, build)

    def _build(self, name: str, nodes: Sequence[int]) -> Placed | Reason:
        """A verified engine in its module, or the reason why there is none."""
        part = SubCluster(name, nodes, [self.backend], self.backend.name)
        extracted = attempt(
            Stage.CONVERT, None, name, lambda: self._builder.prepare(part).extracted
        )
        if isinstance(extracted, Reason):
            return extracted
        cluster = attempt(Stage.CONVERT, None, name, lambda: extracted.cluster)
        if isinstance(cluster, Reason):
            return cluster
        made = convert_and_verify(cluster, extracted.fallback, self.backend, self.config)
        if isinstance(made, Reason):
            if self.config.dump_dir is not None:
                write(self.config.dump_dir / "failures", extracted, self.backend, made, self.config)
            return made
        return extracted, cluster_module(extracted, made[0])

    @cached_property
    def _builder(self) -> CandidateBuilder:
        samples = BoundarySamples(self.captured, self.view)
        return CandidateBuilder(self.captured, self.view, [self.backend], self.config, samples)
