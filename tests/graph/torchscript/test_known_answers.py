# SPDX-License-Identifier: Apache-2.0
"""The runs that a view is made from tell what the fallback of a group answers, where it runs the same ops."""

import pytest
import torch
from cutting import cut, trace

from blade.core.captured import Captured
from blade.graph.torchscript import observe_values
from blade.graph.torchscript.extract import extract
from blade.graph.torchscript.view import observe_runs, view

X, WIDER = torch.randn(3, 4), torch.randn(5, 4)


class Affine(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return y, y.softmax(-1)


def affine() -> Captured:
    return trace(Affine(), (X,), (WIDER,))


def test_a_group_that_begins_at_the_inputs_has_the_answers_of_its_fallback() -> None:
    [extracted] = cut(affine())
    runs = [*extracted.samples, *extracted.probes]
    assert len(extracted.answers) == len(runs) == 2
    for inputs, answers in zip(runs, extracted.answers, strict=True):
        with torch.no_grad():
            wanted = extracted.fallback(*inputs)
        assert [t.stride() for t in answers] == [t.stride() for t in wanted]
        assert all(map(torch.equal, answers, wanted))


def test_a_group_inside_the_graph_has_none() -> None:
    captured = affine()
    first, *_ = extract(captured, view(captured), [[1], [0]])
    assert first.cluster.ops == ("aten.softmax.int",)
    assert first.answers == ()


def test_a_group_whose_results_are_not_returned_has_none() -> None:
    captured = trace(lambda x: (x.sin().cos(),), (X,))
    [extracted] = extract(captured, view(captured), [[0]])
    assert extracted.answers == ()


def test_beside_an_op_that_writes_in_place_there_are_none() -> None:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.cos()
        y.add_(1)
        return x.sin(), y

    seen = cut(trace(forward, (X,)))
    assert seen
    assert all(one.answers == () for one in seen)


def test_facts_that_are_known_without_a_run_give_none() -> None:
    captured = affine()
    seen = view(captured, lambda program, _: observe_runs(captured, program))
    [extracted] = extract(captured, seen, [[0, 1]])
    assert extracted.answers == ()


def test_results_of_too_many_bytes_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe_values, "KEPT", 4 * 2 * 3 * 6)  # those of the sample alone
    [extracted] = cut(affine())
    assert extracted.answers == ()
