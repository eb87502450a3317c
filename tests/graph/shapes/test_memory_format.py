# SPDX-License-Identifier: Apache-2.0
"""How a tensor's axes lie, and making another tensor's lie so."""

import pytest
import torch

from blade.capture.derived_shapes import resized
from blade.graph.shapes.memory_format import (
    dense_order,
    in_order,
    lies_as,
    merged,
    order_of,
    stride_order,
)
from blade.verification.cases import verification_cases


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 0, 1, 2), (1, 0, 3, 2)])
def test_a_permuted_tensor(order: tuple[int, ...]) -> None:
    back = [order.index(k) for k in range(4)]
    x = torch.randn([2, 3, 4, 5]).permute(order).contiguous().permute(back)
    assert order_of(x) == order
    other = torch.randn(5, 3, 2, 7)
    laid_out = in_order(other, order_of(x))
    assert torch.equal(laid_out, other) and order_of(laid_out) == order


def test_orders_that_are_none() -> None:
    x = torch.randn(4, 6)
    for one in (x, x[:, ::2], x[::2].t(), x[:1].expand(4, 6), torch.randn(3), torch.tensor(1.0)):
        assert order_of(one) is None
    assert in_order(x, None) is x


def test_what_stands_for_a_sample_lies_as_it_does() -> None:
    x = torch.randn(2, 3, 8, 6).contiguous(memory_format=torch.channels_last)
    (probe,) = resized((x,), {(0, 0): 5, (0, 2): 7})
    assert isinstance(probe, torch.Tensor) and probe.shape == (5, 3, 7, 6)
    assert order_of(probe) == order_of(x)
    found = list(verification_cases([(x,)], [(probe,)]))
    assert {c.kind for c in found} == {"sample", "probe", "size", "contents", "layout"}
    for case in found:
        lies = case.inputs[0].is_contiguous(memory_format=torch.channels_last)
        assert lies == (case.kind != "layout"), case.name


IMAGE = torch.randn(2, 6, 9, 3).permute(0, 3, 1, 2)  # channels-last


def test_a_slice_has_the_order_of_what_it_is_a_slice_of() -> None:
    for part in (IMAGE[:, :, ::2], IMAGE[:, :2], IMAGE[:, :, 1:4, 2:]):
        assert order_of(part) is None
        assert stride_order(part) == (0, 2, 3, 1)
    assert stride_order(IMAGE) == order_of(IMAGE)
    rows = torch.randn(4, 6)
    for one in (rows, rows[:, ::2], rows[:1].expand(4, 6).t(), rows.as_strided((3, 3), (1, 1))):
        assert stride_order(one) is None


def test_the_order_of_what_is_dense_leaves_out_axes_of_size_1() -> None:
    assert dense_order(IMAGE) == (0, 2, 3, 1)
    assert dense_order(IMAGE[:1]) == (2, 3, 1)
    # tokens as an image: the stride of the batch of 1 is that of a row of tokens
    assert dense_order(torch.randn(1, 54, 3).transpose(1, 2).view(1, 3, 6, 9)) == (2, 3, 1)
    assert dense_order(torch.randn(2, 3)) == (0, 1)
    assert dense_order(IMAGE[:, :2]) is None
    assert merged((0, 1, 2, 3), (2, 3, 1)) == (0, 2, 3, 1)


@pytest.mark.parametrize(
    ("tensor", "like", "same"),
    [
        (IMAGE[:1], IMAGE, True),
        (IMAGE[:1].contiguous(), IMAGE, False),
        (IMAGE.contiguous(), IMAGE[:1].contiguous(), True),
        (IMAGE, IMAGE[:1].contiguous(), False),
        (IMAGE, IMAGE[:1], False),  # where a batch of 1 lies is not known
        (IMAGE[:, :2], IMAGE, False),  # gaps
        (IMAGE[:, :2], IMAGE[:, :2], False),
        (IMAGE[0], IMAGE, False),
    ],
)
def test_lying_as_something_of_another_size(
    tensor: torch.Tensor, like: torch.Tensor, same: bool
) -> None:
    assert lies_as(tensor, like) == same
