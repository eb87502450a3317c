# SPDX-License-Identifier: Apache-2.0
"""Equal calls on fake tensors are made once, and nobody but the clock can tell."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import DimDynamic

from blade.graph.fx.writer import FxWriter, writing
from blade.graph.shapes import memo as known_results

aten = torch.ops.aten


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The targets of the calls that are made."""
    seen: list[Any] = []
    real = known_results.result_of

    def result_of(target: Any, args: Any, kwargs: Any) -> Any:
        seen.append(target)
        return real(target, args, kwargs)

    monkeypatch.setattr(known_results, "result_of", result_of)
    return seen


def place(writer: FxWriter, name: str = "x", sizes: tuple[int, ...] = (3, 8)) -> Node:
    dynamic = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (len(sizes) - 1)]
    return writer.place(name, torch.empty(sizes), dynamic, name)


def emit(writer: FxWriter, target: Any, *args: Any, **kwargs: Any) -> Node:
    return writer.emit(target, args, kwargs, "here")


def is_one_memory(a: Node, b: Node) -> bool:
    storages = [n.meta["val"].untyped_storage()._cdata for n in (a, b)]
    return storages[0] == storages[1]


def test_layers_that_repeat_are_looked_at_once(made: list[Any]) -> None:
    with writing():
        writer = FxWriter()
        x = emit(writer, aten.neg.default, place(writer))  # where an input begins is open, too
        weights = [writer.hold(k, torch.empty(8, 8), "w") for k in range(4)]
        for weight in weights:
            x = emit(writer, aten.relu.default, emit(writer, aten.linear.default, x, weight))
        assert made == [aten.neg.default, aten.linear.default, aten.relu.default]
        rows = x.meta["val"].shape[0]
    assert isinstance(rows, torch.SymInt) and x.meta["val"].shape == (rows, 8)


def test_what_differs_in_anything_is_another_call(made: list[Any]) -> None:
    with writing():
        writer = FxWriter()
        x, y = place(writer), place(writer, "y")
        for one in (x, y, emit(writer, aten.permute.default, x, [1, 0])):
            emit(writer, aten.relu.default, one)
        for number in (0.0, -0.0, 0, False):
            emit(writer, aten.add.Scalar, x, number)
        emit(writer, aten.sum.dim_IntList, x, [0], True)
        emit(writer, aten.sum.dim_IntList, x, [0], False)
        emit(writer, aten.sum.dim_IntList, x, [0], False, dtype=torch.float64)
    assert made.count(aten.relu.default) == 3  # the sizes of x and y are different symbols
    assert made.count(aten.add.Scalar) == 4
    assert made.count(aten.sum.dim_IntList) == 3


def test_outputs_of_equal_calls_have_memory_of_their_own(made: list[Any]) -> None:
    with writing():
        writer = FxWriter()
        x = place(writer)
        once, twice = (emit(writer, aten.relu.default, x) for _ in range(2))
        first, second = (emit(writer, aten.view.default, one, [-1]) for one in (once, twice))
        assert is_one_memory(once, twice) and made == [aten.relu.default, aten.view.default]
        gm = writer.finish([once, twice, first, second])
    assert not is_one_memory(once, twice)
    assert is_one_memory(once, first) and is_one_memory(twice, second)
    gm.graph.lint()


def test_views_of_parts_of_one_call_share_its_memory() -> None:
    with writing():
        writer = FxWriter()
        x = place(writer)
        made = [emit(writer, aten.split.Tensor, emit(writer, aten.neg.default, x), 4, 1)]
        made += [emit(writer, aten.split.Tensor, emit(writer, aten.neg.default, x), 4, 1)]
        parts = [emit(writer, _getitem, one, k) for one in made for k in range(2)]
        writer.finish(parts)
    assert is_one_memory(parts[0], parts[1]) and is_one_memory(parts[2], parts[3])
    assert not is_one_memory(parts[0], parts[2])


def test_an_input_that_is_returned_stays_the_input() -> None:
    with writing():
        writer = FxWriter()
        x, y = place(writer), place(writer, "y")
        same = [emit(writer, aten.contiguous.default, one) for one in (x, x, y)]
        writer.finish(same)
    assert [is_one_memory(one, x) for one in same] == [True, True, False]
    assert is_one_memory(same[2], y)


@pytest.mark.parametrize(
    "call",
    [
        lambda w, x: emit(w, aten.nonzero.default, x),
        lambda w, x: emit(w, aten.add_.Scalar, x, 1),
    ],
    ids=["a size of its own", "it writes"],
)
def test_some_calls_are_always_made(made: list[Any], call: Callable[..., Node]) -> None:
    with writing():
        writer = FxWriter()
        x = place(writer)
        call(writer, x)
        before = len(made)
        call(writer, x)
    assert len(made) == before + 1


@pytest.mark.parametrize("find", [aten.nonzero.default, aten.where.default])
def test_tensors_that_look_alike_have_counts_of_their_own(find: Any) -> None:
    with writing():
        writer = FxWriter()
        x = place(writer)
        alike = [emit(writer, aten.neg.default, x) for _ in range(2)]
        found = [emit(writer, find, one) for one in alike]
        first, second = (torch.utils._pytree.tree_leaves(one.meta["val"])[0] for one in found)
    assert first.shape[0].node.expr != second.shape[0].node.expr


def _getitem(parts: Any, k: int) -> Any:
    return parts[k]
