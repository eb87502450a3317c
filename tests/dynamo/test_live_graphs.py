# SPDX-License-Identifier: Apache-2.0
"""live_graphs: what graphs keep between calls goes when another one needs memory."""

from typing import Any

import pytest
import torch

from blade.dynamo import compete, disc, live_graphs
from blade.dynamo.live_graphs import track, trim_others


class _Engine:
    trims = 0

    def stats(self) -> dict[str, int]:
        return {"calls": 3}

    def trim(self) -> None:
        self.trims += 1


class _Graph:
    def __init__(self, name: str) -> None:
        self.name, self.engine = name, _Engine()

    def engines(self) -> dict[str, _Engine]:
        return {f"{self.name}.cluster_0": self.engine}

    def report(self) -> Any:
        raise NotImplementedError


def test_graphs_of_one_number_keep_their_memory() -> None:
    names = ("graph_7.forward", "graph_7.backward", "graph_70", "graph_8.forward")
    graphs: list[Any] = [_Graph(name) for name in names]
    for graph in graphs:
        track(graph)
    trim_others("graph_7")
    assert [graph.engine.trims for graph in graphs] == [0, 0, 1, 1]
    assert live_graphs.stats()["graph_70.cluster_0"] == {"calls": 3}


def test_no_mode_sees_the_ops_of_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    depths = []
    verify = compete.verify

    def looks(*args: Any, **kwargs: Any) -> Any:
        depths.append(torch._C._len_torch_dispatch_stack())
        return verify(*args, **kwargs)

    monkeypatch.setattr(compete, "verify", looks)
    x = torch.randn(8, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval()
    assert torch.allclose(torch.compile(model, backend=disc)(x), model(x), atol=1e-6)
    assert depths and not any(depths)
