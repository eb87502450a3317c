# SPDX-License-Identifier: Apache-2.0
"""Graphs that write in place: their first calls are served by engines and by the user's graph in turns."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import blade
from blade.core.reason import Code, Reason
from blade.dynamo import backends, in_turns
from blade.dynamo.in_turns import PATIENCE, ROUNDS, InTurns


class Clock:
    """Seconds that pass where functions say so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(in_turns, "perf_counter", lambda: self.now)

    def function(self, name: str, *seconds: float) -> Any:
        """Each call takes the next of ``seconds``, and the last one from then on."""
        left = list(seconds)

        def call(*args: Any) -> str:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return name

        return call


@pytest.mark.parametrize(
    ("ours", "theirs", "want"), [(1.0, 2.0, "ours"), (1.0, 0.95, "ours"), (2.0, 1.0, "theirs")]
)
def test_the_faster_one_serves(
    monkeypatch: pytest.MonkeyPatch, ours: float, theirs: float, want: str
) -> None:
    clock, heard = Clock(monkeypatch), list[Reason]()
    both = InTurns(
        clock.function("ours", 9.0, ours), clock.function("theirs", 9.0, theirs), heard.append
    )
    x = torch.zeros(2)
    assert [both(x) for _ in range(2 * ROUNDS)] == ["ours", "theirs"] * ROUNDS
    assert [both(x) for _ in range(3)] == [want] * 3
    assert [why.code for why in heard] == ([Code.SLOWER] if want == "theirs" else [])


def test_sizes_that_change_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    both = InTurns(clock.function("ours", 2.0), clock.function("theirs", 1.0), pytest.fail)
    served = [both(torch.zeros(n)) for n in range(2 * PATIENCE)]
    assert served == ["ours"] * (2 * PATIENCE)
    assert both(torch.zeros(1)) == both(torch.zeros(1)) == "ours"


def test_what_raises_counts_as_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def fails(*args: Any) -> None:
        raise ValueError("as eager")

    both = InTurns(fails, clock.function("theirs", 1.0), pytest.fail)
    for _ in range(3):
        with pytest.raises(ValueError, match="as eager"):
            both(torch.zeros(2))


class Counts(nn.Module):
    """Each call writes to a part of a tensor that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(4, 8)

    def forward(self, x: torch.Tensor, at: int) -> torch.Tensor:
        self.seen[at] += x.sum(0)
        return self.seen.cumsum(0) * 2


@pytest.mark.needs("runtime")
@pytest.mark.parametrize("slow", [False, True])
def test_every_call_writes_once(monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    """Whoever serves it, and whoever wins."""
    torch._dynamo.reset()
    monkeypatch.setattr(in_turns, "MARGIN", 1e-9 if slow else 1e9)
    # engines serve whatever their time is
    monkeypatch.setattr(backends, "is_decided_by_calls", lambda graph, config: True)
    model = Counts().eval()
    twin = copy.deepcopy(model)
    options = {"min_cluster_size": 1, "timing": False}
    compiled = torch.compile(twin, backend=blade.dynamo.disc, options=options, dynamic=False)
    x = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for _ in range(2 * ROUNDS + 4):
            torch.testing.assert_close(compiled(x, 1), model(x, 1))
            torch.testing.assert_close(twin.seen, model.seen)
    report = blade.dynamo.reports()[-1]
    served = any(c.backend == "disc" for c in report.clusters)
    refused = any(r.code is Code.SLOWER and "writes in place" in r.detail for r in report.reasons)
    assert (served, refused) == (not slow, slow)
