# SPDX-License-Identifier: Apache-2.0
"""Modes of torch around a call: forward-mode AD and autocast go to the original."""

import pytest
import torch
import torch.autograd.forward_ad as fwad
from fake_backends import produces
from torch import nn

import blade
from blade.core.reason import Code

pytestmark = pytest.mark.needs("runtime", "torch_mlir")
CONFIG = blade.Config(optimization_pipeline="DISC", timing=False)
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def both() -> tuple[torch.jit.ScriptModule, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).eval()
    return blade.optimize(model, X, CONFIG), model


def test_tangents_are_not_dropped(both) -> None:
    optimized, model = both
    tangent = torch.randn_like(X)
    for x in (X, X[:1]):
        with fwad.dual_level(), torch.no_grad():
            dual = fwad.make_dual(x, tangent[: len(x)])
            got, want = fwad.unpack_dual(optimized(dual)), fwad.unpack_dual(model(dual))
        assert got.tangent is not None
        torch.testing.assert_close(got.tangent, want.tangent)
    assert blade.stats(optimized)["cluster_0"][Code.GUARD_GRAD.value] == 2


@produces(Code.GUARD_AUTOCAST)
def test_autocast_is_obeyed_at_every_shape(both) -> None:
    optimized, model = both
    for x in (X, X[:1], torch.randn(33, 16)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            got, want = optimized(x), model(x)
        assert got.dtype == want.dtype == torch.bfloat16
        torch.testing.assert_close(got, want)
        assert optimized(x).dtype == torch.float32
    stats = blade.stats(optimized)["cluster_0"]
    assert stats[Code.GUARD_AUTOCAST.value] == 3 and stats["engine_runs"] >= 3


def test_a_model_optimized_under_autocast_is_served_there() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        optimized = blade.optimize(model, X, CONFIG)
        before = blade.stats(optimized)
        got, want = optimized(X), model(X)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    after = blade.stats(optimized)
    assert all(after[name].get(Code.GUARD_AUTOCAST.value, 0) == 0 for name in after)
    assert all(after[n]["engine_runs"] == before[n]["engine_runs"] + 1 for n in after)
