# SPDX-License-Identifier: Apache-2.0
"""Whole programs for a GPU: what runs for a layer, what is computed once, and what it answers."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from op_trace import trace
from run_program import GpuProgram, compile_to_program
from torch import nn

from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.gpu.passes.pipeline import FORMS

pytestmark = pytest.mark.needs("triton_interpreter")

F16, F32 = torch.float16, torch.float32
WIDTH, HEADS = 64, 4


class Layer(nn.Module):
    """One of BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        x = self.norms[0](x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH)))
        return self.norms[1](x + self.narrow(nn.functional.gelu(self.wide(x))))


def layer_inputs(batch: int, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.randn(batch, HEADS, length, length, dtype=dtype)
    return torch.randn(batch, length, WIDTH, dtype=dtype), mask


def compiled(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    dynamic: Sequence[Sequence[bool]],
    half: torch.dtype | None = None,
) -> GpuProgram:
    model.requires_grad_(False)
    gm, shape_env = trace(model, inputs, dynamic)
    return compile_to_program(lower(gm, shape_env, forms=FORMS), half)


def compiled_layer(model: Layer, dtype: torch.dtype, half: torch.dtype | None = None) -> GpuProgram:
    dynamic = [(True, True, False), (True, False, True, True)]
    return compiled(model.eval().to(dtype), layer_inputs(2, 8, dtype), dynamic, half)


PRODUCT, GELU = "aten::mm.out", "loop"
OF_A_LAYER = {
    F32: ["aten::addmm.out", "attention", PRODUCT, "row", PRODUCT, GELU, PRODUCT, "row"],
    F16: ["linear", "attention", "linear", "row", "linear", "linear", "row"],  # of 16 rows
}


@pytest.mark.parametrize("dtype", [F32, F16])
def test_a_layer_is_eight_launches_at_most(dtype: torch.dtype) -> None:
    model = Layer()
    program = compiled_layer(model, dtype)
    assert program.ran(*layer_inputs(2, 8, dtype)) == OF_A_LAYER[dtype]
    assert program.ran(*layer_inputs(3, 100, dtype)) == OF_A_LAYER[F32]
    for batch, length in [(2, 8), (3, 5), (1, 1), (0, 4)]:
        x, mask = layer_inputs(batch, length, dtype)
        [got] = program(x, mask)
        want = model.double()(x.double(), mask.double())
        own = model.to(dtype)(x, mask).double()
        error, allowed = (got.double() - want).abs(), (own - want).abs()
        assert got.dtype == dtype and got.shape == own.shape
        assert not got.numel() or error.max() <= 2 * allowed.max() + 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("half", [F16, torch.bfloat16])
def test_mixed_precision_computes_products_in_half(half: torch.dtype) -> None:
    model = Layer()
    program = compiled_layer(model, F32, half)
    # the input and the mask are cast; every other cast is in a kernel that runs anyway
    masks = half == F16
    ran = program.ran(*layer_inputs(2, 8, F32))
    assert sorted(ran) == sorted([*OF_A_LAYER[F16], "loop", "loop"])
    kind = "f16" if masks else "bf16"
    slots = [line for line in program.text.splitlines() if line.startswith("slot ")]
    kinds = [tuple(s.split()[2:4]) for s in slots]
    assert [dtype for home, dtype in kinds if home == "output"] == ["f32"]
    assert kinds.count(("arena", kind)) >= 6
    for batch, length in [(2, 8), (3, 5), (1, 1)]:
        x, mask = layer_inputs(batch, length, F32)
        mask[:, :, :, -1] = torch.finfo(F32).min  # becomes no infinity
        [got] = program(x, mask)
        want = model(x, mask)
        assert got.dtype == F32
        assert (got - want).abs().max() <= 0.02 * (8 if half == torch.bfloat16 else 1) ** 0.5


def test_weights_are_worked_on_once() -> None:
    """Three products of one operand read one matrix, made when the engine is loaded."""
    program = compiled_layer(Layer(), F32)
    packs = [line.split() for line in program.text.splitlines() if line.startswith("pack ")]
    assert [(p[2], int(p[3]), int(p[4])) for p in packs] == [
        ("f32", 3 * WIDTH * WIDTH, 3),
        ("f32", 3 * WIDTH, 3),
    ]
    halves = compiled_layer(Layer(), F32, F16)
    packs = [line.split() for line in halves.text.splitlines() if line.startswith("pack ")]
    assert {p[2] for p in packs} == {"f16"}
    assert sum(int(p[3]) for p in packs) >= 12 * WIDTH * WIDTH  # every weight of a product


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 3, stride=2)
        self.one = nn.Conv2d(16, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(self.second(self.first(x).relu()).relu())


@pytest.mark.parametrize("dtype", [F32, F16])
def test_convolutions_run_channels_last_without_bias(dtype: torch.dtype) -> None:
    model = Convolutions().eval().to(dtype)
    x = torch.randn(2, 8, 9, 7, dtype=dtype)
    program = compiled(model, [x], [(True, False, True, True)])
    conv = "aten::convolution"
    # the input's channels go last, a bias and relu follow each, the last bias brings channels first
    ran = program.ran(x)
    assert [name if name == conv else "launch" for name in ran] == ["launch", *(conv, "launch") * 3]
    calls = [line.split() for line in program.text.splitlines() if f"call {conv}" in line]
    assert all(call[5] == "n" for call in calls)
    for batch, height, width in [(2, 9, 7), (1, 3, 5)]:
        x = torch.randn(batch, 8, height, width, dtype=dtype)
        [got] = program(x)
        want = model(x)
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=8 * torch.finfo(dtype).eps, atol=1e-3)


