# SPDX-License-Identifier: Apache-2.0
"""Memory layouts that an engine's results may have, beside the original's at the same inputs.

    allowed = AllowedLayouts(cluster)
    like = allowed.of(got)                  # one tensor without memory per output, or None
    allowed.learn(layouts)                  # those of the original at the first inputs

Torch may choose other layouts at other sizes than at the first. In a graph of torch.compile, the ops around a cluster
were traced with the layout that the shape function of an op says; kernels that torch chooses among at run time have
others: of attention, one returns rows that hold all heads.
"""

from collections.abc import Sequence

import torch

from blade.core.cluster import Cluster
from blade.graph.shapes.fake_tensors import layout_at_hints
from blade.graph.shapes.memory_format import lies_as

Layouts = Sequence[torch.Tensor | None]


class AllowedLayouts:
    def __init__(self, cluster: Cluster) -> None:
        self._traced = _traced(cluster) if cluster.traced else []
        self._like: list[torch.Tensor | None] | None = None
        self._is_learnt = False

    def of(self, got: Sequence[torch.Tensor]) -> Layouts:
        """Of each of ``got``, an engine's results; those of the first call decide which traced ones are allowed."""
        if self._like is None:
            self._like = [None] * len(got)
            for i, (mine, traced) in enumerate(zip(got, self._traced, strict=False)):
                if traced is not None and lies_as(mine, traced):
                    self._like[i] = traced
        return self._like

    def learn(self, layouts: Sequence[torch.Tensor]) -> None:
        """Allow the layouts of the original's results, of the first call only."""
        if not self._is_learnt and self._like is not None:
            pairs = zip(self._like, layouts, strict=True)
            self._like = [theirs if mine is None else mine for mine, theirs in pairs]
            self._is_learnt = True


def _traced(cluster: Cluster) -> list[torch.Tensor | None]:
    [output] = [node for node in cluster.gm.graph.nodes if node.op == "output"]
    returned = output.args[0] if isinstance(output.args[0], (list, tuple)) else ()
    values = [x.meta.get("val") if isinstance(x, torch.fx.Node) else None for x in returned]
    return [_layout(value) for value in values]


def _layout(value: object) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return layout_at_hints(value)
    return None
