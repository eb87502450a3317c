# SPDX-License-Identifier: Apache-2.0
"""Models whose sizes depend on elements, and contents of which they select none, one and all."""

from typing import Any

import torch
from cutting import groups_of

from blade.backends.disc.backend import DiscBackend
from blade.config import Config
from blade.graph.torchscript.extract import extract
from blade.graph.torchscript.view import view

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
    return (
        weights @ kept,
        torch.nn.functional.layer_norm(kept, [4]),
        kept.cumsum(0),
        kept.sort(0)[0],
    )


def of_emptiness(x: torch.Tensor) -> Any:
    """Ops whose shape functions ask whether there is an element at all."""
    kept = x[x[:, 0] > -9]
    normal = torch.nn.functional.batch_norm(kept, torch.zeros(4), torch.ones(4))
    return normal.tanh(), torch.roll(kept, 1, 1) * 2


def of_lists(x: torch.Tensor) -> Any:
    found = x.nonzero()
    wide = found[:, 0].unsqueeze(1).expand(-1, 3)
    return found.reshape(-1).float() * 2, wide + 1, found.t().contiguous()


def of_counting(x: torch.Tensor) -> Any:
    """What is made of the size alone has to wait for it."""
    n = x[x > 0].shape[0]
    return torch.arange(n) * 2, torch.zeros(n, 3) + 1, x * n


ALL = [
    *(of_a_mask, of_rows, of_positions, of_where, of_two_masks, of_unique),
    *(of_consecutive, of_repeats, of_attention, of_emptiness, of_lists, of_counting),
]
