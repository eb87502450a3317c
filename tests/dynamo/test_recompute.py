# SPDX-License-Identifier: Apache-2.0
"""What a forward graph saves: what its gradient cannot compute again from it, in the narrowest form."""

from typing import Any

import torch
from built_graph import Built
from torch import nn
from torch.nn import functional

import blade
from blade.dynamo.forward_backward import save_compared

BATCH, WIDTH = 64, 32


class Block(nn.Module):
    """A residual block of 16-bit products and norms in float32, with GPT's activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.gelu(self.first(x), approximate="tanh")
        return self.norm((x + self.second(h)).float())


def saved_activations(model: nn.Module, x: torch.Tensor, **how: Any) -> list[torch.dtype]:
    """The dtypes of the saved tensors that are as large as activations, by their memory."""
    found: dict[int, torch.dtype] = {}

    def seen(t: torch.Tensor) -> torch.Tensor:
        if t.numel() == BATCH * WIDTH:
            found[t.data_ptr()] = t.dtype
        return t

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda t: t):
        loss = model(x).square().sum()
    loss.backward()
    return sorted(found.values(), key=str)


def test_what_fuses_with_its_gradient_is_not_saved() -> None:
    torch.manual_seed(0)
    model = Block().bfloat16()
    model.norm.float()
    x = torch.randn(BATCH, WIDTH).bfloat16()
    got = saved_activations(torch.compile(model, backend="aot_disc"), x)
    # x, the products before and after the activation, the sum before the norm, and the result of square
    assert got == [torch.bfloat16] * 4 + [torch.float32]
    want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for p, w in zip(model.parameters(), want, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, w, rtol=0.05, atol=0.05 * float(w.abs().max()))


def test_the_lists_of_torch_are_as_before() -> None:
    from torch._functorch import partitioners

    before = partitioners.get_default_op_list
    torch.compile(nn.Linear(3, 4), backend=blade.dynamo.aot_disc)(
        torch.randn(2, 3)
    ).sum().backward()
    assert partitioners.get_default_op_list is before


def test_relu_is_saved_once_and_its_signs() -> None:
    """T5's: the second product reads a view of it."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(4, BATCH // 4, WIDTH)
    got = saved_activations(torch.compile(model, backend="aot_disc"), x)
    assert got == [torch.bool] + [torch.float32] * 3  # x, its own result, and that of square
    for p, w in zip(
        model.parameters(),
        torch.autograd.grad(model(x).square().sum(), list(model.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(p.grad, w)


class Highest(nn.Module):
    """The largest of each row of an activation that a gradient may compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(self.first(x)).amax(-1)


def test_the_gradient_of_a_maximum_reads_what_forward_computed() -> None:
    torch.manual_seed(0)
    model = Highest().bfloat16()
    x = torch.randn(BATCH, WIDTH).bfloat16()
    got = saved_activations(torch.compile(model, backend="aot_disc"), x)
    # which elements are the largest, the product, and x
    assert got == [torch.bfloat16] * 2 + [torch.bool]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_only_floats_of_forward_are_saved_for_a_comparison() -> None:
    b = Built()
    x = b.input(6, 4)
    size = b.call(torch.ops.aten.sym_size.int, x, 0)
    wide = b.call(torch.ops.aten.expand.default, x, [size, 4])
    made = b.call(torch.ops.aten.sigmoid.default, wide)
    again = b.call(torch.ops.aten.expand.default, made, [size, 4])  # of backward, as what follows
    equal = b.call(torch.ops.aten.eq.Tensor, again, made)
    b.graph.output((made, equal))
    save_compared(b.graph, 1)
    saved = [node for node in b.graph.nodes if "recompute" in node.meta]
    assert saved == [made]
