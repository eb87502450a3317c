# SPDX-License-Identifier: Apache-2.0
"""ATen's kernels for long attentions: which of them may compute one, and what a program with them answers."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
from run_program import GuardFailed
from test_attention_gpu import B, L, S, merged, source
from test_gpu_programs import compiled
from torch import nn

from blade.backends.disc.gpu import codegen as generator
from blade.backends.disc.gpu.attention.autotune import LENGTH, choose_kernels, long_sizes
from blade.backends.disc.gpu.attention.calls import attention, attention_key, long_class
from blade.backends.disc.ir.attention import attend, grouped
from blade.backends.disc.ir.graph import IrBuilder, Value
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.program.attention_calls import kernels, operands_of
from blade.backends.disc.target.gpu import GpuTarget

TARGET = GpuTarget()
F16 = torch.float16


def made(depth: int = 64, dtype: torch.dtype = F16, causal: bool = False) -> Value:
    b = IrBuilder()
    _, (q, k, v) = merged(b, 4, depth, dtype)
    return source(attend(b, q, k, v, None, 0.125, causal))


def test_who_takes_which_attention() -> None:
    facts = SizeRelations()
    assert kernels(made(), facts) == ("flash",)
    assert kernels(made(causal=True), facts) == ("flash",)  # as many queries as keys
    assert kernels(made(dtype=torch.bfloat16), facts) == ("flash",)
    assert kernels(made(dtype=torch.float32), facts) == ()
    assert kernels(made(depth=36), facts) == ()
    b = IrBuilder()
    fixed = [b.make("input", (), (2, 4, 512, 64), F16, index=k) for k in range(3)]
    assert kernels(source(attend(b, *fixed, None, 1.0)), facts) == ("flash", "cudnn")
    mask = b.make("input", (), (2, 4, 512, 512), F16, index=3)
    assert kernels(source(attend(b, *fixed, mask, 1.0)), facts) == ()
    q = b.make("input", (), (B, 4, L, 64), F16, index=4)
    k, v = (b.make("input", (), (B, 4, S, 64), F16, index=k) for k in (5, 6))
    assert kernels(source(attend(b, q, k, v, None, 1.0)), facts) == ("flash",)
    assert (
        kernels(source(attend(b, q, k, v, None, 1.0, True)), facts) == ()
    )  # causal from which end?
    odd = b.make("input", (), (B, 4, L, 65), F16, index=7)
    odd = b.slice(odd, 3, 1, 1, 64)
    assert kernels(source(attend(b, odd, k, v, None, 1.0)), facts) == ()  # begins anywhere


def test_heads_that_others_share_are_seen_once() -> None:
    b = IrBuilder()
    q = b.make("input", (), (B, 8, L, 64), F16, index=0)
    k, v = (b.make("input", (), (B, 2, L, 64), F16, index=n) for n in (1, 2))
    value = grouped(b, q, k, v, None, 1.0)
    while value.is_layout:
        value = value.args[0]
    assert kernels(value, SizeRelations()) == ("flash",)
    found = operands_of(value)
    assert found is not None
    assert [x.shape for x in found] == [(B, L, 8, 64), (B, L, 2, 64), (B, L, 2, 64)]


def test_classes_are_exclusive_and_complete_with_a_kernel_of_atens() -> None:
    value = made()
    long = long_class(value, TARGET)
    launches = attention(value, TARGET, SizeRelations(), long)
    assert launches is not None
    for batch, length in ((1, 1), (1, 40), (2, 300), (64, 40), (64, 256), (64, 257), (1, 9000)):
        sizes = {B: batch, L: length}
        holds = [x.choice.when.subs(sizes) for x in launches if x.choice.when is not None]
        assert [*holds, long.subs(sizes)].count(sympy.true) == 1


@pytest.mark.parametrize("lengths", [(L, L), (L, S), (L * S, 77), (4 * L + 1, L)], ids=str)
def test_it_is_measured_where_it_is_long(lengths: tuple[Any, Any]) -> None:
    b = IrBuilder()
    q, k, v = (b.make("input", (), (B, 4, lengths[n > 0], 64), F16, index=n) for n in range(3))
    value = source(attend(b, q, k, v, None, 1.0))
    sizes = long_sizes(value, TARGET)
    if lengths[1] == 77:
        assert sizes is None  # few keys are ours
    else:
        assert sizes is not None and long_class(value, TARGET).subs(sizes) == sympy.true
        assert sympy.sympify(lengths[0]).subs(sizes) >= LENGTH


def test_nothing_is_measured_without_a_device() -> None:
    with mock.patch("torch.cuda.is_available", return_value=False):
        assert choose_kernels([made()], TARGET, SizeRelations(), None) == {}


class Attention(nn.Module):
    def __init__(self, heads: int, few: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.few, self.causal = heads, few, causal

    def forward(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        batch, length, _ = q.shape
        q = q.view(batch, length, self.heads, 8).transpose(1, 2)
        k, v = kv.view(batch, length, 2 * self.few, 8).transpose(1, 2).chunk(2, 1)
        y = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, enable_gqa=self.few != self.heads
        )
        return torch.tanh(y.transpose(1, 2).reshape(batch, length, -1))


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **named: Any) -> Any:
    """What ``aten::_flash_attention_forward`` means, in an order of memory that nobody expects."""
    causal, scale = rest[5], named["scale"]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=causal, scale=scale, enable_gqa=True
    )
    nothing = y.new_zeros(0)
    return y.transpose(1, 2).to(q.dtype), nothing, nothing, nothing, nothing


@pytest.fixture
def flash() -> Iterator[mock.Mock]:
    """A CPU kernel of FlashAttention's op, which is chosen for every attention."""
    called = mock.Mock(side_effect=forward)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", called, "CPU")
    every = mock.Mock(side_effect=lambda values, *_: {attention_key(v): "flash" for v in values})
    with mock.patch.object(generator, "choose_kernels", every):
        yield called
    library._destroy()


