# SPDX-License-Identifier: Apache-2.0
"""Models in bfloat16, under autocast, and in float32 with ``enable_bf16``, each as one engine at many sizes.

Whether values are right is told by eager: the same model in bfloat16 has an error against float32, and an engine that
rounds less often may not have a larger one (by more than a quarter, as single errors are random).
"""

import copy
from typing import Any

import pytest
import torch
from cutting import trace
from selections import cut_of
from torch import nn
from torch.nn import functional

from blade.backends.disc.backend import DiscBackend
from blade.backends.disc.target.cpu import host
from blade.backends.quant.backend import QuantBackend
from blade.config import Config

pytestmark = pytest.mark.needs("runtime", "torch_mlir")

BF16 = torch.bfloat16
FEW = (
    8e-4  # a relative error that some of the encoder's products may have together, and all may not
)
needs_products = pytest.mark.skipif(
    not host().has_bf16_products, reason="this CPU does not multiply bfloat16"
)


class Encoder(nn.Module):
    """A layer of BERT's shape, with a padding mask."""

    def __init__(self, width: int = 48, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 100), nn.Linear(100, width)

    def forward(self, mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        parts = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        y = functional.scaled_dot_product_attention(*parts, attn_mask=mask[:, None, None, :])
        x = self.norm(x + self.out(y.transpose(1, 2).flatten(2)))
        return self.last(x + self.down(functional.gelu(self.up(x))))


class Decoder(nn.Module):
    """GPT-2's way: one product for q, k and v, a causal mask, weights [in, out]."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.joint = nn.Parameter(torch.randn(width, 3 * width) / 6)
        self.bias, self.out = nn.Parameter(torch.randn(3 * width)), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.addmm(self.bias, self.norm(x).flatten(0, 1), self.joint)
        parts = rows.view(*x.shape[:2], -1).split(x.shape[-1], 2)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(functional.gelu(y.transpose(1, 2).flatten(2), approximate="tanh"))


class Images(nn.Module):
    """Residual convolutions, then patches of them as rows, as in ResNet and ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 1, 1)
        self.two, self.wide = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 24, 2, 2)
        self.norm, self.head = nn.BatchNorm2d(16), nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.stem(x)).relu()
        y = (self.two(self.one(y).relu()) + y).relu()
        return self.head(self.wide(y).flatten(2).transpose(1, 2)).softmax(-1)


