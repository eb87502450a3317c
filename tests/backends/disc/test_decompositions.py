# SPDX-License-Identifier: Apache-2.0
"""Graphs that AOTAutograd makes with DISC's decompositions: what is in them, and their gradients."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import aot_module, make_boxed_func
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.frontend.aot_decompositions import DECOMPOSITIONS, known_gradients
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.frontend.ops.table import TABLE
from blade.backends.disc.target.cpu import host
from blade.runtime.engine import make_engine

aten = torch.ops.aten
Ops = set[Any]


def compiled(
    gm: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], seen: Ops
) -> Callable[..., Any]:
    """``gm`` as an engine; random ops, which an entrance keeps outside, are not expected."""
    seen |= {n.target for n in gm.graph.nodes if n.op == "call_function"}
    kept = [k for k, n in enumerate(gm.graph.find_nodes(op="output")[0].args[0]) if n is not None]
    output = gm.graph.find_nodes(op="output")[0]
    count = len(output.args[0])
    output.args = (tuple(output.args[0][k] for k in kept),)
    ir = compile_ir(lower(gm, ShapeEnv()), host())
    engine = make_engine("graph", "disc", ir.program, ir.object, list(ir.constants), {})
    assert not engine.why_unavailable(), engine.why_unavailable()

    def run(*tensors: torch.Tensor) -> list[torch.Tensor | None]:
        with torch.no_grad():
            found = engine.try_execute(list(tensors))
        assert found is not None, engine.last_error() or engine.stats()
        given = dict(zip(kept, found, strict=True))
        return [given.get(k) for k in range(count)]

    return make_boxed_func(run)


def gradients(model: nn.Module, *inputs: torch.Tensor) -> tuple[list[torch.Tensor], Ops]:
    """The loss of ``model`` and all gradients, computed by engines, and the ops of their graphs."""
    seen: Ops = set()

    def compiler(gm: torch.fx.GraphModule, given: Sequence[torch.Tensor]) -> Any:
        return compiled(gm, given, seen)

    with known_gradients():
        traced = aot_module(model, compiler, compiler, decompositions=dict(DECOMPOSITIONS))
        return _loss_and_gradients(model, traced(*inputs)), seen


def _loss_and_gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


class Images(nn.Module):
    """Convolutions, batch norm and group norm, pooling, resampling; the mean of squares as loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, 2, 1),
            nn.GroupNorm(3, 12),
            nn.SiLU(),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 4, 1),
            nn.AdaptiveAvgPool2d(1),
        )
        self.pool = nn.AdaptiveAvgPool1d(1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.pool(self.body(x).flatten(2)).flatten(1), y)


class Words(nn.Module):
    """Embedding, layer norm, GELU, attention by hand, cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 24)
        self.norm, self.qkv = nn.LayerNorm(24), nn.Linear(24, 72)
        self.up, self.down, self.head = nn.Linear(24, 40), nn.Linear(40, 24), nn.Linear(24, 50)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + torch.softmax(q @ k.mT / 5, -1) @ v
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _images() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Images(), (torch.rand(3, 3, 9, 11), torch.rand(3, 4))


def _words() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Words(), (torch.randint(0, 50, (3, 7)), torch.randint(0, 50, (3, 7)))


@pytest.mark.needs("runtime", "torch_mlir")
@pytest.mark.parametrize("make", [_images, _words])
def test_gradients_are_eagers(make: Callable[[], Any]) -> None:
    torch.manual_seed(3)
    model, inputs = make()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    want = _loss_and_gradients(model, model(*inputs))
    moved = {k: v.clone() for k, v in model.named_buffers()}
    model.load_state_dict(state)
    got, _ = gradients(model, *inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))
    for name, b in model.named_buffers():
        torch.testing.assert_close(b, moved[name])


@pytest.mark.needs("runtime", "torch_mlir")
def test_resampling_and_pooling_have_known_gradients() -> None:
    model, inputs = _images()
    before = {
        op: dict(op.py_kernels)
        for op in (aten.upsample_nearest2d.vec, aten.adaptive_avg_pool2d.default)
    }
    _, seen = gradients(model, *inputs)
    assert aten.upsample_nearest2d.default in seen
    assert aten.upsample_nearest2d_backward.default in seen
    assert not {aten._unsafe_index.Tensor, aten._unsafe_index_put.default} & seen
    assert not {aten.as_strided.default, aten.as_strided_scatter.default} & seen  # of pooling
    assert {op: dict(op.py_kernels) for op in before} == before


@pytest.mark.parametrize("p", [0.0, 0.1, 0.7, 1.0])
def test_dropout_drops_what_eager_drops(p: float) -> None:
    x = torch.rand(64, 33) + 0.5
    torch.manual_seed(7)
    want = nn.functional.dropout(x, p, training=True)
    torch.manual_seed(7)
    got, mask = DECOMPOSITIONS[aten.native_dropout.default](x, p, True)
    torch.testing.assert_close(got, want)
    assert torch.equal(mask, want != 0)


def test_nothing_that_has_a_row_is_taken_apart() -> None:
    """But norms of halves with float32 parameters, which stay norms, of wider images, and the gradient of relu."""
    norms = {op for op in DECOMPOSITIONS if re.search(r"native_\w*norm", str(op))}
    assert len(norms) == 5
    assert set(DECOMPOSITIONS) & set(TABLE) == norms | {torch.ops.aten.threshold_backward.default}
    assert all(isinstance(op, torch._ops.OpOverload) for op in DECOMPOSITIONS)
