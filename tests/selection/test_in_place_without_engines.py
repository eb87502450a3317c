# SPDX-License-Identifier: Apache-2.0
"""Where no engine serves, the model writes in place as it did: a functional one copies the whole for each part."""

import pytest
import torch
from saved import loaded
from torch import nn

import blade


class Steps(nn.Module):
    """A recurrence along columns of a buffer of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        for k in range(1, 4):
            out[:, k] += torch.tanh(out[:, k - 1])
        return out


def _writes(module: torch.jit.ScriptModule) -> int:
    return len(module.graph.findAllNodes("aten::add_"))


def _check(module: torch.jit.ScriptModule) -> None:
    for rows in (5, 2, 9):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        given = x.clone()
        torch.testing.assert_close(module(given), Steps()(x))
        assert torch.equal(given, x)


def test_it_writes_in_place_where_no_engine_serves() -> None:
    optimized = blade.optimize(
        Steps().eval(), torch.randn(5, 4), blade.Config(min_cluster_size=1000)
    )
    assert all(c.backend == "torchscript" for c in blade.report(optimized).clusters)
    assert _writes(optimized) == 3
    _check(optimized)
    _check(loaded(optimized))


def test_it_writes_in_place_where_engines_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    from blade.selection.plan import assemble

    monkeypatch.setattr(assemble, "_ranked", lambda *_: [])
    optimized = blade.optimize(Steps().eval(), torch.randn(5, 4))
    assert _writes(optimized) == 3
    _check(optimized)


def test_engines_take_the_functional_form() -> None:
    optimized = blade.optimize(
        Steps().eval(), torch.randn(5, 4), blade.Config(timing=False, optimization_pipeline="DISC")
    )
    [only] = blade.report(optimized).clusters
    assert only.backend == "disc" and not blade.report(optimized).outside
    assert _writes(optimized) == 0
    _check(optimized)


def test_other_writes_are_not_kept_twice() -> None:
    """In place or not, a whole tensor is written once."""

    class Whole(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu_(x * 2.0)

    from blade.capture.capture import capture

    assert capture(Whole().eval(), torch.randn(3), blade.Config()).in_place is None
    assert capture(Steps().eval(), torch.randn(5, 4), blade.Config()).in_place is not None
