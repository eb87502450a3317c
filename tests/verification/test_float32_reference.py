# SPDX-License-Identifier: Apache-2.0
"""Values of 16 bits are measured by a reference in float32, which takes half the memory."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_mixed_precision import SAMPLE, traced, verdict

from blade.core.reason import Code, Reason
from blade.report import Verdict
from blade.verification.fp64_reference import Fp64Reference
from blade.verification.tolerance import distance


def half(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Off by 2 %: each product rounds to what it was before."""
    y = x.bfloat16()
    for _ in range(20):
        y = y * 1.001
    return (y,)


def exact(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((x.bfloat16().float() * 1.001**20).bfloat16(),)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes in which references ran."""
    seen: list[torch.dtype] = []
    plain = Fp64Reference.each

    def each(self: Fp64Reference, inputs: Any) -> Iterator[tuple[int, torch.Tensor]]:
        for number, tensor in plain(self, inputs):
            seen.append(tensor.dtype)
            yield number, tensor

    monkeypatch.setattr(Fp64Reference, "each", each)
    return seen


def test_what_is_right_by_float32_needs_no_fp64(runs: list[torch.dtype]) -> None:
    found = verdict(half, exact)
    assert isinstance(found, Verdict), found
    assert runs == [torch.float32]
    assert found.error_fp64 is not None


def test_what_is_wrong_is_so_by_float32(runs: list[torch.dtype]) -> None:
    found = verdict(half, lambda x: (exact(x)[0] * 1.1,))
    assert isinstance(found, Reason) and found.code is Code.WRONG_VALUES
    assert "from a float32 run" in found.detail
    assert set(runs) == {torch.float32}


def test_where_rounding_is_amplified_fp64_says_so(runs: list[torch.dtype]) -> None:
    def amplifies(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (((x.bfloat16() + 1024) - 1024) * 1,)

    found = verdict(amplifies, lambda x: (x.bfloat16() * 20,))
    assert isinstance(found, Reason), found
    assert runs[:2] == [torch.float32, torch.float64]


def test_exact_results_of_float32_are_measured_by_fp64(runs: list[torch.dtype]) -> None:
    found = verdict(lambda x: (x * 3, *half(x)), lambda x: (x * 3.001, *exact(x)))
    assert isinstance(found, Reason) and "output 0 is" in found.detail
    assert runs[:3] == [torch.float32, torch.float32, torch.float64]


def test_where_16_bits_make_the_error_of_float32_results_float32_decides(
    runs: list[torch.dtype],
) -> None:
    """As in the gradients of weights under autocast."""
    found = verdict(lambda x: (half(x)[0].float(),), lambda x: (exact(x)[0].float(),))
    assert isinstance(found, Verdict), found
    assert runs == [torch.float32]


def test_what_cancels_out_is_rounding_by_float32_too(runs: list[torch.dtype]) -> None:
    """As the gradient of a key's bias does in attention."""

    def cancels(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.bfloat16()
        return y * 100, y / 3 * 3 - y

    def exactly(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.bfloat16() * 100, x.bfloat16() * 0

    found = verdict(cancels, exactly)
    assert isinstance(found, Verdict), found
    assert set(runs) == {torch.float32}


@pytest.mark.parametrize("kept", [0, 1 << 30])
def test_values_are_as_in_fp64(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w = x.t().sin().bfloat16()
        y = torch.addmm(x[0].bfloat16(), x.bfloat16(), w)
        z = torch.bmm(y.expand(3, 64, 64), w.expand(3, 64, 64)).mean(0)
        q = z.reshape(1, 2, 32, 64)
        attended = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        return y, z.to(torch.float32), attended, torch.nn.functional.conv1d(z[None], w[:, :, None])

    monkeypatch.setattr("blade.verification.fp64_reference.KEPT", kept)
    truth = Fp64Reference(traced(function))
    want, got = truth((SAMPLE,)), truth.in_float32()((SAMPLE,))
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.dtype, theirs.dtype) == (torch.float32, torch.float64)
        assert distance(mine.double(), theirs) < 1e-6


def test_copies_of_wide_values_take_no_memory() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x.bfloat16() * 3).clone()
        return (y.half().to(torch.float32) + 1,)

    gm = traced(function)
    truth, seen = Fp64Reference(gm), set[int]()
    plain = truth.run_node

    def run_node(n: torch.fx.Node) -> Any:
        made = plain(n)
        if n.op == "call_function":
            seen.add(made.data_ptr())
        return made

    truth.run_node = run_node  # type: ignore[method-assign]
    copies = [n for n in gm.graph.nodes if "copy" in str(n.target) or "clone" in str(n.target)]
    ops = [n for n in gm.graph.nodes if n.op == "call_function"]
    [got] = truth((SAMPLE,))
    assert len(copies) == 4 and len(ops) == 6
    assert len(seen) <= len(ops) - 3
    torch.testing.assert_close(got, SAMPLE.double() * 3 + 1)


def test_copies_that_lay_a_value_out_are_made() -> None:
    """Kernels need the layout: the gradient of group norm views its operand."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.bfloat16().t().clone(memory_format=torch.contiguous_format) + 1,)

    for truth in (Fp64Reference(traced(function)), Fp64Reference(traced(function)).in_float32()):
        [got] = truth((SAMPLE,))
        assert got.is_contiguous()
