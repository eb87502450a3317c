# SPDX-License-Identifier: Apache-2.0
"""Scripted loops as a user writes them: one engine, at any length, also from a file."""

import io

import pytest
import torch
from torch import nn

import blade

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]
CONFIG = blade.Config(optimization_pipeline="disc", timing=False, cache=False)
WIDTH, STATES = 8, 4


class SelectiveScan(nn.Module):
    """The recurrence of Mamba."""

    def __init__(self) -> None:
        super().__init__()
        self.states = STATES
        self.a = nn.Parameter(-torch.rand(WIDTH, STATES))
        self.d = nn.Parameter(torch.randn(WIDTH))
        self.step = nn.Linear(WIDTH, WIDTH)
        self.bc = nn.Linear(WIDTH, 2 * STATES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = nn.functional.softplus(self.step(x)).unsqueeze(-1)
        b, c = self.bc(x).split(self.states, dim=-1)
        decay, given = torch.exp(step * self.a), step * b.unsqueeze(2) * x.unsqueeze(-1)
        h = torch.zeros(x.size(0), x.size(2), self.states)
        found: list[torch.Tensor] = []
        for t in range(x.size(1)):
            h = decay[:, t] * h + given[:, t]
            found.append((h * c[:, t].unsqueeze(1)).sum(-1))
        return torch.stack(found, 1) + x * self.d


class Lstm(nn.Module):
    """Two states, of which the caller gives the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)

    def forward(
        self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for t in range(x.size(1)):
            i, f, g, o = (self.x(x[:, t]) + self.h(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h, c


def test_a_selective_scan_is_one_engine() -> None:
    model = SelectiveScan().eval()
    optimized = blade.optimize(torch.jit.script(model), torch.randn(3, 5, WIDTH), CONFIG)
    assert "prim::Loop" not in str(optimized.graph)
    [cluster] = blade.report(optimized).clusters
    assert cluster.backend == "disc"
    buffer = io.BytesIO()
    torch.jit.save(optimized, buffer)
    loaded = torch.jit.load(io.BytesIO(buffer.getvalue()))
    shapes = [(3, 5), (2, 9), (1, 1), (4, 2), (3, 5)]
    with torch.no_grad():
        for batch, length in shapes:
            x = torch.randn(batch, length, WIDTH)
            for module in (optimized, loaded):
                torch.testing.assert_close(module(x), model(x))
    for module in (optimized, loaded):
        [stats] = blade.stats(module).values()
        assert stats["engine_runs"] == len(shapes), stats


def test_a_loop_that_does_not_run_returns_what_the_caller_gave() -> None:
    model = Lstm().eval()

    def inputs(batch: int, length: int) -> tuple[torch.Tensor, ...]:
        return (
            torch.randn(batch, length, WIDTH),
            torch.randn(batch, WIDTH),
            torch.randn(batch, WIDTH),
        )

    optimized = blade.optimize(torch.jit.script(model), inputs(3, 5), CONFIG)
    with torch.no_grad():
        for batch, length in [(3, 5), (2, 8), (1, 1)]:
            given = inputs(batch, length)
            torch.testing.assert_close(optimized(*given), model(*given))
        x, h, c = inputs(2, 0)
        assert optimized(x, h, c)[0].data_ptr() == h.data_ptr()
    [stats] = blade.stats(optimized).values()
    assert (stats["engine_runs"], stats["guard_shape"]) == (3, 1), stats


def test_a_recurrent_layer_takes_a_state_of_its_batch() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True)

        def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, h = self.layer(x.relu(), h)
            return x * 2, h

    model = Layer().eval()
    optimized = blade.optimize(model, (torch.randn(3, 5, WIDTH), torch.randn(4, 3, WIDTH)), CONFIG)
    for batch, length in ((3, 5), (1, 1), (6, 2), (2, 7)):
        given = torch.randn(batch, length, WIDTH), torch.randn(4, batch, WIDTH)
        torch.testing.assert_close(optimized(*given), model(*given))
    [stats] = blade.stats(optimized).values()
    assert stats["engine_runs"] == stats["calls"] == 4


def test_a_recurrent_layer_over_chosen_times_is_torchs() -> None:
    """How many times there are depends on elements: a loop's plan is made before, so that ATen computes the layer."""

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            y = self.layer(y[y[:, 0, 0] > 0].exp())[0]
            return y + 1

    model = Chosen().eval()
    optimized = blade.optimize(model, torch.randn(9, 3, WIDTH), CONFIG)
    for length in (9, 20, 4):
        x = torch.randn(length, 3, WIDTH)
        x[0, 0, 0] = 1.0
        torch.testing.assert_close(optimized(x), model(x))
    [stats] = blade.stats(optimized).values()
    assert stats["engine_runs"] == stats["calls"] == 3 and not blade.report(optimized).outside
