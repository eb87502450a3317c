# SPDX-License-Identifier: Apache-2.0
"""Weights that are widened at use: the values of a float64 copy, and how many bytes of float64 live."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F
from wide_bytes import WideBytes

from blade.verification import fp64_reference, wide_at_use
from blade.verification.fp64_reference import Fp64Reference
from blade.verification.wide_at_use import WideAtUse, attend, attention_in_parts

aten = torch.ops.aten
RNG = torch.Generator().manual_seed(0)
Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_at_use, "PART", 1 << 12)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=RNG).to(dtype)


LSTM = nn.LSTM(64, 16).eval().bfloat16()


def lstm(x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    names = [name for name, _ in LSTM.named_parameters()]
    like = WideAtUse if isinstance(first, WideAtUse) else torch.Tensor.double
    given = {name: like(p.detach()) for name, p in LSTM.named_parameters()}
    assert names[0] == "weight_ih_l0"
    made: torch.Tensor = torch.func.functional_call(LSTM, given, (x,))[0]
    return made


USES: dict[str, tuple[Binary, tuple[int, ...], tuple[int, ...]]] = {
    "linear": (lambda x, w: F.linear(x, w, w[:, 0]), (2, 5, 64), (96, 64)),
    "rows": (F.linear, (5, 64), (96, 64)),
    "matmul": (torch.matmul, (5, 96), (96, 64)),
    "from the left": (lambda x, w: w @ x, (64, 3), (96, 64)),
    "both": (lambda x, w: x @ (w @ w.t()), (5, 96), (96, 64)),
    "experts": (torch.bmm, (4, 7, 64), (4, 64, 32)),
    "experts from the left": (lambda x, w: w.mT @ x, (4, 64, 7), (4, 64, 32)),
    "einsum": (partial(torch.einsum, "bij,bjk->bik"), (4, 7, 64), (4, 64, 32)),
    "lookup": (lambda x, w: F.embedding(torch.tensor([[3, 95]]), w) * x[0], (1, 64), (96, 64)),
    "convolution": (F.conv2d, (2, 8, 9, 9), (16, 8, 3, 3)),
    "norm": (lambda x, w: F.layer_norm(x, (64,), w[0], w[1]), (5, 64), (2, 64)),
    "sum": (lambda x, w: x + w.sum(0), (5, 64), (96, 64)),
    "lstm": (lstm, (3, 2, 64), (1,)),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("use", USES)
def test_an_op_gives_what_it_gives_for_a_wide_copy(use: str, mode: Callable[[], Any]) -> None:
    run, of_x, of_weight = USES[use]
    x, weight = draw(*of_x, dtype=torch.float64), draw(*of_weight)
    with mode():
        got, want = run(x, WideAtUse(weight)), run(x, weight.double())
    assert type(got) is torch.Tensor and got.dtype is torch.float64 and got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-12)


def test_a_weight_reads_as_float64_and_may_not_be_written_to() -> None:
    weight = WideAtUse(draw(4, 3))
    parameter = nn.Parameter(weight, requires_grad=False)
    assert parameter.dtype is weight.dtype is torch.float64 and parameter.stride() == (3, 1)
    assert isinstance(parameter, nn.Parameter) and isinstance(weight[1:].t(), WideAtUse)
    with pytest.raises(NotImplementedError, match=r"add_.*writes to a weight"):
        weight.add_(1)


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "floats": {"attn_mask": draw(33, 47, dtype=torch.float64)},
    "keys": {"attn_mask": torch.rand(2, 1, 1, 47, generator=RNG) > 0.3},
    "rows": {"attn_mask": torch.rand(2, 1, 33, 47, generator=RNG) > 0.3},
    "scaled": {"scale": 0.5},
}


@pytest.mark.parametrize("mask", MASKS)
def test_attention_in_parts_is_attention(mask: str) -> None:
    q, k, v = (draw(2, n, s, 16, dtype=torch.float64) for n, s in ((4, 33), (2, 47), (2, 47)))
    got = attend(q, k, v, **MASKS[mask], enable_gqa=True)
    want = F.scaled_dot_product_attention(q, k, v, **MASKS[mask], enable_gqa=True)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def test_python_code_on_this_thread_attends_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    monkeypatch.setattr(wide_at_use, "attend", lambda q, *_: seen.append(q.dtype))
    before, q = F.scaled_dot_product_attention, draw(1, 3, 4)
    with attention_in_parts(), attention_in_parts():
        other = threading.Thread(target=F.scaled_dot_product_attention, args=3 * [q.double()])
        other.start()
        other.join()
        F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(*3 * [q.double()])
    assert F.scaled_dot_product_attention is before and seen == [torch.float64]


class Layers(nn.Module):
    """An FX module's ops: eight products, of which each weight takes 32 KiB in float64."""

    def __init__(self) -> None:
        super().__init__()
        for k in range(8):
            self.register_buffer(f"w{k}", draw(64, 64) / 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        for k in range(8):
            x = aten.tanh.default(aten.linear.default(x, getattr(self, f"w{k}")))
        return (x,)


def test_a_cluster_holds_few_weights_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, x = torch.fx.symbolic_trace(Layers()), draw(2, 64)
    with WideBytes() as kept:
        [want] = Fp64Reference(gm)((x,))
    monkeypatch.setattr(fp64_reference, "KEPT", 1 << 15)
    truth = Fp64Reference(gm)
    with WideBytes() as bounded:
        [got] = truth((x,))
        truth((x,))
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    assert kept.peak >= 8 << 15
    assert bounded.peak <= (1 << 15) + 2 * wide_at_use.PART + (1 << 13)


class WritesTo(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (aten.add.Tensor(aten.mul_.Tensor(x, 2.0), x),)


def test_an_input_that_is_written_to_is_widened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp64_reference, "KEPT", 0)
    x = draw(3, 5)
    [got] = Fp64Reference(torch.fx.symbolic_trace(WritesTo()))((x.clone(),))
    assert torch.equal(got, 4 * x.double())


def test_an_input_or_weight_that_is_returned_is_an_ordinary_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fp64_reference, "KEPT", 0)

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", draw(4, 3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, aten.t.default(self.w)

    module, x = Returns(), draw(2, 3)
    got = Fp64Reference(torch.fx.symbolic_trace(module))((x,))
    assert [type(t) for t in got] == [torch.Tensor] * 2
    assert torch.equal(got[0], x.double()) and torch.equal(got[1], module.w.t().double())


