# SPDX-License-Identifier: Apache-2.0
"""Functional graphs whose writes to parts happen in place again answer as they did, and copy no whole tensor."""

import random
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from blade.graph.fx.write_in_place import write_in_place

Fn = Callable[..., object]
T = torch.Tensor


def functional(fn: Fn, *inputs: T) -> GraphModule:
    """``fn`` as AOTAutograd has it: writes to inputs are copies at the end."""
    return make_fx(torch.func.functionalize(fn))(*(t.clone() for t in inputs))


def in_place(gm: GraphModule, *shared: int) -> GraphModule:
    """``gm`` with writes in place; inputs ``shared`` are not owned."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    write_in_place(graph, [node for k, node in enumerate(placeholders) if k not in shared])
    graph.lint()
    return GraphModule(gm, graph)


def copies(gm: GraphModule) -> int:
    """How many ops make a copy of a whole tensor for a part of it."""
    return sum(
        any(word in str(n.target) for word in ("_scatter", "index_put.", "index_copy."))
        for n in gm.graph.nodes
    )


def check(gm: GraphModule, made: GraphModule, *inputs: T) -> None:
    mine, theirs = ([t.clone() for t in inputs] for _ in range(2))
    got, want = made(*mine), gm(*theirs)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


def a_row(x: T, y: T) -> T:
    x[1] = y[0] * 2
    return x[:3].sum(0)


def rows_of_columns(x: T, y: T) -> T:
    x[:4, 2:5] = y[:4, :3] + 1
    return x[:4, :5] * 2


def of_another_dtype(x: T, y: T) -> T:
    x[0:2] = y[0].double()
    return x.sum()


def a_diagonal(x: T, y: T) -> T:
    x.diagonal().copy_(y[0])
    return x.cos()


def at_indices(x: T, y: T) -> T:
    at = torch.tensor([2, 0])
    x[:, at] = y[:, :2]
    x.index_copy_(0, at, y[1:3])
    return x.sum(1)


def a_buffer(x: T, y: T) -> T:
    made = torch.zeros(6, 6)
    for k in range(4):
        made[k] = x[k] + made[max(k - 1, 0)]
    made[2:, 1:3] = y[2:, 1:3]
    return made.exp()


def twice(x: T, y: T) -> T:
    x[0] = y[0]
    first = x.sum()
    x[0:2] = y[1] + first
    return x + first


def sizes_are_read(x: T, y: T) -> T:
    x[1] = y[0] * x.shape[0]
    return y * x.shape[0]


def old_contents_are_read(x: T, y: T) -> T:
    old = x[:2]
    before = old + 0
    x[1] = y[0]
    return before + x[:2]


def moved_over_itself(x: T, y: T) -> T:
    """Eager mode refuses this, as functional graphs do not."""
    made = x * 2
    return torch.slice_scatter(made, made[:-1], 0, 1).cos()


def of_its_own_row(x: T, y: T) -> T:
    x[2] = x[1]
    x[torch.tensor([0])] = x[3:4]
    return y * 2


IN_PLACE = (
    *(moved_over_itself, of_its_own_row),
    *(a_row, rows_of_columns, of_another_dtype, a_diagonal, at_indices, a_buffer, twice),
    *(sizes_are_read, old_contents_are_read),
)


def returned(x: T, y: T) -> tuple[T, T]:
    new = torch.select_scatter(x, y[0], 0, 1)
    return new, new + 1


def both_returned(x: T, y: T) -> tuple[T, T]:
    made = x * 2
    return made, torch.select_scatter(made, y[0], 0, 1)


def read_afterwards(x: T, y: T) -> T:
    made = x * 2
    new = torch.select_scatter(made, y[0], 0, 1)
    return new.sum(0) - made.sum(0)


def of_a_view_read_afterwards(x: T, y: T) -> T:
    made = x * 2
    column = made[:, 0]
    return torch.select_scatter(made, y[0], 0, 1).sum() - column.sum()


def index_of_itself(x: T, y: T) -> T:
    at = torch.arange(6) * x.shape[0] % 5
    return torch.index_put(at, [at], at * 3).cos()


def expanded(x: T, y: T) -> T:
    return torch.select_scatter((x[0] * 2).expand(6, 6), y[0], 0, 1).cos()


def given_what_it_was(x: T, y: T) -> T:
    """The input's new contents are a view of the old ones."""
    new = torch.select_scatter(x, y[0], 0, 1).cos()
    x.copy_(x.mT)
    return new


BY_COPIES = (
    *(expanded, given_what_it_was),
    *(returned, both_returned, read_afterwards, of_a_view_read_afterwards),
    index_of_itself,
)


def given() -> tuple[T, T]:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 6, 6, generator=rng)
    return x, y


@pytest.mark.parametrize("fn", IN_PLACE, ids=lambda fn: fn.__name__)
def test_parts_are_written_where_they_lie(fn: Fn) -> None:
    gm = functional(fn, *given())
    made = in_place(gm)
    assert copies(gm) and not copies(made), made.code
    check(gm, made, *given())


@pytest.mark.parametrize("fn", BY_COPIES, ids=lambda fn: fn.__name__)
def test_what_is_read_later_is_not_written(fn: Fn) -> None:
    gm = functional(fn, *given())
    made = in_place(gm)
    assert copies(gm) == copies(made), made.code
    check(gm, made, *given())


def test_an_input_that_shares_memory_is_not_written_early() -> None:
    gm = functional(a_row, *given())
    assert copies(in_place(gm, 0)) == copies(gm)


def test_an_input_that_stays_as_it_was_is_not_written() -> None:
    def reads(x: T, y: T) -> T:
        return torch.select_scatter(x, y[0], 0, 1) * 2

    gm = functional(reads, *given())
    made = in_place(gm)
    assert copies(made) == 1
    check(gm, made, *given())


def test_a_draw_that_nothing_reads_stays() -> None:
    def draws(x: T, y: T) -> T:
        torch.rand_like(x)
        x[0] = y[0]
        return torch.rand_like(x)

    gm = functional(draws, *given())
    drawn = [n for n in in_place(gm).graph.nodes if "rand_like" in str(n.target)]
    assert len(drawn) == sum("rand_like" in str(n.target) for n in gm.graph.nodes)


@pytest.mark.parametrize("seed", range(60))
def test_programs_drawn_by_lot(seed: int) -> None:
    rng = random.Random(seed)
    steps = [rng.randrange(8) for _ in range(rng.randrange(3, 12))]
    places = [(rng.randrange(5), rng.randrange(5), rng.randrange(3)) for _ in steps]

    def program(x: T, y: T) -> tuple[T, ...]:
        held = [x, torch.zeros(6, 6), y * 2]
        kept = [y]
        for step, (i, j, which) in zip(steps, places, strict=True):
            into, other = held[which], held[(which + 1) % 3]
            if step == 0:
                into[i] = other[j]
            elif step == 1:
                into[i:, j] = other[j, : 6 - i] + 1
            elif step == 2:
                into[i:][:, : j + 1] = other[i:, : j + 1]
            elif step == 3:
                kept.append(into[i] * other[:, j])
            elif step == 4:
                into.diagonal()[: j + 1] = other[i, : j + 1]
            elif step == 5:
                into[torch.tensor([i, (i + 1) % 6])] = other[:2]
            elif step == 6:
                held[which] = into + other.sum()
            else:
                kept.append(into[i : i + 1])
        # a result of its own: views of what is written later are as eager mode has them
        return tuple(one.clone() for one in kept) + (held[rng.randrange(3)] * 1,)

    gm = functional(program, *given())
    check(gm, in_place(gm), *given())
