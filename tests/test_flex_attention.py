# SPDX-License-Identifier: Apache-2.0
"""FlexAttention becomes ops of engines: traced by optimize, and in graphs of Dynamo's, forward and backward."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import blade
from blade.capture.capture import capture
from blade.core.flex_attention import attend
from blade.dynamo.flex_attention import lower_flex_attention

HEADS, WIDTH = 4, 8
Modify = Callable[..., Any]
T = torch.Tensor
pytestmark = pytest.mark.needs("runtime", "torch_mlir")

SLOPES = torch.exp2(-torch.arange(1, HEADS + 1).float())
BIAS = torch.randn(HEADS, 64, generator=torch.Generator().manual_seed(0))


def causal(b: T, h: T, i: T, j: T) -> T:
    return i >= j


SCORES: dict[str, Modify | None] = {
    "none": None,
    "slopes": lambda score, b, h, i, j: score + SLOPES[h] * (j - i),
    "bias": lambda score, b, h, i, j: score + BIAS[h, (i - j).abs()],
    "bound": lambda score, b, h, i, j: 20 * torch.tanh(score / 20),
    "hidden": lambda score, b, h, i, j: torch.where(i < j, -float("inf"), score * 2),
    "constant": lambda score, b, h, i, j: score * 0 + 1,
}
MASKS: dict[str, Modify | None] = {
    "none": None,
    "causal": causal,
    "causal, the other way round": lambda b, h, i, j: j <= i,
    "window": lambda b, h, i, j: (i >= j) & (i - j < 5),
    "by batch and head": lambda b, h, i, j: (j > b) | (h == 1),
    "empty rows": lambda b, h, i, j: (i > 3) & (j < 7),
}


class Attention(nn.Module):
    def __init__(self, scores: Modify | None, mask: Modify | None, groups: int = 1) -> None:
        super().__init__()
        self.project = nn.Linear(32, (HEADS + 2 * HEADS // groups) * WIDTH)
        self.scores, self.mask, self.heads = scores, mask, (HEADS, HEADS // groups, HEADS // groups)

    def forward(self, x: T) -> T:
        parts = self.project(x).split([n * WIDTH for n in self.heads], -1)
        q, k, v = (
            one.unflatten(-1, (n, WIDTH)).transpose(1, 2)
            for one, n in zip(parts, self.heads, strict=True)
        )
        blocks = None
        if self.mask is not None:
            blocks = create_block_mask(
                self.mask, x.shape[0], HEADS, x.shape[1], x.shape[1], device=x.device
            )
        is_grouped = self.heads[0] != self.heads[1]
        y = flex_attention(q, k, v, self.scores, blocks, scale=0.3, enable_gqa=is_grouped)
        return y.transpose(1, 2).flatten(2)


CASES = [
    *((score, "none", 1) for score in SCORES),
    *(("none", mask, 1) for mask in MASKS),
    *(
        ("bias", "window", 1),
        ("slopes", "empty rows", 1),
        ("none", "none", 2),
        ("bias", "causal", 2),
    ),
]


@pytest.fixture(autouse=True)
def _unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own answer, without compiling it."""
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    torch._dynamo.reset()


def model_of(score: str, mask: str, groups: int) -> Attention:
    torch.manual_seed(0)
    return Attention(SCORES[score], MASKS[mask], groups).eval()


@pytest.mark.parametrize(("score", "mask", "groups"), CASES)
def test_a_trace_has_it_as_ops(score: str, mask: str, groups: int) -> None:
    model = model_of(score, mask, groups)
    with torch.no_grad():
        found = capture(model, (torch.randn(2, 9, 32),), blade.Config())
        for batch, length in ((2, 9), (3, 12), (1, 1)):
            x = torch.randn(batch, length, 32)
            torch.testing.assert_close(found.module(x), model(x))


@pytest.mark.parametrize(("score", "mask", "groups"), CASES)
def test_graphs_of_dynamo_have_it_as_ops(score: str, mask: str, groups: int) -> None:
    model, kinds = model_of(score, mask, groups), []

    def backend(gm: Any, inputs: Any) -> Any:
        lower_flex_attention(gm)
        kinds.extend(type(node.target).__name__ for node in gm.graph.nodes)
        return gm

    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for batch, length in ((2, 9), (3, 12)):
            x = torch.randn(batch, length, 32)
            torch.testing.assert_close(compiled(x), model(x))
    assert kinds and "FlexAttentionHOP" not in kinds


