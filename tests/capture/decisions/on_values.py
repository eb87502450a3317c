# SPDX-License-Identifier: Apache-2.0
"""Branches on the contents of tensors."""

import math
from typing import Any

import torch
from decision_table import Draw, decides
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    """A linear layer of 8 units and a gate: what the models below choose between."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * 2


def rows(draw: Draw) -> tuple[torch.Tensor, ...]:
    """[n, 8], of other sizes, scales and means."""
    scale = draw.pick(0.125, 0.5, 1.0, 2.0, 8.0)
    return (draw.normal(draw.size(1, 6), 8, scale=scale, shift=draw.number(-1.0, 1.0)),)


@decides("float(softmax.max()) > c in an if", rows)
class Confident(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Layer(), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        if float(torch.softmax(self.head(y), -1).max()) > 0.3:  # decides
            return self.head(y)
        return self.head(torch.relu(y) - 1)


def masked(draw: Draw) -> tuple[torch.Tensor, ...]:
    (x,) = rows(draw)
    return x, draw.bits(*x.shape, share=draw.pick(0.0, 0.02, 0.5, 1.0))


@decides("bool(mask.any())", masked)
class AnyMasked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if bool(mask.any()):  # decides
            x = x.masked_fill(mask, 0.5)
            return self.body(x) + 1
        return self.body(x)


@decides("if mask.all(), without bool", masked)
class AllMasked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if mask.all():  # decides
            return self.body(x)
        return self.body(torch.where(mask, x, -x)).sum(-1, keepdim=True)


@decides("not mask.any(), and an early return of the input", masked)
class NothingMasked(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not mask.any():  # decides
            return x
        return torch.softmax(x.masked_fill(~mask, -1e4), -1) * 3


def pairs(draw: Draw) -> tuple[torch.Tensor, ...]:
    (x,) = rows(draw)
    how = draw.pick("same", "near", "other")
    if how == "other":
        return x, draw.normal(*x.shape)
    return x, x.clone() if how == "same" else x * (1 + 1e-7) + 1e-9


@decides("torch.equal", pairs)
class SameInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        if torch.equal(query, key):  # decides
            return self.body(query)
        return self.body(query) - self.body(key)


@decides("torch.allclose", pairs)
class CloseInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        if torch.allclose(query, key, rtol=1e-4, atol=1e-5):  # decides
            return self.body(query) * 0.5
        return self.body(query - key)


def labelled(draw: Draw) -> tuple[torch.Tensor, ...]:
    (x,) = rows(draw)
    return x, draw.ints(0, 5, 1)


@decides("t.item() in a set", labelled)
class InSet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if label.item() in {1, 3}:  # decides
            return self.body(x) + 1
        return self.body(x) * 2


@decides("match on int(t)", labelled)
class MatchValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        match int(label):  # decides
            case 0:  # decides
                return self.body(x)
            case 1 | 2:  # decides
                return torch.relu(x) + 1
            case _:
                return torch.sigmoid(x) - 1


@decides("parity of an int", labelled)
class OddOrEven(nn.Module):
    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if int(label) % 2:  # decides
            return torch.sin(x) * 2
        return torch.cos(x) * 2


@decides("argmax, then if, elif, else", rows)
class ArgmaxBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.body = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice = self.router(x.mean(0)).argmax()
        if choice == 0:  # decides
            return self.body(x)
        elif choice == 1:  # decides
            return self.body(-x) + 1
        else:
            return x * 2 - 1


@decides("an exit after each layer, by confidence", rows)
class EarlyExit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.head(x)
        for layer in self.layers:
            x = layer(x) + x
            scores = self.head(x)
            if scores.softmax(-1).amax(-1).min() > 0.6:  # decides
                break
        return scores


@decides("raise and except on a value", rows)
class ExceptOnValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()

    def check(self, x: torch.Tensor) -> None:
        if x.abs().max() > 3:  # decides
            raise ValueError("out of range")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            self.check(x)
        except ValueError:
            x = x.clamp(-3, 3)
        return self.body(x)


@decides("division by zero of Python numbers", masked)
class ZeroDivision(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        try:
            weight = 1 / int(mask.sum())  # decides
        except ZeroDivisionError:
            weight = 1.0
        return torch.sigmoid(x) * weight + 1


@decides("assert on values", lambda d: (d.normal(3, 8, shift=d.pick(0.0, 4.0, 6.0)),))
class Asserts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.min() >= 0, "only positive numbers"  # decides
        return torch.sqrt(x) * 2 + 1


@decides(
    "torch._assert, and a raise",
    lambda d: (d.normal(3, 8), d.ints(0, 9, 3)),
    sample=lambda d: (d.normal(3, 8), d.ints(0, 7, 3)),
)
class RaisesByValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if bool((ids >= 8).any()):  # decides
            raise IndexError("eight positions")
        return self.table(ids) * x + 1


def with_nan(draw: Draw) -> tuple[torch.Tensor, ...]:
    (x,) = rows(draw)
    if draw.coin():
        x[0, draw.size(0, 7)] = draw.pick(math.nan, math.inf)
    return (x,)


@decides("isnan(x).any() or isinf(x).any()", with_nan, sample=rows)
class RepairsNan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.isnan(x).any() or torch.isinf(x).any():  # decides
            x = torch.nan_to_num(x, nan=0.0, posinf=1.0, neginf=-1.0) * 2
        return self.body(x)


@decides("a chained comparison", rows)
class Between(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if -0.3 < x.mean() < 0.3:  # decides
            return torch.relu(x) - 0.5
        return torch.relu(x - x.mean()) + 0.5


@decides("two conditions, and, or, not", masked)
class Conditions(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        high = bool(x.max() > 1.5)  # decides
        if high and not bool(mask.any()):  # decides
            return torch.tanh(x)
        if not high or bool(mask.all()):  # decides
            return torch.tanh(x) * 2
        return torch.tanh(x) * 3


@decides("float64 where numbers are large", lambda d: (d.normal(3, 8, scale=d.pick(1.0, 1e4)),))
class DtypeByValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > 1e3:  # decides
            x = x.double()
        return torch.log1p(x * x) - 1


@decides(
    "float16 overflow, as in T5 and Whisper",
    lambda d: (d.normal(3, 8, scale=d.pick(1.0, 3e4)).half(),),
    sample=lambda d: (d.normal(3, 8).half(),),
)
class ClampsOverflow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 4
        if x.dtype == torch.float16 and torch.isinf(x).any():  # decides
            limit = torch.finfo(x.dtype).max - 1000
            x = torch.clamp(x, min=-limit, max=limit)
        return x * 0.5


@decides("a value against a buffer", rows)
class AboveBuffer(nn.Module):
    limit: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("limit", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() > self.limit:  # decides
            return x / x.max() * self.limit
        return x + self.limit


@decides("torch.is_nonzero of one element", labelled)
class IsNonzero(nn.Module):
    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if torch.is_nonzero(label):  # decides
            return torch.exp(-x.abs()) + 1
        return torch.exp(-x.abs()) - 1


@decides("an element, x[0, 0] > 0", rows)
class FirstElement(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] > 0:  # decides
            x = x.flip(-1)
        return torch.cumsum(x, -1) * 0.5


@decides("a NumPy comparison", rows)
class NumpyBranch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loud = x.numpy().std() > 1.0  # decides
        if loud:  # decides
            return torch.tanh(x) * 0.5
        return torch.tanh(x) + 0.5


@decides("a conditional expression of two tensors", rows)
class Ternary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pair = (x, x + 1)
        pair = (x * 2, x - 1) if float(x.sum()) > 0 else pair  # decides
        a, b = pair
        return torch.relu(self.body(a)) * torch.tanh(b) + 1


@decides("a walrus, then the number itself", rows)
class Walrus(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (largest := float(x.abs().max())) > 2:  # decides
            return x / largest
        return torch.relu(x) + largest


@decides("a branch inside a submodule, twice", rows)
class TwoSubmodules(nn.Module):
    class Gate(nn.Module):
        def __init__(self, limit: float) -> None:
            super().__init__()
            self.limit = limit
            self.body = Layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.mean() > self.limit:  # decides
                return self.body(x)
            return x - self.limit

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Sequential(self.Gate(-0.4), self.Gate(0.1), self.Gate(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gates(x) * 2  # type: ignore[no-any-return]


@decides("several outputs, as many as a value says", rows)
class OutputsByValue(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(x)
        if y.mean() > 0.2:  # decides
            return y, y * 2
        return y, y * 2, functional.relu(y)


@decides("None or a tensor among the outputs", rows)
class NoneByValue(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        extra = None
        if x.sum() > 0:  # decides
            extra = torch.softmax(x, -1)
        return torch.tanh(x) * 2, extra


@decides("an output whose size a value decides", masked)
class SizeByValue(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if mask.float().mean() > 0.3:  # decides
            return torch.tanh(x).sum(0)
        return torch.tanh(x)
