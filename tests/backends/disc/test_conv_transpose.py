# SPDX-License-Identifier: Apache-2.0
"""Transposed convolutions with constant weights, as convolutions per phase of the stride, against float64."""

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from op_trace import trace

from blade.backends.disc.compiler import compile_graph
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.target.cpu import host
from blade.runtime.engine import Engine, make_engine

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]
UNIT = 2.0**-24
FUNCTIONS = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


@dataclass(frozen=True)
class Transposed:
    """A transposed convolution: weight's shape [C, O, *kernel] and what torch calls the rest."""

    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    extra: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @property
    def axes(self) -> int:
        return len(self.stride)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        how = (self.stride, self.padding, self.extra, self.groups, self.dilation)
        return FUNCTIONS[self.axes - 1](x, weight, bias, *how)


def square(
    c: int, o: int, kernel: int, stride: int, padding: int = 0, extra: int = 0, axes: int = 2
) -> Transposed:
    each = ((n,) * axes for n in (stride, padding, extra, 1))
    return Transposed((c, o, *(kernel,) * axes), *each)


CASES = {
    "vocoder": square(24, 20, 16, 8, 4, axes=1),
    "taps that do not divide evenly": square(5, 20, 5, 3, 1, 2, axes=1),
    "beyond the last tap": square(5, 20, 3, 3, 0, 2, axes=1),
    "generator": square(24, 16, 4, 2, 1),
    "generator to pixels": square(24, 3, 4, 2, 1),
    "decoder": square(20, 18, 2, 2),
    "odd kernel": square(7, 16, 3, 2, 1, 1),
    "unlike axes": Transposed((6, 17, 5, 2), (3, 1), (4, 0), (1, 0), (1, 3)),
    "stride 1": square(9, 16, 3, 1, 1),
    "more padding than taps": square(4, 16, 3, 1, 3, axes=1),
    "volume": square(3, 16, 4, 2, 1, axes=3),
}


def compiled(
    conv: Transposed, weight: torch.Tensor, bias: torch.Tensor | None, sizes: list[int]
) -> tuple[list[str], Engine]:
    """The ops that are called, and an engine for any batch and any sizes."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return F.leaky_relu(conv(x, weight, bias), 0.25)

    x = torch.randn(2, weight.shape[0], *sizes)
    gm, shape_env = trace(run, [x], [[True, False, *[True] * conv.axes]])
    calls = [str(v.attrs["target"]) for v in lower(gm, shape_env).values if v.op == "call"]
    made = compile_graph(gm, shape_env, host())
    return calls, make_engine("t", "disc", made.program, made.object, list(made.constants), {})


def check(conv: Transposed, with_bias: bool = True) -> None:
    """Every sum of k products and a bias is off by at most gamma(k + 2) times the sum of the magnitudes; the slope of
    the activation, a power of two, adds nothing."""
    weight = torch.randn(conv.weight)
    bias = torch.randn(conv.weight[1]) if with_bias else None
    smallest = [9, 7, 6][: conv.axes]
    calls, engine = compiled(conv, weight, bias, smallest)
    assert not calls
    steps = (weight[:, 0].numel() + 2) * UNIT
    for batch, more in ((1, 0), (2, 1), (3, -3), (0, 2), (1, 14)):
        x = torch.randn(batch, conv.weight[0], *(n + more for n in smallest))
        want = conv(x.double(), weight.double(), None if bias is None else bias.double())
        size = conv(
            x.abs().double(), weight.abs().double(), None if bias is None else bias.abs().double()
        )
        [got] = engine.try_execute([x]) or pytest.fail(engine.last_error())
        assert got.shape == want.shape
        off = (got - F.leaky_relu(want, 0.25)).abs()
        assert bool((off <= steps / (1 - steps) * size).all()), (batch, more)


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    torch.manual_seed(0)
    check(CASES[name], with_bias=name != "decoder")


@given(
    channels=st.tuples(st.sampled_from([2, 3, 20]), st.sampled_from([1, 3, 16, 21])),
    axes=st.lists(
        st.tuples(*(st.integers(*bounds) for bounds in ((1, 4), (0, 4), (0, 2), (0, 9)))),
        min_size=1,
        max_size=2,
    ),
)
@settings(max_examples=8, deadline=None)
def test_any_geometry(channels: tuple[int, int], axes: list[tuple[int, int, int, int]]) -> None:
    """Per axis: the stride, taps beyond it, the padding, and what of the stride is padded at the end."""
    torch.manual_seed(1)
    stride = tuple(s for s, _, _, _ in axes)
    kernel = tuple(s + more for s, more, _, _ in axes)
    padding = tuple(min(p, more) for _, more, p, _ in axes)
    extra = tuple(e % s for s, _, _, e in axes)
    check(Transposed((*channels, *kernel), stride, padding, extra, (1,) * len(axes)))


@pytest.mark.parametrize(
    "conv",
    [
        Transposed((4, 2, 3), (2,), (0,), (0,), (1,), 2),  # groups
        Transposed((4, 3, 2), (3,), (0,), (0,), (1,)),  # a phase without a tap
        Transposed((4, 3, 3), (2,), (0,), (0,), (2,)),  # taps of unequal phases
    ],
)
def test_others_are_called(conv: Transposed) -> None:
    torch.manual_seed(2)
    weight = torch.randn(conv.weight)
    calls, engine = compiled(conv, weight, None, [9])
    assert calls == ["aten.conv_transpose1d.default"]
    x = torch.randn(3, 4, 11)
    [got] = engine.try_execute([x]) or pytest.fail(engine.last_error())
    torch.testing.assert_close(got, F.leaky_relu(conv(x, weight, None), 0.25))


def test_computed_weights_are_called() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose1d(x, w, None, 2)

    gm, shape_env = trace(
        run, [torch.randn(2, 4, 9), torch.randn(4, 3, 4)], [[True] * 3, [False] * 3]
    )
    assert [v.op for v in lower(gm, shape_env).values].count("call") == 1


def test_an_empty_result_is_left_to_torch() -> None:
    conv = square(4, 16, 2, 1, 1)
    _, engine = compiled(conv, torch.randn(conv.weight), None, [9, 7])
    assert engine.try_execute([torch.randn(1, 4, 2, 3)]) is not None
    assert engine.try_execute([torch.randn(1, 4, 1, 3)]) is None


def test_weights_written_in_place_are_not_stale() -> None:
    """Packed kernels follow their constants."""
    torch.manual_seed(3)
    conv = CASES["generator"]
    weight = torch.randn(conv.weight)
    _, engine = compiled(conv, weight, None, [9, 7])
    x = torch.randn(2, 24, 5, 5)
    before = engine.try_execute([x]) or pytest.fail(engine.last_error())
    with torch.no_grad():
        weight.mul_(-2)
    after = engine.try_execute([x]) or pytest.fail(engine.last_error())
    want = F.leaky_relu(conv(x, weight, None), 0.25)
    torch.testing.assert_close(after[0], want, rtol=1e-4, atol=1e-4)
    assert not torch.equal(before[0], after[0])
