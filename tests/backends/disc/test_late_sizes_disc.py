# SPDX-License-Identifier: Apache-2.0
"""Sizes that depend on elements stay inside one engine: its answers at contents that select none, one and all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cutting import Plain, groups_of, script, trace

from blade.backends.disc.backend import DiscBackend
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.reference.interpret_graph import interpret
from blade.config import Config
from blade.core.reason import Code
from blade.graph.torchscript.extract import extract
from blade.graph.torchscript.view import view

pytestmark = pytest.mark.needs("runtime", "torch_mlir")

Sample = tuple[torch.Tensor, ...]
SAMPLE = torch.tensor([[0.5, -1.0, 2.0, 0.25], [-0.5, 3.0, -2.0, 1.0], [1.0, 1.0, -3.0, 0.0]])
ONE = -torch.ones(3, 4)
ONE[1, 2] = 5.0
CONTENTS = {
    "some": SAMPLE,
    "none": -torch.ones(3, 4),
    "one": ONE,
    "all": torch.ones(3, 4) / 2,
    "another size": torch.randn(5, 4, generator=torch.Generator().manual_seed(1)),
    "empty": torch.empty(0, 4),
}


def cut_of(captured: Any) -> Any:
    """The one cluster that everything in ``captured`` is, by DISC's support."""
    seen = view(captured)
    takes = [i for i, n in enumerate(seen.nodes) if DiscBackend().why_not(n, Config()) is None]
    assert len(takes) == len(seen.nodes), [
        n.name for i, n in enumerate(seen.nodes) if i not in takes
    ]
    assert not seen.excluded, [r.detail for r in seen.excluded.values()]
    [group] = groups_of(seen)
    [cut] = extract(captured, seen, [group])
    return cut


def check(
    function: Callable[..., Any], samples: list[Sample], how: Any = trace, declines: int = 0
) -> Any:
    """Trace ``function`` at the first sample, and compare its engine and the interpreter at all of them."""
    module = function if isinstance(function, torch.nn.Module) else Plain(function)
    cut = cut_of(how(module, *samples))
    engine: Any = DiscBackend().convert(cut.cluster, Config())
    assert not engine.why_unavailable(), engine.why_unavailable()
    graph = lower(cut.cluster.gm, cut.cluster.shape_env)
    for inputs in (*cut.samples, *cut.probes):
        want = cut.fallback(*inputs)
        want = [want] if isinstance(want, torch.Tensor) else list(want)
        got = engine.try_execute(list(inputs))
        if got is None:
            declines -= 1
            continue
        for answer in (got, interpret(graph, inputs)):
            for a, b in zip(answer, want, strict=True):
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, equal_nan=True)
    assert declines == 0, engine.last_error() or engine.stats()
    assert not engine.last_error()
    return engine


def every(*rest: torch.Tensor) -> list[Sample]:
    return [(x, *rest) for x in CONTENTS.values()]


def of_a_mask(x: torch.Tensor) -> Any:
    y = x * 2 + 1
    z = y[y > 0].exp() * 3
    return z.sum() / z.shape[0], z


def of_rows(x: torch.Tensor) -> Any:
    kept = x[x.sum(1) > 0]
    return torch.softmax(kept @ kept.new_ones(4, 3), 1), kept.mean(0)


def of_positions(x: torch.Tensor) -> Any:
    rows, columns = (x > 0).nonzero().unbind(1)
    return x[rows, columns] + 1, torch.cat([rows, columns]) * 2


def of_where(x: torch.Tensor) -> Any:
    rows, columns = torch.where(x > 0)
    return (rows + columns).float().exp().sum(), columns - rows


def of_two_masks(x: torch.Tensor) -> Any:
    a = torch.masked_select(x, x > 0).tanh()
    b = a[a > 0.5]
    return torch.cat([a * 2, b]), b.sum(), a.shape[0] + torch.zeros(2)


def of_unique(x: torch.Tensor) -> Any:
    found, where, counts = torch.unique(x.round(), return_inverse=True, return_counts=True)
    return found * 2, where, counts.float() / counts.sum()


