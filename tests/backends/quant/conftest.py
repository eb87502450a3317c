# SPDX-License-Identifier: Apache-2.0
"""Small models with layers that differ in how well they take int8, and their clusters."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from blade.capture.capture import capture
from blade.config import Config
from blade.core.cluster import Cluster
from blade.graph.torchscript.extract import extract
from blade.graph.torchscript.listing import check_nodes
from blade.graph.torchscript.view import view

Make = Callable[..., Cluster]


@pytest.fixture
def cluster_of() -> Make:
    """``cluster_of(model, samples)``: the whole model as one cluster."""

    def make(
        model: nn.Module, samples: Sequence[torch.Tensor | tuple[torch.Tensor, ...]]
    ) -> Cluster:
        captured = capture(model.eval(), list(samples), Config(enable_int8=True))
        graph = view(captured)
        [extracted] = extract(
            captured, graph, [sorted({*range(len(graph.nodes))} - check_nodes(graph))]
        )
        return extracted.cluster

    return make
