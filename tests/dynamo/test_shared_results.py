# SPDX-License-Identifier: Apache-2.0
"""Results that share memory in eager mode share it from torch.compile: code behind a graph break writes to them."""

from collections.abc import Callable

import graphs
import pytest
import torch

import blade
from blade.dynamo import backends

ALL = {"timing": False, "min_cluster_size": 1}
Results = tuple[torch.Tensor, ...]


def parts_of_a_written_constant(x: torch.Tensor) -> Results:
    a = torch.tensor([1.0])[0:1]
    b = a.squeeze()
    a[0] = 0
    return a, b, x * 2


def view_and_base(x: torch.Tensor) -> Results:
    y = (x * 2).relu()
    return y.view(-1), y, y[1:].view(-1), y.t()


def views_alone(x: torch.Tensor) -> Results:
    y = (x * 2).relu()
    return y.view(4, 3), y.flatten(), x + 1


def pieces(x: torch.Tensor) -> Results:
    return (x * 2).relu().split(2, 1)


@pytest.mark.needs("runtime")
@pytest.mark.parametrize("fn", [parts_of_a_written_constant, view_and_base, views_alone, pieces])
def test_a_write_to_one_is_seen_in_the_others(fn: Callable[[torch.Tensor], Results]) -> None:
    torch._dynamo.reset()
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    want, got = fn(x), torch.compile(fn, backend=blade.dynamo.disc, options=ALL)(x)
    for answer in (want, got):
        answer[0].fill_(7)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()
    assert any(c.backend == "disc" for report in graphs.reports() for c in report.clusters)


@pytest.mark.needs("runtime")
def test_what_is_saved_for_backward_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counts: list[int] = []
    monkeypatch.setattr(backends, "mark_shared_results", lambda nodes: counts.append(len(nodes)))
    w = torch.rand(4, 3, requires_grad=True)
    compiled = torch.compile(
        lambda x: ((x @ w).relu() @ w.T).sin(), backend=blade.dynamo.aot_disc, options=ALL
    )
    compiled(torch.rand(4, 4)).sum().backward()
    assert counts == [1]


@pytest.mark.needs("runtime")
def test_a_view_outlives_a_graph_break() -> None:
    def fn() -> torch.Tensor:
        a = torch.tensor([1])[0:1]
        b = a.squeeze()
        a[0] = 0
        if a[0] < 1e5:
            pass
        a[0] = 2
        return b

    torch._dynamo.reset()
    assert int(torch.compile(fn, backend=blade.dynamo.disc, options=ALL)()) == 2


@pytest.mark.needs("runtime")
def test_results_of_their_own_memory_keep_it() -> None:
    torch._dynamo.reset()
    x = torch.rand(3, 4)
    got = torch.compile(
        lambda x: (x * 2, x * 2, (x + 1).view(-1)), backend=blade.dynamo.disc, options=ALL
    )(x)
    assert len({one.untyped_storage().data_ptr() for one in got}) == 3