def test_a_kernel_that_stays_narrow_gets_a_slice_of_padded_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def kernel(bias: torch.Tensor) -> torch.Tensor:
        seen.append((bias.dtype, bias.stride(), bias.data_ptr() % 16))
        return bias * 2

    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    bias = graph.call_function(torch.ops.aten.slice.Tensor, (given, 1, 0, 49))
    bias = graph.call_function(torch.ops.aten.expand.default, (bias, [3, 4, 49]))
    graph.output((graph.call_function(kernel, (bias,)),))
    bias.meta["val"] = torch.zeros(4, 56, dtype=torch.bfloat16)[:, :49].expand(3, 4, 49)
    x = torch.randn(4, 56, dtype=torch.bfloat16)
    monkeypatch.setattr(fp64_reference, "_NOT_WIDENED", (kernel,))
    [got] = Fp64Reference(torch.fx.GraphModule(torch.nn.Module(), graph))((x,))
    assert seen == [(torch.bfloat16, (0, 56, 1), 0)]
    assert got.dtype == torch.float64 and torch.equal(got, 2 * x[:, :49].double().expand(3, 4, 49))


def test_rows_are_padded_where_their_layout_depends_on_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def kernel(bias: torch.Tensor) -> torch.Tensor:
        seen.append((bias.dtype, bias.stride()))
        return bias * 2

    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    bias = graph.call_function(torch.ops.aten.neg.default, (given,))
    graph.output((graph.call_function(kernel, (bias,)),))
    rows = ShapeEnv().create_unbacked_symint()
    with FakeTensorMode(shape_env=rows.node.shape_env):
        bias.meta["val"] = torch.empty((4, rows, 49), dtype=torch.bfloat16)
    x = torch.randn(4, 3, 49, dtype=torch.bfloat16)
    monkeypatch.setattr(fp64_reference, "_NOT_WIDENED", (kernel,))
    [got] = Fp64Reference(torch.fx.GraphModule(torch.nn.Module(), graph))((x,))
    assert seen == [(torch.bfloat16, (168, 56, 1))] and torch.equal(got, -2 * x.double())


def test_views_of_what_fp64_lays_out_otherwise() -> None:
    """Convolutions in float64 may return another layout than in the dtype that was traced."""
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    turned = graph.call_function(torch.ops.aten.permute.default, (given, [1, 0]))
    graph.output((graph.call_function(torch.ops.aten.view.default, (turned, [12])),))
    x = torch.randn(3, 4)
    [got] = Fp64Reference(torch.fx.GraphModule(torch.nn.Module(), graph))((x,))
    assert torch.equal(got, x.double().t().reshape(12))


def test_inputs_of_a_kernel_that_stays_narrow_keep_their_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels save a padded bias for their gradient, where the traced graph has a dense one."""
    seen = []

    def kernel(bias: torch.Tensor) -> torch.Tensor:
        seen.append(bias)
        return bias * 2

    graph = torch.fx.Graph()
    bias = graph.placeholder("bias")
    graph.output((graph.call_function(kernel, (bias,)),))
    bias.meta["val"] = torch.empty(4, 49, dtype=torch.bfloat16)
    x = torch.randn(4, 56, dtype=torch.bfloat16)[:, :49]
    monkeypatch.setattr(fp64_reference, "_NOT_WIDENED", (kernel,))
    [got] = Fp64Reference(torch.fx.GraphModule(torch.nn.Module(), graph))((x,))
    assert seen[0] is x and torch.equal(got, 2 * x.double())
