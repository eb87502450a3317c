# SPDX-License-Identifier: Apache-2.0
"""Tensors that leave an If, a Loop or a list inside a container: what is captured, and whose memory they are."""

import io
from typing import NamedTuple

import pytest
import torch
from cutting import assert_same, cut, ops, rebuilt, script
from torch import Tensor, nn

import blade

Pair = tuple[Tensor, Tensor]


class Two(NamedTuple):
    first: Tensor
    second: Tensor


class TupleFromIf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pair = (x, x + 1)
        if float(x.sum()) > 0:
            pair = (x * 2, x - 1)
        a, b = pair
        return torch.relu(a) * torch.tanh(b) + 1


class NamedTupleFromIf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        two = Two(x, x + 1)
        if float(x.sum()) > 0:
            two = Two(torch.relu(x), two.first - 1)
        return torch.sigmoid(two.first) * torch.tanh(two.second) + 1


class OptionalTuple(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pair: tuple[Tensor, Tensor] | None = None
        if float(x.sum()) > 0:
            pair = (torch.relu(x) * 2, x - 1)
        if pair is not None:
            a, b = pair
            return torch.sigmoid(a) * torch.tanh(b) + 1
        return torch.relu(x) + torch.tanh(x)


class NestedFromIf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        nested = ((x, 2), [x + 1])
        if float(x.sum()) > 0:
            nested = ((x * 2, 3), [x - 1, torch.tanh(x)])
        (a, n), rest = nested
        y = torch.relu(a) * n
        for one in rest:
            y = torch.sigmoid(y) * torch.tanh(one)
        return y


class DictFromIf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        held = {"a": x, "b": x + 1}
        if float(x.sum()) > 0:
            held = {"a": torch.relu(x), "b": x - 1, "c": torch.tanh(x) * 2}
        y = torch.sigmoid(held["a"]) * torch.tanh(held["b"])
        for one in held.values():
            y = torch.relu(y) + one
        return y


class TupleThroughLoop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pair = (x, torch.zeros_like(x))
        for i in range(x.size(0)):
            h, c = pair
            c = torch.sigmoid(h) * c + torch.tanh(h)
            pair = (torch.relu(c) + i, c)
        a, b = pair
        return torch.relu(a) * torch.tanh(b)


class TuplesInList(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pairs: list[tuple[Tensor, Tensor]] = []
        for i in range(x.size(0)):
            pairs.append((torch.relu(x) * i, torch.tanh(x) - i))
        y = x
        for a, b in pairs:
            y = torch.sigmoid(y) * a + b
        return y


class ListFromLoop(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        kept: list[Tensor] = []
        for i in range(x.size(0)):
            kept.append(torch.relu(x) * i)
        return torch.cat(kept[1:] + kept[:1]).tanh() + 1, kept


CONTAINERS = [
    TupleFromIf,
    NamedTupleFromIf,
    OptionalTuple,
    NestedFromIf,
    DictFromIf,
    TupleThroughLoop,
    TuplesInList,
    ListFromLoop,
]


@pytest.mark.parametrize("kind", CONTAINERS)
def test_what_leaves_in_a_container_answers_the_same_on_all_paths(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.rand(3, 4)
    captured = script(kind(), (x,), (-torch.rand(2, 4),))
    assert any(len(found) > 1 for found in ops(cut(captured)))
    optimized = rebuilt(captured)
    buffer = io.BytesIO()
    torch.jit.save(optimized, buffer)
    loaded = torch.jit.load(io.BytesIO(buffer.getvalue()))
    for module in (optimized, loaded):
        assert_same(module, captured, (-x,), (torch.rand(5, 4),), (-torch.rand(1, 4),))


def test_a_scripted_model_with_a_tuple_from_an_if_is_optimized() -> None:
    model = torch.jit.script(TupleFromIf().eval())
    optimized = blade.optimize(
        model, [torch.rand(4, 8), -torch.rand(4, 8)], blade.Config(optimization_pipeline="disc")
    )
    for sign in (1, -1):
        x = sign * torch.rand(7, 8)
        torch.testing.assert_close(optimized(x), model(x))
    assert all(one["engine_runs"] for one in blade.stats(optimized).values())


class WrittenInSlice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x) * 2
        items = [y, x + 1]
        before = torch.tanh(y) * 3
        items[0:1][0].add_(1.0)
        return before + torch.tanh(y) * 3


class WrittenInCopy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x) * 2
        items = [y, x + 1]
        before = torch.tanh(y) * 3
        for one in items.copy():
            one.mul_(2.0)
        return before + torch.tanh(y) * 3


class WrittenInSum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x) * 2
        both = [x + 1] + [y]
        before = torch.tanh(y) * 3
        both[1].add_(1.0)
        return before + torch.tanh(y) * 3


class WrittenInItems(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x) * 2
        held = {"y": y}
        before = torch.tanh(y) * 3
        for _, one in held.items():
            one.add_(1.0)
        return before + torch.tanh(y) * 3


class WrittenInTuple(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x) * 2
        pair = (y, x)
        if float(x.sum()) > 0:
            pair = (x + 1, y)
        before = torch.tanh(y) * 3
        a, b = pair
        if float(x.sum()) > 0:
            b.add_(1.0)
        else:
            a.add_(2.0)
        return before + torch.tanh(y) * 3


class WrittenInOptional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x) * 2
        pair: tuple[Tensor, Tensor] | None = None
        if x.size(0) > 1:
            pair = (y, x)
        before = torch.tanh(y) * 3
        if pair is not None:
            pair[0].add_(1.0)
        return before + torch.tanh(y) * 3


class WrittenInFuture(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x) * 2
        later = torch.jit.fork(_same, y)
        before = torch.tanh(y) * 3
        torch.jit.wait(later).add_(1.0)
        return before + torch.tanh(y) * 3


def _same(x: Tensor) -> Tensor:
    return x


class WrittenInGrid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x.flatten()) * 2
        before = torch.tanh(y) * 3
        torch.meshgrid([y], indexing="ij")[0].add_(1.0)
        return before + torch.tanh(y) * 3


WRITTEN = [
    WrittenInSlice,
    WrittenInCopy,
    WrittenInSum,
    WrittenInItems,
    WrittenInTuple,
    WrittenInOptional,
    WrittenInFuture,
    WrittenInGrid,
]


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_write_through_a_container_is_seen_by_what_is_in_it(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.rand(3, 4)
    captured = script(kind(), (x,), (-torch.rand(2, 4),))
    assert_same(rebuilt(captured), captured, (-x,), (torch.rand(5, 4),))


class NumbersOfLists(nn.Module):
    """The caller's list is written; numbers unpacked from a tuple are not in it."""

    def forward(self, kept: list[Tensor], x: Tensor) -> Tensor:
        pair = (x.size(0), 2)
        if x.size(1) > 2:
            pair = (x.size(1), 3)
        rows, factor = pair
        kept.append(x)
        return torch.relu(x) * factor + rows


def test_numbers_in_a_tuple_share_no_memory() -> None:
    captured = script(NumbersOfLists(), ([torch.rand(1)], torch.rand(3, 4)))
    assert ops(cut(captured)) == [["relu", "mul", "add"]]
    assert_same(rebuilt(captured), captured, ([], torch.rand(3, 2)))
