# SPDX-License-Identifier: Apache-2.0
"""Python bools where ops take numbers, and views in another dtype: torch's tracer ends with an assert for them."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import blade
from blade.capture.capture import capture

T = torch.Tensor
Function = Callable[[T, T, T], T]


class Calls(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: T, index: T, mask: T) -> T:
        return self.function(x, index, mask)


def inputs(rows: int) -> tuple[T, T, T]:
    rng = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 6, generator=rng)
    return x, torch.randint(0, 6, (rows, 2), generator=rng), x > 0.3


def in_place(mask: T, write: Callable[[T], object]) -> T:
    new = mask.clone()
    write(new)
    return new


CALLS: dict[str, Function] = {
    "scatter": lambda x, i, m: torch.zeros_like(m).scatter(1, i, True),
    "scatter_": lambda x, i, m: torch.zeros_like(m).scatter_(1, i, True),
    "masked_fill": lambda x, i, m: m.masked_fill(x > 0, True),
    "masked_fill_": lambda x, i, m: in_place(m, lambda new: new.masked_fill_(x > 0, False)),
    "where": lambda x, i, m: torch.where(x > 0, True, m),
    "where of floats": lambda x, i, m: torch.where(m, x, True),
    "where of two": lambda x, i, m: torch.where(x > 0, True, False),
    "where of a tensor": lambda x, i, m: m.where(x > 0, False),
    "full": lambda x, i, m: torch.full((x.shape[0], 1), True) & m,
    "full of no dtype": lambda x, i, m: torch.full((x.shape[0], 1), True, dtype=None) & m,
    "and in place": lambda x, i, m: in_place(m, lambda new: operator.iand(new, True)),
    "or in place": lambda x, i, m: in_place(m, lambda new: new.bitwise_or_(True)),
    "full of floats": lambda x, i, m: torch.full((x.shape[0], 1), True, dtype=x.dtype) + x,
    "full_like": lambda x, i, m: torch.full_like(m, True) ^ m,
    "new_full": lambda x, i, m: x.new_full((x.shape[0], 6), True),
    "index_fill": lambda x, i, m: m.index_fill(1, i[0], True),
    "fill_": lambda x, i, m: in_place(m, lambda new: new.fill_(True)),
    "fill": lambda x, i, m: torch.fill(x, 2.5) * x + torch.fill(x, True),
    "==": lambda x, i, m: m == True,  # noqa: E712
    "!=": lambda x, i, m: m != False,  # noqa: E712
    ">=": lambda x, i, m: i >= True,
    "and": lambda x, i, m: m & True,
    "and of ints": lambda x, i, m: True & i,
    "or": lambda x, i, m: m | False,
    "xor": lambda x, i, m: m ^ True,
    "power": lambda x, i, m: x**True,
    "remainder": lambda x, i, m: x % True,
    "clamp": lambda x, i, m: x.clamp(min=False, max=True),
    "hardtanh": lambda x, i, m: functional.hardtanh(x, False, True),
    "view in another dtype": lambda x, i, m: x.view(torch.int32) & 0x7FFFFFFF,
    "view of bytes": lambda x, i, m: x.view(dtype=torch.uint8).sum(-1),
    "view there and back": lambda x, i, m: (x.view(torch.int32) ^ 1).view(torch.float32),
    "write to a view in another dtype": lambda x, i, m: in_place(
        x, lambda new: new.view(torch.int32).bitwise_and_(0x7FFFFFFF)
    ),
    "sum over kept axes": lambda x, i, m: m.masked_fill(x > 0, True).sum(1, True),
}


class All(nn.Module):
    def forward(self, x: T, index: T, mask: T) -> list[T]:
        return [function(x, index, mask) for function in CALLS.values()]


@pytest.fixture(scope="module")
def answers() -> list[tuple[list[T], list[T]]]:
    """Of the captured module and of the model, at three sizes."""
    found = capture(All().eval(), inputs(4), blade.Config())
    assert found.how == "trace"
    return [(found.module(*inputs(rows)), All()(*inputs(rows))) for rows in (4, 3, 7)]


@pytest.mark.parametrize("name", CALLS)
def test_the_answer_is_the_models(name: str, answers: list[tuple[list[T], list[T]]]) -> None:
    k = list(CALLS).index(name)
    for got, want in answers:
        assert got[k].dtype == want[k].dtype
        assert torch.equal(got[k], want[k])


class Counts(nn.Module):
    """Has a state, and decides: the trace that failed leaves neither changed."""

    calls: T

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: T, index: T, mask: T) -> T:
        self.calls += 1
        if x.shape[0] > 5:
            x = -x
        return x.masked_fill(mask, True) + self.calls


def test_the_state_is_that_before_the_trace_that_failed() -> None:
    model = Counts().eval()
    found = capture(model, inputs(4), blade.Config())
    for rows in (4, 3, 7):
        assert torch.equal(found.module(*inputs(rows)), model(*inputs(rows)))


def test_named_submodules_may_do_so_as_well() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Calls(CALLS["where of floats"])

        def forward(self, x: T, index: T, mask: T) -> T:
            return self.inner(x, index, mask) * 2

    model = Outer().eval()
    found = capture(model, inputs(4), blade.Config(allow_tracing=("inner",)))
    assert found.how == "script"
    for rows in (4, 3):
        assert torch.equal(found.module(*inputs(rows)), model(*inputs(rows)))


def attention(x: T, index: T, mask: T) -> T:
    """As OpenAI's Whisper calls it: causal where there are several positions."""
    count = x.shape[0]
    heads = x.view(1, 2, count, 3)
    is_causal = index is not None and count > 1
    return functional.scaled_dot_product_attention(heads, heads, heads, is_causal=is_causal)


def by_half(x: T, index: T, mask: T) -> T:
    """The comparison is one of computed sizes; comparisons of values stay tensors."""
    is_wide = (x.shape[0] + 3) // 2 >= x.shape[1] - 3
    return torch.where(x > 0, x, 2 * x).softmax(-1) + torch.argmax(x, 0, keepdim=is_wide).sum()


def unpooled(x: T, index: T, mask: T) -> T:
    """torch checks the sizes that it computes."""
    pooled, places = functional.max_pool2d(x[None], 2, return_indices=True)
    return functional.max_unpool2d(pooled * 2, places, 2)


@pytest.mark.parametrize("function", [attention, by_half, unpooled])
def test_a_comparison_of_sizes_is_a_bool(function: Function) -> None:
    model = Calls(function).eval()
    found = capture(model, inputs(4), blade.Config())
    assert found.how == "trace"
    for rows in (4, 7, 3):
        assert torch.equal(found.module(*inputs(rows)), model(*inputs(rows)))


def test_where_a_comparison_falls_out_otherwise_the_original_answers() -> None:
    model = Calls(attention).eval()
    module = blade.optimize(model, inputs(4), blade.Config(timing=False, max_paths=1))
    for rows in (4, 1, 6):
        assert torch.allclose(module(*inputs(rows)), model(*inputs(rows)), atol=1e-6)


def test_other_errors_are_the_models() -> None:
    def refuses(x: T, index: T, mask: T) -> T:
        raise RuntimeError("no op")

    with pytest.raises(blade.InputError, match="no op"):
        capture(Calls(refuses).eval(), inputs(4), blade.Config())
