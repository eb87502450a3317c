# SPDX-License-Identifier: Apache-2.0
"""Which guards of torch's shape functions stay: those whose answer changes a size."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import sympy
import torch
from op_trace import trace
from torch.utils._sympy.functions import FloorDiv, Mod

from blade.backends.disc.frontend.lower import lower
from blade.graph.shapes.stride_only_guards import StrideOnlyGuards


def facts(function: Callable[..., Any], *shapes: tuple[int, ...]) -> list[str]:
    """What the lowered program relies on; every size is dynamic."""
    samples = [torch.randn(s) for s in shapes]
    gm, shape_env = trace(function, samples, [[True] * len(s) for s in shapes])
    return [str(fact.relation) for fact in lower(gm, shape_env).facts]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.transpose(0, 1).reshape(-1),
        lambda x: x.permute(2, 0, 1).reshape(x.shape[2], -1) * 2,
        lambda x: torch.einsum("abc,abd->acd", x, x),
        lambda x: x[None].contiguous(memory_format=torch.channels_last),
        lambda x: x.transpose(0, 1).reshape(-1)[None].squeeze(0) + 1,
    ],
)
def test_a_question_about_strides_is_dropped(function: Callable[..., Any]) -> None:
    assert not [f for f in facts(function, (3, 5, 4)) if f.startswith("Ne")]


def test_a_size_that_squeeze_would_drop_is_guarded() -> None:
    assert [f for f in facts(lambda x: x.squeeze(1) * 2, (3, 5)) if f.startswith("Ne")]


@pytest.mark.parametrize(
    ("function", "dropped"),
    [
        (lambda x, y: x.t().reshape(-1) + y.t().reshape(-1), True),
        (lambda x, y: x.squeeze(0) + y.squeeze(0), False),
    ],
)
def test_sizes_are_compared_where_the_answer_would_be_the_other(
    function: Callable[..., Any], dropped: bool
) -> None:
    samples = [torch.randn(3, 5), torch.randn(3, 5)]
    gm, shape_env = trace(function, samples, [[True, True]] * 2)
    size = shape_env.replace(next(iter(gm.graph.nodes)).meta["val"].shape[0].node.expr)
    chosen = StrideOnlyGuards(gm, shape_env)
    assert chosen.only_chose_strides(sympy.Ne(size, 1)) == dropped
    assert chosen.only_chose_strides(sympy.Ne(8 * size, 8)) == dropped
    assert not chosen.only_chose_strides(sympy.Eq(size, 3))
    assert not chosen.only_chose_strides(sympy.Ne(size, 1000))  # never put to the test


@pytest.mark.parametrize("batch", [1, 2])
def test_a_quotient_that_may_be_one(batch: int) -> None:
    """Windows of an image, 16 for each: a cluster knows their number alone."""

    def windows(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        images = x.shape[0] // 16
        hidden = mask[None, :, None].expand(images, 16, 1, 9, 9).reshape(-1, 1, 9, 9)
        return torch.softmax(x + hidden, -1)

    samples = [torch.randn(16 * batch, 3, 9, 9), torch.randn(16, 9, 9)]
    dynamic = [[True, False, False, False], [False] * 3]
    gm, shape_env = trace(windows, samples, dynamic)
    relations = [fact.relation for fact in lower(gm, shape_env).facts]
    [size] = {s for r in relations for s in r.free_symbols}
    for images in (1, 2, 5):  # at every one of these sizes
        assert all(r.subs(size, 16 * images) == sympy.true for r in relations), relations
    assert any(r.subs(size, 8) == sympy.false for r in relations), "no whole images"
    chosen = StrideOnlyGuards(gm, shape_env)
    assert chosen.only_chose_strides(sympy.Ne(FloorDiv(size, 16), 1))


def test_a_quotient_that_squeeze_would_drop_is_guarded() -> None:
    gm, shape_env = trace(
        lambda x: x.view(x.shape[0] // 16, 16).squeeze(0) * 2, [torch.randn(32)], [[True]]
    )
    [size] = {s for g in shape_env.guards for s in shape_env.replace(g.expr).free_symbols}
    assert not StrideOnlyGuards(gm, shape_env).only_chose_strides(sympy.Ne(FloorDiv(size, 16), 1))


def test_what_torch_does_not_do_is_guarded() -> None:
    found = facts(lambda x: torch.nn.functional.pad(x, (1, 2), mode="reflect"), (3, 5))
    # one relation, or, with torch 2.12, two
    least = re.fullmatch(r"\(?s\d+ > 1\)?(?: & \(|, )s\d+ > 2\)?", ", ".join(found))
    assert least, found


def test_sizes_at_which_a_relation_has_no_value_say_nothing() -> None:
    """Division by a size of 0; the remainder of a size too small for a window."""
    gm, shape_env = trace(lambda x: x.t().reshape(-1), [torch.randn(3, 5)], [[True, True]])
    a, b = (s.node.expr for s in next(iter(gm.graph.nodes)).meta["val"].shape)
    for relation in (
        sympy.Ne(FloorDiv(8 * b, a), 8 * b),
        sympy.Ne(FloorDiv(8 * b, a - 1), 8 * b),
        sympy.Ne(Mod(a - 2, 2), 0),
    ):
        assert StrideOnlyGuards(gm, shape_env).only_chose_strides(relation)
    assert not StrideOnlyGuards(gm, shape_env).only_chose_strides(sympy.Ne(Mod(a - 2, 2) + a, 1))


def test_of_equal_layers_one_is_tested() -> None:
    def layers(x: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            x = x.t().reshape(x.shape).relu()
        return x.squeeze(0) if count > 2 else x

    chosen = []
    for count in (1, 2, 9):
        function = partial(layers, count=count)
        gm, shape_env = trace(function, [torch.randn(3, 5)], [[True, True]])
        chosen.append(StrideOnlyGuards(gm, shape_env))
    once, twice, often = (len(one.nodes) for one in chosen)
    assert once <= twice < 2 * once and often == twice + 1  # the operands of the first differ
    [size, _] = next(iter(gm.graph.nodes)).meta["val"].shape
    assert not chosen[-1].only_chose_strides(sympy.Ne(size.node.expr, 1))  # that of the last node