def encoder_inputs(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    mask = torch.zeros(batch, length)
    mask[:, length // 2 + 1 :] = -10000.0
    return mask, torch.randn(batch, length, 48)


MODELS: dict[str, tuple[type[nn.Module], Any, tuple[tuple[int, int], ...]]] = {
    "encoder": (Encoder, encoder_inputs, ((2, 5), (1, 1), (3, 33), (1, 70), (0, 4))),
    "decoder": (Decoder, lambda b, n: (torch.randn(b, n, 32),), ((2, 5), (1, 1), (1, 40), (4, 17))),
    "images": (
        Images,
        lambda b, n: (torch.randn(b, 3, n, n + 4),),
        ((2, 12), (1, 7), (3, 20), (1, 33)),
    ),
}


def halved(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(t.to(BF16) for t in inputs)


def engine_of(module: nn.Module, inputs: tuple[torch.Tensor, ...], **config: Any) -> Any:
    cut = cut_of(trace(module, inputs))
    return DiscBackend().convert(cut.cluster, Config(**config))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm())


def check(engine: Any, model: nn.Module, eager: Any, name: str, convert: Any, share: float) -> None:
    """The engine's error is at most ``share`` of that of ``eager``, summed over all sizes."""
    mine = theirs = 0.0
    for size in MODELS[name][2]:
        inputs = MODELS[name][1](*size)
        with torch.no_grad():
            exact, rounded = model(*inputs), eager(*convert(inputs))
        [got] = engine.try_execute(list(convert(inputs))) or pytest.fail(engine.last_error())
        assert (got.shape, got.isfinite().all()) == (exact.shape, True)
        mine, theirs = mine + distance(got, exact), theirs + distance(rounded, exact)
    assert 0 < mine <= share * theirs


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def made(name: str) -> nn.Module:
    torch.manual_seed(len(name))
    return MODELS[name][0]().eval()


def test_a_model_in_bfloat16(name: str) -> None:
    model = made(name)
    narrow = copy.deepcopy(model).to(BF16)
    engine = engine_of(narrow, halved(MODELS[name][1](*MODELS[name][2][0])))
    assert "bf16_gemm" in engine.program()
    assert "aten::" not in engine.program() or name == "images"
    check(engine, model, narrow, name, halved, 1.25)


@needs_products
def test_a_model_in_float32_with_bfloat16_permitted(name: str) -> None:
    """Only operands of products are rounded, so the error is clearly smaller than eager's in bfloat16."""
    model = made(name)
    engine = engine_of(model, MODELS[name][1](*MODELS[name][2][0]), enable_bf16=True)
    text = engine.program()
    assert "bf16_gemm" in text
    assert "kernel gemm_f32" not in text
    assert ("bf16_conv" if name == "images" else "attention_bf16") in text
    narrow = copy.deepcopy(model).to(BF16)
    check(engine, model, lambda *x: narrow(*halved(x)), name, lambda x: x, 0.9)


@needs_products
def test_a_budget_decides_how_many_products_are_rounded() -> None:
    model, inputs = made("encoder"), encoder_inputs(2, 9)
    counts = {}
    for budget in (0.1, FEW, 1e-6):
        engine = engine_of(model, inputs, enable_bf16=True, accuracy_budget=budget)
        [got] = engine.try_execute(list(inputs)) or pytest.fail(engine.last_error())
        with torch.no_grad():
            exact = model(*inputs)
        assert distance(got, exact) <= budget * float(exact.norm())
        counts[budget] = engine.program().count("kernel bf16_gemm")
    assert counts[1e-6] == 0 < counts[FEW] < counts[0.1], counts


@needs_products
def test_it_is_offered_where_the_cpu_has_it() -> None:
    assert "bf16" in DiscBackend().precisions


def test_without_the_instruction_nothing_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = type(host())(tuple(f for f in host().isa if f != "avx512_bf16"), host().lanes)
    monkeypatch.setattr("blade.backends.disc.backend.host", lambda: plain)
    if not torch.cuda.is_available():
        assert DiscBackend().precisions == ()
    model, inputs = made("decoder"), (torch.randn(2, 5, 32),)
    assert "bf16" not in engine_of(model, inputs, enable_bf16=True).program().partition("guards")[2]


def test_a_trace_under_autocast(name: str) -> None:
    """The trace has the casts that autocast makes."""
    model = made(name)
    with torch.autocast("cpu", dtype=BF16):
        engine = engine_of(model, MODELS[name][1](*MODELS[name][2][0]))
    assert "bf16_gemm" in engine.program()

    def eager(*inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=BF16):
            return model(*inputs)  # type: ignore[no-any-return]

    check(engine, model, eager, name, lambda x: x, 1.25)


@needs_products
def test_layers_that_quantization_leaves_in_float() -> None:
    """Beside int8 they are bfloat16; attention on results of int8 products, which are float32, stays so."""
    torch.manual_seed(0)
    model, inputs = Encoder(128, 4).eval(), (torch.zeros(4, 32), torch.randn(4, 32, 128))
    cut = cut_of(trace(model, inputs))
    texts = []
    for permitted in (False, True):
        config = Config(
            enable_int8=True, accuracy_budget=0.0017, timing=False, enable_bf16=permitted
        )
        engine: Any = QuantBackend().convert(cut.cluster, config)
        texts.append(engine.program())
        [got] = engine.try_execute(list(inputs)) or pytest.fail(engine.last_error())
        with torch.no_grad():
            exact = model(*inputs)
        assert distance(got, exact) <= 0.0017 * float(exact.norm())
    assert "kernel gemm_f32" in texts[0]
    assert "kernel gemm_f32" not in texts[1]
    for kernel in ("int8_gemm", "bf16_gemm", "attention_f32"):
        assert f"kernel {kernel}" in texts[1]
