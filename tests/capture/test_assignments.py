# SPDX-License-Identifier: Apache-2.0
"""``x[index] = value`` where the value is broadcast: torch's own trace holds for the sizes of the sample alone."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import blade
from blade.capture.capture import capture

DRAW = torch.Generator().manual_seed(0)
Assign = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def _set(x: torch.Tensor, index: object, value: torch.Tensor) -> None:
    x[index] = value


CASES: dict[str, Assign] = {
    "row of all": lambda x, rows, v: _set(x, (slice(None), slice(1, None)), v[0, 0]),
    "row of one": lambda x, rows, v: _set(x, 0, v[:1, :1]),
    "too many dimensions": lambda x, rows, v: _set(x, (0, 0), v[:1, :1]),
    "ellipsis": lambda x, rows, v: _set(x, (..., slice(0, 3)), v[:1, :1, :3]),
    "size": lambda x, rows, v: _set(x, (slice(None), x.shape[1] - 1), v[:1, 0]),
    "new dimension": lambda x, rows, v: _set(x, (None, slice(1)), v[:1]),
    "rows": lambda x, rows, v: _set(x, rows, v[rows]),
    "mask": lambda x, rows, v: _set(x, _mask(x, rows), v[_mask(x, rows)]),
    "mask of elements": lambda x, rows, v: _set(x, x > 0.5, v[:1, 0, 0]),
    "columns": lambda x, rows, v: _set(x, (slice(None), 0, rows), v[:, 0, rows]),
    "behind an ellipsis": lambda x, rows, v: _set(x, (..., rows), v[..., rows]),
    "two": lambda x, rows, v: _set(x, (rows, rows), v[rows, rows]),
    "two apart": lambda x, rows, v: _set(x, (rows, slice(1, None), rows), v[:1, :1, 0]),
    "pairs": lambda x, rows, v: _set(x, (rows[:, None], rows), v[:1, :1]),
    "too many dimensions for rows": lambda x, rows, v: _set(x, rows, v[None, rows]),
    "list": lambda x, rows, v: _set(x, [0, 1], v[:1]),
}


def _mask(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape[0]).index_fill(0, rows, 1) > 0


class Assigns(nn.Module):
    def __init__(self, assign: Assign) -> None:
        super().__init__()
        self.assign = assign

    def forward(self, x: torch.Tensor, rows: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        made = torch.tanh(x)
        self.assign(made, rows, v)
        return made * 2


def inputs(n: int, m: int, count: int) -> tuple[torch.Tensor, ...]:
    x, v = (torch.randn(n, m, 4, generator=DRAW) for _ in "xv")
    return x, torch.randperm(2, generator=DRAW)[:count], v


def others() -> Iterator[tuple[torch.Tensor, ...]]:
    for n, m, count in ((2, 3, 1), (2, 3, 2), (5, 3, 2), (3, 6, 1), (3, 2, 2), (4, 4, 0)):
        yield inputs(n, m, count)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [1, 2])
def test_a_value_is_broadcast_at_other_sizes(name: str, count: int) -> None:
    model = Assigns(CASES[name]).eval()
    sample = inputs(2, 3, count)
    found = capture(model, sample, blade.Config(allow_tracing=True))
    assert found.how == "trace" and len(found.paths) <= 1, found.paths
    for given in [sample, *others()]:
        torch.testing.assert_close(found.module(*given), model(*given), rtol=0, atol=0)
