# SPDX-License-Identifier: Apache-2.0
"""What a graph writes to its inputs: in place, once, and by whoever serves."""

from collections.abc import Callable
from typing import Any

import graphs
import pytest
import torch
from torch import nn

import blade


def accumulate(total: torch.Tensor, count: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).tanh()
    total.mul_(0.5).add_(y)
    count.add_(1)
    return y + 1


def compiled(fn: Callable[..., Any] = accumulate, backend: str = "aot_disc") -> Any:
    return torch.compile(
        fn, backend=getattr(blade.dynamo, backend), options={"min_cluster_size": 1}
    )


def follow(run: Any, totals: list[torch.Tensor], calls: int = 4) -> None:
    """``run`` on the first of ``totals`` does what eager does to the second."""
    counts = [torch.zeros((), dtype=torch.long) for _ in totals]
    for seed in range(calls):
        x = torch.randn(totals[0].shape, generator=torch.Generator().manual_seed(seed))
        addresses = [t.data_ptr() for t in (totals[0], counts[0])]
        got, want = (f(t, c, x) for f, t, c in zip((run, accumulate), totals, counts, strict=True))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(totals[0], totals[1])
        assert counts[0] == counts[1] == seed + 1
        assert addresses == [t.data_ptr() for t in (totals[0], counts[0])]


def programs() -> list[str]:
    served = [p.served for g in graphs.made() for p in g.parts if p.served is not None]
    return [one.engine().program() for one in served]


@pytest.mark.parametrize("backend", ["disc", "aot_disc"])
def test_nothing_is_copied(backend: str) -> None:
    follow(compiled(backend=backend), [torch.ones(5, 7), torch.ones(5, 7)])
    [program] = programs()
    assert program.count(" update ") == 2
    assert "aten::copy_" not in program
    assert [one.report().outside for one in graphs.made()] == [{}]


@pytest.mark.parametrize("layout", [lambda t: t.mT, lambda t: t[:, ::2], lambda t: t[1:, 2:]])
def test_other_layouts(layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    wholes = [torch.ones(6, 8), torch.ones(6, 8)]
    follow(compiled(), [layout(t) for t in wholes])
    torch.testing.assert_close(*wholes)
    assert all(n["engine_runs"] for n in graphs.stats().values())


def test_memory_given_twice() -> None:
    run = compiled()
    runs = []
    for fn in (run, accumulate):
        whole, count = torch.ones(8, 4), torch.zeros((), dtype=torch.long)
        fn(torch.ones(4, 4), count, torch.ones(4, 4))
        for _ in range(3):
            fn(whole[:4], count, whole[2:6])
            fn(whole[:4], count, whole[:4])
        runs.append(whole)
    torch.testing.assert_close(*runs)


def test_a_disabled_engine_leaves_the_write_to_the_original() -> None:
    run = compiled()
    follow(run, [torch.ones(3, 4), torch.ones(3, 4)])
    for one in graphs.made():
        for part in one.parts:
            if part.served is not None:
                part.served.engine().set_enabled(False)
    follow(run, [torch.ones(3, 4), torch.ones(3, 4)])


def test_an_engine_that_writes_wrong_values_does_not_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from blade.backends.disc.backend import DiscBackend

    real = DiscBackend.convert

    def convert(self: DiscBackend, cluster: Any, config: Any) -> torch.ScriptObject:
        for node in cluster.gm.graph.nodes:
            if node.target is torch.ops.aten.mul.Tensor and node.args[1] == 0.5:
                node.args = (node.args[0], 0.25)
        return real(self, cluster, config)

    monkeypatch.setattr(DiscBackend, "convert", convert)
    follow(compiled(), [torch.ones(3, 4), torch.ones(3, 4)])
    codes = [r.code for one in graphs.reports() for r in one.all_reasons()]
    assert blade.Code.WRONG_VALUES in codes


def test_autograd_hears_of_the_write() -> None:
    run = compiled()
    count, x = torch.zeros((), dtype=torch.long), torch.randn(3, 4)
    for _ in range(2):
        total = torch.ones(3, 4)
        out = torch.ones(3, 4, requires_grad=True) * total
        with torch.no_grad():
            run(total, count, x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_statistics_of_a_batch_norm_in_training() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3), nn.BatchNorm1d(3))
    run = torch.compile(model, backend=blade.dynamo.aot_disc, options={"min_cluster_size": 1})
    for _ in range(3):
        run(torch.randn(8, 6)).sum().backward()
    assert model[0].num_batches_tracked == 3
    forward = max(programs(), key=lambda text: text.count(" update "))
    assert forward.count(" update ") == 6
    [outside] = [one.report().outside for one in graphs.made() if "forward" in one.name]
    assert outside == {}