@pytest.mark.needs("triton_interpreter")
@pytest.mark.parametrize(("few", "causal"), [(4, False), (2, False), (4, True)])
def test_long_sequences_are_atens_and_short_ones_ours(
    few: int, causal: bool, flash: mock.Mock
) -> None:
    torch.manual_seed(0)
    model = Attention(4, few, causal).eval()

    def inputs(batch: int, length: int) -> list[torch.Tensor]:
        return [torch.randn(batch, length, 8 * n).half() for n in (4, 2 * few)]

    program = compiled(model, inputs(2, 8), [(True, True, False)] * 2)
    for size, long in (((2, 5), False), ((17, 260), True)):
        given = inputs(*size)
        torch.testing.assert_close(program(*given)[0], model(*given), rtol=0, atol=2e-3)
        names = [n for n in program.ran(*given) if "attention" in n]
        assert names == (["aten::_flash_attention_forward"] if long else ["attention"])
    assert flash.called


class Masked(nn.Module):
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.needs("triton_interpreter")
@pytest.mark.parametrize("wrong", ["values", "mask", "rows"])
def test_lengths_that_do_not_fit_are_left_to_the_original(wrong: str) -> None:
    """torch's shape function does not compare them; a kernel would read what is not there."""
    dynamic = [*[(True, False, True, False)] * 3, (True, True)]
    given = [torch.randn(2, 2, n, 8) for n in (5, 7, 7)] + [torch.randn(5, 7)]
    program = compiled(Masked().eval(), given, dynamic)
    torch.testing.assert_close(program(*given)[0], Masked()(*given))
    if wrong == "values":
        given[2] = given[2][:, :, :6]
    else:
        given[3] = torch.randn(5, 6) if wrong == "mask" else torch.randn(4, 7)
    with pytest.raises(RuntimeError):
        Masked()(*given)
    with pytest.raises(GuardFailed):
        program(*given)
