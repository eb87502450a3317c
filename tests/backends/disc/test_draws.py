# SPDX-License-Identifier: Apache-2.0
"""Random numbers as calls of a GPU's program, on fake CUDA tensors: all of them, in order, each by itself."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from blade.backends.disc.compiler import compile_graph
from blade.backends.disc.frontend.aot_decompositions import decompositions
from blade.backends.disc.frontend.support import why_not_op
from blade.backends.disc.target.cpu import CpuTarget
from blade.backends.disc.target.gpu import GpuTarget
from blade.clustering.cluster import cluster
from blade.core.reason import Code, Reason
from blade.dynamo.forward_backward import forget_states
from blade.dynamo.rewrites import apply_rewrites
from blade.graph.fx import extract as fx_extract
from blade.graph.fx.view import FxView, view_fx

aten = torch.ops.aten
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _stand_ins_are_fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """There is no GPU to have real ones on."""
    mode = FakeTensorMode()

    def stand_in(fake: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_strided(
                fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device
            )

    monkeypatch.setattr(fx_extract, "materialize", stand_in)
    yield


def traced(
    function: Callable[..., Any], shapes: Sequence[Sequence[int]], device: str = "cuda"
) -> FxView:
    """As AOTAutograd hands it over."""
    with FakeTensorMode():
        given = [torch.empty(shape, dtype=BF16, device=device) for shape in shapes]
        gm: GraphModule = make_fx(function, decomposition_table=decompositions())(*given)
    apply_rewrites(gm.graph)
    return view_fx(gm.graph)


def refused(view: FxView) -> list[Reason]:
    reasons = [
        view.excluded.get(i) or why_not_op(n, lambda _: None) for i, n in enumerate(view.nodes)
    ]
    return [why for why in reasons if why is not None]


def program(view: FxView, target: CpuTarget | GpuTarget | None = None) -> list[str]:
    """The instructions of the one cluster that there is to be."""
    assert not refused(view)
    (group,) = cluster(view.problem([frozenset({"disc"})] * len(view.nodes))).groups
    found = fx_extract.extract_fx("c", view, group.nodes, {}).cluster
    text = compile_graph(found.gm, found.shape_env, target or GpuTarget()).program
    lines = text.split("instructions ")[1].splitlines()[1:]
    return [line for line in lines if not line.startswith(("outputs", "end"))]


def draws(lines: Sequence[str]) -> list[str]:
    """What is drawn, with its first number: the probability."""
    found = [re.match(r"draw call aten::(\S+) .*?f:(\S+)", line) for line in lines]
    return [f"{m[1]} {m[2]}" for m in found if m is not None]


@pytest.mark.needs("triton")
def test_a_layer_with_dropout_in_its_attention_is_one_program() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor, other: torch.Tensor) -> Any:
        h = torch.nn.functional.dropout(torch.nn.functional.linear(x, w), 0.1) + other
        q = h.view(2, 16, 4, 16).transpose(1, 2)
        o = aten._scaled_dot_product_cudnn_attention(q, q, q, None, True, 0.2)
        y = o[0].transpose(1, 2).reshape(2, 16, 64)
        gradient = aten._scaled_dot_product_cudnn_attention_backward(
            o[0], q, q, q, *o[:2], *o[6:8], None, None, None, 16, 16, 0.2, False
        )
        return torch.nn.functional.dropout(y, 0.3) * 2, o[1], o[6], *gradient

    lines = program(traced(layer, ((2, 16, 64), (64, 64), (2, 16, 64))))
    assert draws(lines) == [
        "native_dropout 0.1",
        "_scaled_dot_product_cudnn_attention 0.2",
        "native_dropout 0.3",
    ]
    (attention,) = [line for line in lines if "cudnn_attention " in line]
    assert re.search(r" 8 \d+ \d+ - - - - \d+ \d+$", attention)  # nobody takes the numbers
    (gradient,) = [line for line in lines if "cudnn_attention_backward " in line]
    assert gradient.startswith("call ")  # it is told what was drawn


@pytest.mark.needs("triton")
def test_equal_draws_are_several_and_one_nobody_reads_moves_the_generator_on() -> None:
    def function(x: torch.Tensor) -> Any:
        y = aten.native_dropout(x, 0.5, True)[0] + aten.native_dropout(x, 0.5, True)[0]
        aten.native_dropout(x, 0.25, True)
        return y + aten.bernoulli.p(x, 0.125)

    lines = program(traced(function, ((4, 8),)))
    expected = ["native_dropout 0.5", "native_dropout 0.5", "native_dropout 0.25"]
    assert draws(lines) == [*expected, "bernoulli.p 0.125"]


@pytest.mark.needs("triton")
def test_draws_stay_in_order_where_a_kernel_would_rather_have_the_later_one() -> None:
    """One kernel could compute all sums, if it waited for the last draw; its first sum is drawn from."""

    def function(x: torch.Tensor) -> Any:
        first = x + 1
        a = aten.native_dropout(first, 0.1, True)[0]
        b = aten.native_dropout(x, 0.2, True)[0]
        return first * 2, (first + b) * 3, a

    assert draws(program(traced(function, ((4, 8),)))) == [
        "native_dropout 0.1",
        "native_dropout 0.2",
    ]


@pytest.mark.parametrize("kernel", ["efficient", "flash"])
def test_attention_that_keeps_its_generator_on_the_cpu_stays_outside(kernel: str) -> None:
    op = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
    before = (None, True) if kernel == "efficient" else ()
    view = traced(lambda x: op(x, x, x, *before, 0.1)[0], ((2, 4, 16, 16),))
    assert [why.code for why in refused(view)] == [Code.RANDOM]


def test_masks_on_the_cpu_are_drawn_outside() -> None:
    view = traced(lambda x: aten.native_dropout(x, 0.5, True)[0] + 1, ((4, 8),), "cpu")
    assert {why.code for why in refused(view)} == {Code.RANDOM}
    subjects = {(why.subject or "").split("::")[1] for why in refused(view)}
    assert subjects == {"bernoulli", "empty_strided"}


@pytest.mark.needs("triton")
@pytest.mark.parametrize("kernel", ["efficient", "cudnn", "flash"])
def test_attention_that_drops_nothing_returns_no_state(kernel: str) -> None:
    """What stands where the state would be is memory that nobody wrote to."""
    forward = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
    backward = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward")

    def both(x: torch.Tensor) -> Any:
        o = forward(x, x, x) if kernel == "flash" else forward(x, x, x, None, True)
        out, logs, *_ = o
        if kernel == "flash":
            rest = (out, logs, *o[2:6], 0.0, False, *o[6:8])
            return o[0], *backward(out * 2, x, x, x, *rest)[:3]
        if kernel == "cudnn":
            rest = (out, logs, *o[6:8], None, None, None, 16, 16, 0.0, False)
        else:
            rest = (None, out, logs, *o[2:4], 0.0, [True, True, True, False], False)
        return o[0], *backward(out * 2, x, x, x, *rest)[:3]

    with FakeTensorMode():
        gm = make_fx(both)(torch.empty(2, 4, 16, 16, dtype=BF16, device="cuda"))
    forget_states(gm.graph)
    gm.graph.eliminate_dead_code()
    lines = program(view_fx(gm.graph))
    assert not draws(lines)
    (attention,) = [line for line in lines if f"{kernel}_attention " in line]
    assert re.search(r" 2 \d+ \d+$", attention)
    assert sum(line.startswith("launch") for line in lines) == 2  # the product by 2, and a zero
