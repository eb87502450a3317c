# SPDX-License-Identifier: Apache-2.0
"""torch's memory-efficient attention, which takes a bias with rows of eight elements or a multiple alone."""

import pytest
import torch
from disc_programs import legalized
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.ir.graph import Value
from blade.backends.disc.ir.views import view_of

aten = torch.ops.aten


def calls(length: int) -> list[Value]:
    """Attention and its gradient, with a bias that torch has padded and cut, as in Swin."""
    more = -length % 8

    def function(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        bias = aten.unsqueeze(aten.permute(table, [2, 0, 1]), 0)
        bias = aten.slice(aten.constant_pad_nd(bias, [0, more], 0.0), -1, 0, length)
        bias = aten.expand(bias, [q.shape[0], -1, -1, -1])
        out, *sums = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)
        wanted = [True, True, True, True]
        return aten._scaled_dot_product_efficient_attention_backward(
            out, q, k, v, bias, out, *sums, 0.0, wanted
        )

    with FakeTensorMode():
        form = {"dtype": torch.bfloat16, "device": "cuda"}
        given = [torch.empty(4, 3, length, 32, **form) for _ in range(3)]
        gm = make_fx(function)(*given, torch.empty(length, length, 3, **form))
    return [v for v in lower(gm, ShapeEnv()).values if v.op == "call"]


@pytest.mark.parametrize(("length", "row"), [(49, 56), (57, 64)])
def test_a_bias_is_padded_in_memory(length: int, row: int) -> None:
    *pads, forward, backward = calls(length)
    assert {one.attrs["target"] for one in pads} == {aten.constant_pad_nd.default}
    assert {one.shape for one in pads} == {(3, length, row)}  # no copy per image
    for one, place in ((forward, 3), (backward, 4)):
        bias = one.args[place]
        assert bias.op == "broadcast" and bias.shape == (4, 3, length, length)
        assert bias.args[0].op == "slice" and bias.args[0].args[0] in pads


def test_one_of_such_rows_stays_as_it_is() -> None:
    assert [str(one.attrs["target"]).split(".")[1] for one in calls(64)] == [
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
    ]


@pytest.mark.parametrize("permuted", [True, False])
def test_the_gradient_reads_the_result_as_forward_lays_it(permuted: bool) -> None:
    """torch's kernel takes the rows of all heads for adjacent, whatever the strides are."""

    def function(
        bias: torch.Tensor, sums: torch.Tensor, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        grad, q, k, v, out = (x.transpose(1, 2) if permuted else x for x in given)
        none = torch.zeros((), dtype=torch.int64, device="cuda")
        return aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, bias, out, sums, none, none, 0.0, [True, True, True, True]
        )

    shape = (4, 64, 3, 32) if permuted else (4, 3, 64, 32)
    with FakeTensorMode():
        given = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(5)]
        bias = torch.empty(4, 3, 64, 64, dtype=torch.bfloat16, device="cuda")
        gm = make_fx(function)(bias, torch.empty(4, 3, 64, device="cuda"), *given)
    graph = legalized(lower(gm, ShapeEnv()))
    *copies, call = [v for v in graph.values if v.op == "call"]
    assert [one.attrs["target"] for one in copies] == [aten.repeat.default] * (not permuted)
    view = view_of(call.args[5])
    assert view is not None and view.strides == (64 * 96, 32, 96, 1)
