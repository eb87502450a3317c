# SPDX-License-Identifier: Apache-2.0
"""find_size_dispatch: where several engines are worth it, where the borders lie, and what is looked at."""

from typing import Any

import pytest
import torch

from blade.report import Timing, Verdict
from blade.selection.plan.candidate import Candidate
from blade.selection.plan.size_dispatch import DispatchAxis, SizeDispatch, find_size_dispatch

LENGTHS = (16, 64, 256)


def inputs(*lengths: int) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.ones(2, n, 8), torch.ones(2, n)) for n in lengths]


def candidate(backend: str, *speeds: float, spread: float = 0.0) -> Candidate:
    timings = tuple(Timing(((2, 3),), s, 1.0, spread) for s in speeds)
    engine: Any = backend
    return Candidate(backend, engine, engine, Verdict(1, 0, 0.0), timings)


def find(*candidates: Candidate, **more: Any) -> SizeDispatch | None:
    return find_size_dispatch(candidates, inputs(*LENGTHS), **more)


def test_each_serves_where_it_wins_and_the_border_is_the_geometric_mean() -> None:
    table = find(candidate("a", 4.0, 3.0, 1.0), candidate("b", 1.0, 1.5, 2.0))
    assert table is not None
    assert str(table) == "x0.size(1) <= 128: a, else b"
    assert table.bounds == (128,)
    assert [t.speedup for t in table.timings] == [4.0, 3.0, 2.0]
    assert table.backend == "a+b"
    assert table.dispatch().serving == ("a", "b")


def test_the_original_may_serve_some_sizes() -> None:
    table = find(candidate("a", 3.0, 0.5, 0.4))
    assert table is not None
    assert str(table) == "x0.size(1) <= 32: a, else torchscript"
    assert table.backend == "a+torchscript"
    assert [t.speedup for t in table.timings] == [3.0]


def test_one_engine_in_two_places_is_held_once() -> None:
    table = find(candidate("a", 3.0, 1.0, 3.0), candidate("b", 1.0, 2.0, 1.0))
    assert table is not None
    assert [c.backend if c else None for c in table.serving] == ["a", "b", "a"]
    assert len(table.engines) == 2


@pytest.mark.parametrize(
    "candidates",
    [
        [candidate("a", 2.0, 2.0, 2.0)],
        [candidate("a", 2.0, 2.0, 2.0), candidate("b", 1.0, 1.5, 2.02)],  # not worth telling
        [candidate("a", 2.0, 2.0, 2.0), candidate("b", 1.0, 1.5, 2.5, spread=0.4)],  # noise
        [candidate("a", 2.0, 2.0)],  # not measured everywhere
        [],
    ],
)
def test_a_table_has_to_pay(candidates: list[Candidate]) -> None:
    assert find(*candidates) is None


def test_weights_count() -> None:
    both = candidate("a", 2.0, 2.0, 2.0), candidate("b", 1.0, 1.0, 2.3)
    assert find(*both, weights=[1, 1, 1]) is not None
    assert find(*both, weights=[50, 50, 1]) is None


def test_what_is_looked_at() -> None:
    together = find_size_dispatch([candidate("a", 2.0, 0.5)], inputs(4, 8))
    assert together is not None
    assert together.size == DispatchAxis((0, 1), 2)
    apart = [(torch.ones(2, 4), torch.ones(3)), (torch.ones(5, 4), torch.ones(9))]
    table = find_size_dispatch([candidate("a", 2.0, 0.5)], apart)
    assert table is not None
    assert table.size.source() == "x0.numel() + x1.numel()"
    assert table.bounds == (17,)  # of 11 and 29 elements
    assert find_size_dispatch([candidate("a", 2.0, 0.5)], inputs(4, 4)) is None
