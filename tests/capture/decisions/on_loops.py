# SPDX-License-Identifier: Apache-2.0
"""Loops, recursion, sorting and containers whose extent or order tensors decide."""

from functools import reduce

import torch
from decision_table import Draw, decides
from on_values import Layer, rows
from torch import nn


@decides(
    "while float(error) > tolerance", lambda d: (d.normal(3, 8, scale=d.pick(0.125, 1.0, 8.0)),)
)
class UntilConverged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        with torch.no_grad():
            self.linear.weight.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, error = torch.zeros_like(x), x.abs().max()
        while float(error) > 0.05:  # decides
            new = torch.tanh(self.linear(y) + x)
            error = (new - y).abs().max()
            y = new
        return y * 2


@decides("while True with a break by a value", lambda d: (d.normal(3, 8, scale=d.number(0.2, 40)),))
class BreaksByValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = 0
        while True:
            if x.norm() < 4:  # decides
                break
            x = x * 0.5
            steps += 1
        return torch.tanh(x) + steps


@decides("for ... else", rows)
class ForElse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for limit in (0.5, 1.0, 3.0):
            if x.abs().max() < limit:  # decides
                x = x / limit
                break
        else:
            x = torch.tanh(x)
        return torch.relu(x) + 1


@decides("recursion until a norm is small", lambda d: (d.normal(3, 8, scale=d.number(0.2, 30)),))
class RecursesByValue(nn.Module):
    def halve(self, x: torch.Tensor) -> torch.Tensor:
        if x.norm() <= 6:  # decides
            return torch.sin(x)
        return self.halve(x / 2) * 1.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.halve(x) + 1


@decides(
    "recursion on halves of a size",
    lambda d: (d.normal(d.size(1, 9), 8),),
    sample=lambda d: (d.normal(4, 8),),
)
class RecursesBySize(nn.Module):
    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:  # decides
            return torch.tanh(x[0])
        half = len(x) // 2
        return self.reduce(x[:half]) * 0.5 - self.reduce(x[half:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reduce(x) + 1


@decides("iteration over a tensor", rows)
class IteratesRows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(8)
        for row in x:  # decides
            state = torch.tanh(state * 0.5 + row)
        return state * 2


@decides("len(t), and steps of time", lambda d: (d.normal(d.size(1, 9), 2, 8),))
class StepsOfTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[1], 8)
        found = []
        for t in range(len(x)):  # decides
            state = self.cell(x[t], state)
            found.append(state)
        return torch.stack(found)


@decides("chunks in range(0, n, 4)", lambda d: (d.normal(d.size(1, 14), 8),))
class Chunks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [torch.softmax(x[i : i + 4], 0) for i in range(0, x.shape[0], 4)]  # decides
        return torch.cat(found) * 2


@decides("while n > 1: n = (n + 1) // 2", lambda d: (d.normal(d.size(1, 12), 8),))
class ReductionTree(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        while n > 1:  # decides
            if n % 2:  # decides
                x = torch.cat([x, x[-1:]])
            x = torch.tanh(x[0::2] + x[1::2])
            n = (n + 1) // 2
        return x[0] * 2


@decides("a comprehension with a filter by values", rows)
class FiltersRows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [torch.tanh(row) for row in x if row.sum() > 0]  # decides
        return torch.stack(kept).sum(0) if kept else torch.zeros(8)  # decides


@decides("any() of Python over a generator", rows)
class AnyOfRows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if any(float(v) > 1.2 for v in x.mean(-1)):  # decides
            return torch.relu(x) - 1
        return torch.relu(x) + x.mean()


@decides("sorted(..., key=...) by norms", rows)
class SortsByNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = sorted(range(x.shape[0]), key=lambda i: float(x[i].norm()))  # decides
        weights = reduce(lambda w, i: w + [0.5 * w[-1]], order[1:], [1.0])
        return torch.stack([torch.tanh(x[i]) * w for i, w in zip(order, weights)])


def lists(draw: Draw) -> tuple[list[torch.Tensor]]:
    return ([draw.normal(draw.size(1, 6), 8) for _ in range(3)],)


@decides("a list of inputs sorted by length", lists)
class SortsByLength(nn.Module):
    def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
        ordered = sorted(xs, key=len, reverse=True)  # decides
        longest = ordered[0].shape[0]
        padded = [torch.cat([x, x.new_zeros(longest - len(x), 8)]) for x in ordered]
        return torch.tanh(torch.stack(padded)) * 2


@decides(
    "a list of another length",
    lambda d: ([d.normal(2, 8) for _ in range(d.size(1, 4))],),
    sample=lambda d: ([d.normal(2, 8), d.normal(2, 8)],),
)
class ListOfInputs(nn.Module):
    def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(2, 8)
        for k, x in enumerate(xs):  # decides
            total = total + torch.tanh(x) * (k + 1)
        return total / len(xs)


@decides(
    "the shorter of two, by zip", lambda d: (d.normal(d.size(1, 6), 8), d.normal(d.size(1, 6), 8))
)
class ShortestOfTwo(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.tanh(a) * b for a, b in zip(x, y)])  # decides


@decides("routing to experts in Python, top 1", lambda d: (d.normal(d.size(1, 6), 8),))
class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if rows.numel() > 0:  # decides
                out[rows] = expert(x[rows])
        return out + x


@decides("one expert by argmax().item()", lambda d: (d.normal(d.size(1, 6), 8),))
class OneExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x.mean(0)).argmax().item()
        return self.experts[chosen](x) + 1  # decides


@decides("a module by a name made of a value", lambda d: (d.normal(2, 8), d.ints(0, 2, 1)))
class NamedByValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({f"task{k}": Layer() for k in range(3)})

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return self.heads[f"task{int(task)}"](x) + 1  # decides


@decides("dict.get by a value", lambda d: (d.normal(2, 8), d.ints(0, 3)))
class DictByValue(nn.Module):
    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        table = {0: torch.relu, 1: torch.tanh, 2: torch.sigmoid}
        return table.get(int(kind), torch.sin)(x) * 2  # decides


@decides(
    "a loop over nonzero()",
    lambda d: (d.normal(5, 8), d.bits(5, share=d.pick(0.0, 0.3, 0.9))),
)
class LoopsOverNonzero(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        total = torch.zeros(8)
        for (row,) in mask.nonzero():  # decides
            total = total * 0.5 + y[row]
        return total + y.mean(0)


@decides("a loop over unique()", lambda d: (d.normal(6, 8), d.ints(0, d.size(0, 4), 6)))
class GroupsOfLabels(nn.Module):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        means = [torch.tanh(x)[labels == label].mean(0) for label in labels.unique()]  # decides
        return torch.stack(means) * 2


@decides("greedy decoding until an end token", lambda d: (d.ints(0, 9, 1, d.size(1, 4)),))
class DecodesUntilEnd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            scores = self.head(torch.tanh(self.embed(ids).mean(1)) * 4)
            new = scores.argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], 1)
            if int(new) in (2, 7):  # decides
                break
        return ids


@decides(
    "adaptive depth: steps are summed until 1",
    lambda d: (d.normal(2, 8, scale=d.pick(0.125, 1.0, 4.0)),),
)
class PondersUntilSure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.halt = Layer(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sure, out = torch.zeros(x.shape[0], 1), torch.zeros_like(x)
        for _ in range(5):
            x = self.body(x) * 0.5 + x
            step = torch.sigmoid(self.halt(x)) * (sure < 1)
            sure, out = sure + step, out + step * x
            if (sure >= 1).all():  # decides
                break
        return out