def explicit(model: Attention, x: T) -> T:
    """The attention as a loop over scores."""
    q, k, v = (
        one.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for one in model.project(x).chunk(3, -1)
    )
    scores = q @ k.transpose(-2, -1) * 0.3
    rows = []
    b, h = torch.meshgrid(torch.arange(len(x)), torch.arange(HEADS), indexing="ij")
    for i in range(x.shape[1]):
        row = []
        for j in range(x.shape[1]):
            at = (b, h, torch.full_like(b, i), torch.full_like(b, j))
            one = (
                scores[:, :, i, j]
                if model.scores is None
                else model.scores(scores[:, :, i, j], *at)
            )
            counts = (
                torch.ones_like(one, dtype=torch.bool) if model.mask is None else model.mask(*at)
            )
            row.append(torch.where(counts, one, -float("inf")))
        rows.append(torch.stack(row, -1))
    return (torch.stack(rows, -2).softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("score", "mask"), [("none", "causal"), ("bias", "window"), ("bound", "none"), ("none", "none")]
)
def test_gradients(score: str, mask: str) -> None:
    """torch refuses them on a CPU before it compiles anything, hence without Dynamo; tests/gpu trains."""
    model, x = model_of(score, mask, 1), torch.randn(2, 9, 32, requires_grad=True)
    wanted = torch.autograd.grad(explicit(model, x).square().sum(), [x, *model.parameters()])
    q, k, v = (
        one.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for one in model.project(x).chunk(3, -1)
    )
    y = attend(q, k, v, model.scores, model.mask, 0.3, is_causal=mask == "causal")
    y = y.transpose(1, 2).flatten(2)
    found = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
    for one, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["disc", "optimize"])
def test_engines_answer(backend: str) -> None:
    model, x = model_of("bias", "causal", 1), torch.randn(2, 9, 32)
    with torch.no_grad():
        if backend == "disc":
            compiled = torch.compile(model, backend="disc")
        else:
            compiled = blade.optimize(
                model, (x,), blade.Config(optimization_pipeline="disc", timing=False)
            )
            assert (
                sum(cluster.backend == "disc" for cluster in blade.report(compiled).clusters) == 1
            )
        for length in (9, 14):
            x = torch.randn(2, length, 32)
            torch.testing.assert_close(compiled(x), model(x))


PARTIAL = torch.randn(3, HEADS)


def of_rows(score: T, b: T, h: T, i: T, j: T) -> T:
    return score + PARTIAL[b][h]


def test_parts_of_tensors_are_left_to_torch() -> None:
    model, x = Attention(of_rows, None).eval(), torch.randn(2, 9, 32)
    with torch.no_grad():
        compiled = torch.compile(model, backend="disc")
        torch.testing.assert_close(compiled(x), model(x))
        with pytest.raises(blade.InputError, match="one index for each dimension"):
            blade.optimize(model, (x,))


def test_the_sum_of_exponentials_is_left_to_torch() -> None:
    def both(x: T) -> tuple[T, T]:
        return flex_attention(x, x, x, return_lse=True)  # type: ignore[return-value]

    x = torch.randn(2, HEADS, 9, WIDTH)
    with torch.no_grad():
        for found, want in zip(torch.compile(both, backend="disc")(x), both(x), strict=True):
            torch.testing.assert_close(found, want)


def test_half_precision_is_computed_in_float32() -> None:
    q, k, v = (torch.randn(1, HEADS, 33, WIDTH).bfloat16() for _ in range(3))
    found = attend(q, k, v, SCORES["bias"], causal)
    assert found.dtype is torch.bfloat16
    want = attend(q.float(), k.float(), v.float(), SCORES["bias"], causal)
    torch.testing.assert_close(found.float(), want, rtol=0.02, atol=0.02)


def test_nobody_imports_it_for_models_without() -> None:
    code = """
import sys, torch, blade
blade.optimize(torch.nn.ReLU().eval(), torch.randn(4), blade.Config(timing=False))
assert "torch.nn.attention.flex_attention" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