def test_golden_program(update_golden: bool) -> None:
    """The kernels' names are digests of their text, which has tests of its own."""
    path = Path(__file__).parent / "golden" / "bert_layer.program"
    program = compiled_layer(Layer(), F16)
    names: dict[str, str] = {}
    words = [
        names.setdefault(w, f"kernel_{len(names)}") if w in program.units else w
        for line in program.text.splitlines(keepends=True)
        for w in (*line.split(), "\n")
    ]
    text = " ".join(words).replace(" \n ", "\n").strip() + "\n"
    if update_golden:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, f"{path.name}; --update-golden rewrites it"


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids) * 2


def test_a_lookup_checks_its_indices_itself() -> None:
    from triton.runtime.errors import InterpreterError

    model = Lookup()
    ids = torch.randint(0, 10, (2, 7))
    program = compiled(model, (ids,), [(True, True)])
    assert len(program.ran(ids)) == 1
    (found,) = program(ids)
    assert torch.equal(found, model(ids))
    ids[1, 3] = 10
    with pytest.raises(InterpreterError, match="index out of bounds"):
        program(ids)


class Groups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).relu()


def test_what_is_computed_of_a_sum_is_in_its_kernel() -> None:
    """Means and deviations of groups, and the scale of each channel, need no launches beside the sums."""
    model = Groups().eval()
    x = torch.randn(2, 16, 5, 7)
    program = compiled(model, [x], [(True, False, True, True)])
    kinds = [line.split() for line in program.text.splitlines() if "launch " in line]
    names = [w[w.index("launch") + 1] for w in kinds]
    assert program.ran(x).count("loop") == 1, names
    for size in [(2, 16, 5, 7), (1, 16, 1, 1)]:
        x = torch.randn(*size)
        torch.testing.assert_close(program(x)[0], model(x), rtol=1e-5, atol=1e-5)


class Skip(nn.Module):
    """What goes into a concatenation and is read, and returned, beside it."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice = twice
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(x * 2)
        z = torch.tanh(y @ self.weight)
        return torch.cat([y, z, y] if self.twice else [y, z], -1), y


@pytest.mark.parametrize("twice", [False, True])
def test_what_others_read_is_stored_in_a_concatenation_as_well(twice: bool) -> None:
    model, x = Skip(twice), torch.randn(5, 8)
    program = compiled(model, [x], [(True, False)])
    copies = ["loop"] * twice  # of one that is in it twice
    assert program.ran(x) == ["loop", PRODUCT, "loop", *copies]
    for rows in (5, 1, 33):
        x = torch.randn(rows, 8)
        for got, want in zip(program(x), model(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
