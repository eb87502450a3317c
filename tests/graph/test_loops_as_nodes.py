# SPDX-License-Identifier: Apache-2.0
"""Which loops are one node, what they read and return, and which stay TorchScript."""

import pytest
import sympy
import torch
from cutting import assert_fx_same, assert_same, cut, pins, rebuilt, script

from blade.core.reason import Code
from blade.errors import Refused
from blade.graph.shapes.guards import relied_on
from blade.graph.torchscript.view import view

N = 4
SAMPLES = [(torch.randn(3, 5, N),), (torch.randn(2, 4, N),)]


class Loop(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = N
        self.w = torch.nn.Parameter(torch.randn(N, N) / N, requires_grad=False)


class LastState(Loop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.size(0), self.n)
        for t in range(x.size(1)):
            h = torch.tanh(x[:, t] + h @ self.w)
        return h


class Stacked(Loop):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.zeros(x.size(0), self.n)
        states: list[torch.Tensor] = []
        halves: list[torch.Tensor] = []
        for t in range(x.size(1)):
            h = torch.tanh(x[:, t] + h @ self.w)
            states.append(h)
            halves.append(h[:, : self.n // 2].unsqueeze(1))
        return torch.stack(states, -1), torch.cat(halves, 1)


class Written(Loop):
    """The first steps of a longer buffer, and all of another, in reverse order of reading."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.zeros(x.size(0), self.n)
        longer = torch.ones(x.size(0), x.size(1) + 2, self.n)
        every = torch.zeros_like(x)
        for t in range(x.size(1)):
            h = torch.tanh(x[:, x.size(1) - 1 - t] + h @ self.w)
            longer = torch.select_scatter(longer, h * t, 1, t)
            step = torch.ops.aten.copy(every[:][:, t], h)
            every = torch.slice_scatter(every, torch.select_scatter(every[:], step, 1, t), 0)
        return longer, every


class Shifted(Loop):
    """The state includes what was read last, as in RWKV."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, before = torch.zeros(x.size(0), self.n), torch.zeros(x.size(0), self.n)
        for t in range(x.size(1)):
            h = torch.tanh(x[:, t] - before + h)
            before = x[:, t]
        return h


class Nested(Loop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.size(2))
        for i in range(x.size(0)):
            for j in range(x.size(1)):
                h = torch.tanh(x[i, j] + h * j)
            h = h + i
        return h


@pytest.mark.parametrize("model", [LastState, Stacked, Written, Shifted, Nested])
def test_a_loop_is_one_cluster(model: type[Loop]) -> None:
    captured = script(model(), *SAMPLES)
    [whole] = cut(captured)
    assert whole.nodes == tuple(range(len(view(captured).nodes)))
    assert_fx_same([whole])
    more = [(torch.randn(1, 7, N),), (torch.randn(4, 1, N),)]
    optimized = rebuilt(captured)
    assert_same(optimized, captured, *more)
    assert "prim::Loop" not in str(optimized.graph)


def test_what_a_slice_or_a_list_takes_is_no_state() -> None:
    for model, state in [(Stacked, 1), (Written, 1), (Shifted, 2)]:
        [whole] = cut(script(model(), *SAMPLES))
        [call] = [n for n in whole.cluster.gm.graph.nodes if "run_loop" in str(n.target)]
        assert len(call.args[2]) == state


@pytest.mark.parametrize("model", [LastState, Written])
def test_one_iteration_is_as_good_as_many(model: type[Loop]) -> None:
    [whole] = cut(script(model(), *SAMPLES))
    gm, shape_env = whole.cluster.gm, whole.cluster.shape_env
    batch, length, _ = next(iter(gm.graph.nodes)).meta["val"].shape
    sizes = {batch.node.expr: sympy.Integer(3), length.node.expr: sympy.Integer(1)}
    for relation, _ in relied_on(gm, shape_env):
        assert relation.free_symbols <= sizes.keys(), relation
        assert relation.xreplace(sizes) == sympy.true, relation


class Breaks(Loop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x[:, 0]
        for t in range(x.size(1)):
            h = torch.tanh(x[:, t] + h)
            if bool(h.sum() > 100):
                break
        return h


class Counts(Loop):
    """As often as an element says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(self.n)
        for _ in range(int(x[0, 0, 0])):
            h = torch.tanh(h + 1)
        return h


class CarriesNumber(Loop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, scale = torch.zeros(self.n), 1.0
        for t in range(x.size(1)):
            h, scale = torch.tanh(h + x[0, t]) * scale, scale * 0.5
        return h


class Draws(Loop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(self.n)
        for t in range(x.size(1)):
            h = torch.tanh(h + x[0, t] * torch.rand_like(h))
        return h


class ReturnsView(Loop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x[:, 0]
        for t in range(x.size(1)):
            h = x[:, t]
        return h


class ListGoesOn(Loop):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        h = torch.zeros(self.n)
        for t in range(x.size(1)):
            h = torch.tanh(h + x[0, t])
            found.append(h)
        return found


class Selects(Loop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(self.n)
        for t in range(x.size(1)):
            h = torch.tanh(h + torch.masked_select(x[0, t], x[0, t] > 0).sum())
        return h


class ReadsSelected(Loop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.masked_select(x, x > 0) * 2
        h = torch.zeros(self.n)
        for t in range(x.size(1)):
            h = torch.tanh(h + chosen.sum() + x[0, t])
        return h


class AsOftenAsSelected(Loop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(self.n)
        for t in range(torch.nonzero(x > 0).size(0)):
            h = torch.tanh(h + t + x[0, 0])
        return h


class ReadsSelectedInBranch(Loop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.flatten()
        if x.size(0) > 1:
            y = torch.masked_select(x, x > 0)
        h = torch.zeros(self.n)
        for t in range(x.size(1)):
            h = torch.tanh(h + y.sum() + x[0, t])
        return h


@pytest.mark.parametrize(
    "model", [Selects, ReadsSelected, AsOftenAsSelected, ReadsSelectedInBranch]
)
def test_a_loop_with_sizes_that_may_depend_on_elements_stays(model: type[Loop]) -> None:
    captured = script(model(), *SAMPLES)
    graph_view = view(captured)
    assert not graph_view.loops
    [why] = [why for k, why in graph_view.excluded.items() if "Loop" in graph_view.nodes[k].name]
    assert "on elements" in why.detail


class SelectsLater(Loop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(self.n)
        for t in range(x.size(1)):
            h = torch.tanh(h + x[0, t])
        return torch.masked_select(h, h > 0)


def test_late_sizes_behind_a_loop_leave_it_a_node() -> None:
    captured = script(SelectsLater(), *SAMPLES)
    assert len(view(captured).loops) == 1


@pytest.mark.parametrize("model", [Breaks, Counts, CarriesNumber, Draws, ReturnsView, ListGoesOn])
def test_a_loop_that_stays(model: type[Loop]) -> None:
    captured = script(model(), *SAMPLES)
    assert pins(captured)["prim::Loop"] is Code.UNSUPPORTED_OP
    assert not view(captured).loops


class InnerOfOneThatStays(Loop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(self.n)
        for i in range(x.size(0)):
            for j in range(x.size(1)):
                h = torch.tanh(x[i, j] + h)
            for j in range(x.size(1)):
                h = torch.tanh(x[0, j] + h)
            h = h * torch.rand_like(h)
        return h


def test_a_loop_that_reads_the_index_of_one_that_stays() -> None:
    graph_view = view(script(InnerOfOneThatStays(), *SAMPLES))
    loops = [k for k, node in enumerate(graph_view.nodes) if "prim::Loop" in node.name]
    outer, first, second = loops
    assert list(graph_view.loops) == [second]
    assert "draws" in graph_view.excluded[outer].detail
    assert "index of a loop around" in graph_view.excluded[first].detail


class Changes(Loop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(1, self.n)
        for t in range(x.size(1)):
            h = torch.tanh(h + x[:, t])
        return h


def test_a_state_that_changes_its_size_is_refused_by_name() -> None:
    with pytest.raises(Refused, match="changes the size"):
        cut(script(Changes(), *SAMPLES))