def of_consecutive(x: torch.Tensor) -> Any:
    return torch.unique_consecutive((x > 0).long()) + 1


def of_repeats(x: torch.Tensor) -> Any:
    counts = (x > 0).sum(1)
    wide = x.exp().repeat_interleave(counts, dim=0)
    return wide + 1, torch.repeat_interleave(counts)


def of_attention(x: torch.Tensor) -> Any:
    kept = x[x[:, 0] > 0]
    weights = torch.softmax(kept @ kept.t(), -1)
    return weights @ kept, torch.nn.functional.layer_norm(kept, [4]), kept.cumsum(0), kept.sort(0)[0]


def of_lists(x: torch.Tensor) -> Any:
    found = x.nonzero()
    wide = found[:, 0].unsqueeze(1).expand(-1, 3)
    return found.reshape(-1).float() * 2, wide + 1, found.t().contiguous()


def of_counting(x: torch.Tensor) -> Any:
    """What is made of the size alone has to wait for it."""
    n = x[x > 0].shape[0]
    return torch.arange(n) * 2, torch.zeros(n, 3) + 1, x * n


@pytest.mark.parametrize(
    "function",
    [
        *(of_a_mask, of_rows, of_positions, of_where, of_two_masks),
        *(of_unique, of_consecutive, of_repeats, of_attention, of_lists, of_counting),
    ],
)
def test_sizes_that_a_trace_has(function: Callable[..., Any]) -> None:
    samples = every()
    if function is of_a_mask:
        samples.append((SAMPLE[:, :1],))
    check(function, samples)


class Script(torch.nn.Module):
    def __init__(self, k: int = 2) -> None:
        super().__init__()
        self.k = k


class Narrow(Script):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x[: int(n)].exp() + 1


class Topk(Script):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = torch.topk(x, int(n) + 1, dim=1)
        return values * 2, places


class Made(Script):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = int(n.max())
        return torch.arange(k) + 1, torch.zeros([k, x.size(1)]) + x.sum(0)


class Parts(Script):
    def forward(
        self, x: torch.Tensor, n: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        k = int(n)
        return x[:, k : k + 1].exp(), x[k:] * 2, x.new_full([k + 1], 2.0).tanh()


class OfASelection(Script):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = x[x > 0]
        return chosen.view(-1, 1) * 2, chosen[: int(n)].exp()


@pytest.mark.parametrize("module", [Narrow(), Topk(), Made(), Parts(), OfASelection()])
def test_numbers_that_are_read(module: torch.nn.Module) -> None:
    samples = [(SAMPLE, torch.tensor(n)) for n in (2, 1, 0, 3)]
    if isinstance(module, OfASelection):
        samples += every(torch.tensor(1))
    check(module, samples, how=script)


class Scaled(Script):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x * int(n)


class Along(Script):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x.softmax(dim=int(n))


@pytest.mark.parametrize("module", [Scaled(), Along()])
def test_a_number_that_is_no_size_stays_outside(module: torch.nn.Module) -> None:
    """It may be negative, or decide about the program."""
    seen = view(script(module, (SAMPLE, torch.tensor(1))))
    [read] = [i for i, n in enumerate(seen.nodes) if "aten::Int" in n.name]
    assert seen.excluded[read].code is Code.DATA_DEPENDENT


def test_a_negative_number_is_declined() -> None:
    samples = [(SAMPLE, torch.tensor(n)) for n in (2, 1, -1, 2)]
    engine = check(Narrow(), samples, how=script, declines=1)
    assert engine.stats()["guard_shape"] == 1


def test_sizes_that_have_to_agree() -> None:
    """A selection of as many elements as another input has; one element would be broadcast, and is declined."""
    w = torch.randn(6)
    some = torch.tensor([1.0, -1, 2, 3, 4, 5, 6])
    one = torch.tensor([-1.0, -1, -2, 3, -4, -5, -6])
    check(lambda x, w: x[x > 0] + w, [(some, w), (some[1:], w[1:]), (one, w)], declines=1)
