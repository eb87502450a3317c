# SPDX-License-Identifier: Apache-2.0
"""How a tensor's axes lie, and making another tensor's lie so."""

import pytest
import torch

from blade.capture.probes import resized
from blade.fallback.cases import cases
from blade.graph.memory_order import in_order, order_of


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
    found = list(cases([(x,)], [(probe,)]))
    assert {c.kind for c in found} == {"sample", "probe", "size", "contents", "layout"}
    for case in found:
        lies = case.inputs[0].is_contiguous(memory_format=torch.channels_last)
        assert lies == (case.kind != "layout"), case.name
