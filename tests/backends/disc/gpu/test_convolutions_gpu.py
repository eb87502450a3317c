# SPDX-License-Identifier: Apache-2.0
"""Convolutions for GPUs: as products of what the kernel sees, with what follows them, or of patches."""

from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from cpu_native import symbol
from op_trace import trace
from run_program import GpuProgram, compile_to_program
from test_gpu_programs import compiled
from torch import nn

from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.gpu.gemm import autotune as choose
from blade.backends.disc.gpu.gemm.benchmark import sizes_near
from blade.backends.disc.gpu.gemm.epilogue import plain_epilogue
from blade.backends.disc.gpu.gemm.plan import PIXEL_CLASSES, GemmPlan, classes_of
from blade.backends.disc.gpu.gemm.product import GemmProduct, GemmTile, product_of
from blade.backends.disc.gpu.gemm.tile_table import candidate
from blade.backends.disc.gpu.library import library
from blade.backends.disc.gpu.passes.pipeline import FORMS
from blade.backends.disc.ir.graph import IrBuilder
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.reference.interpret_graph import interpret
from blade.backends.disc.target.gpu import GpuTarget

pytestmark = pytest.mark.needs("triton_interpreter")

F16, F32 = torch.float16, torch.float32
N, H, W = symbol("s0"), symbol("s1"), symbol("s2")
IMAGES = (True, False, True, True)
MOST = 100  # pixels that the tiles of these tests take; beyond them ATen's


def is_as_exact(program: GpuProgram, model: nn.Module, x: torch.Tensor) -> None:
    """No further from float64 than twice what the model itself is."""
    [got] = program(x)
    own = model(x).double()
    want = model.double()(x.double())
    model.to(x.dtype)
    error, allowed = (got.double() - want).abs(), (own - want).abs()
    assert got.dtype == x.dtype and got.shape == own.shape
    bound = 2 * allowed.max() + 2 * torch.finfo(x.dtype).eps * want.abs().max()
    assert error.max() <= bound


def drawn(model: nn.Module) -> nn.Module:
    """With statistics that batch norms do not have from the start."""
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.running_mean)
            nn.init.uniform_(part.running_var, 0.5, 2.0)
            nn.init.uniform_(part.weight, 0.5, 2.0)
            nn.init.normal_(part.bias)
    return model.eval()


def with_tile(monkeypatch: pytest.MonkeyPatch, tile: GemmTile) -> None:
    def plan(product: GemmProduct, _: GpuTarget) -> GemmPlan:
        pieces = ((MOST, tile), (None, None))
        return GemmPlan(pieces if product.conv is not None else ((None, None),))

    monkeypatch.setattr(choose, "unmeasured", plan)


SHAPES = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "3x3, every other pixel": {"kernel_size": 3, "padding": 1, "stride": 2},
    "3x3, far apart": {"kernel_size": 3, "padding": 2, "dilation": 2},
    "5x1": {"kernel_size": (5, 1), "padding": (0, 1), "stride": (1, 2)},
    "1x1": {"kernel_size": 1},
    "1x1, every other pixel": {"kernel_size": 1, "stride": 2},
}


@pytest.mark.parametrize("dtype", [F16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_convolution_and_its_batch_norm_are_one_kernel(
    shape: dict[str, object], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    split = 3 if shape["kernel_size"] != 1 and shape["kernel_size"] != (5, 1) else 1
    with_tile(monkeypatch, GemmTile(16, 16, 32, split=split))
    conv = nn.Conv2d(32, 24, bias=False, **shape)
    after = nn.Conv2d(24, 8, 1, bias=False)  # ATen's: its channels make no whole blocks
    model = drawn(nn.Sequential(conv, nn.BatchNorm2d(24), nn.ReLU(), after)).to(dtype)
    program = compiled(model, [torch.randn(2, 32, 7, 8, dtype=dtype)], [IMAGES])
    last = "aten::convolution"
    count = ["aten::zero_"] * (split > 1)
    ran = program.ran(torch.randn(2, 32, 7, 6, dtype=dtype))
    assert ran == [*count, "loop", "linear", last, "loop"]  # to channels last, and first
    large = torch.randn(1, 32, 31, 30, dtype=dtype)
    assert program.ran(large) == [*count, "loop", "aten::convolution", "loop", last, "loop"]
    for size in ((2, 32, 7, 6), (1, 32, 5, 5), (3, 32, 6, 5)):
        is_as_exact(program, model, torch.randn(size, dtype=dtype))
    is_as_exact(program, model, large)


class Dense(nn.Module):
    """Bottlenecks, each on all channels so far."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(d, 32, 1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1, bias=False),
            )
            for d in (32, 64, 96)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.cat([x, part(x)], 1)
        return x


@pytest.mark.parametrize("most", [2, 3])
def test_convolutions_of_many_depths_share_a_kernel(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    monkeypatch.setattr(library, "MOST_DEPTHS", most)
    with_tile(monkeypatch, GemmTile(16, 16, 32))
    model = drawn(Dense()).to(F16)
    program = compiled(model, [torch.randn(2, 32, 7, 8, dtype=F16)], [IMAGES])
    texts = [u.text for u in program.units.values() if u.name.startswith("linear")]
    of_pixels = [text for text in texts if "X_ROW" in text]
    shared = [text for text in of_pixels if "K = tl.cast(K, tl.int32)" in text]
    assert (len(of_pixels), len(shared)) == ((1, 1) if most == 2 else (3, 0))
    for size in ((2, 32, 7, 6), (1, 32, 5, 5)):
        is_as_exact(program, model, torch.randn(size, dtype=F16))


def test_statistics_of_a_channel_are_not_rounded() -> None:
    """A mean far from 0 makes an offset that is large beside what it is added to."""
    torch.manual_seed(4)
    norm = nn.BatchNorm2d(8).eval()
    norm.running_mean.fill_(5.0), norm.running_var.fill_(0.01)
    model = norm.to(F16)
    x = (5 + 0.1 * torch.randn(2, 8, 6, 5)).to(F16)
    program = compiled(model, [x], [IMAGES])
    assert program.ran(x) == ["loop"]  # and they need no kernel of their own
    is_as_exact(program, model, x)
    gm, shape_env = trace(model, [x], [IMAGES])
    [got] = interpret(lower(gm, shape_env, forms=FORMS), [x])  # where every result is rounded
    want = model.double()(x.double())
    assert (got.double() - want).abs().max() <= 2 * torch.finfo(F16).eps * want.abs().max()


class Block(nn.Module):
    """The end of a residual block, where two convolutions meet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(64, 32, 3, 1, 1, bias=False), nn.Conv2d(32, 64, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (32, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.last(y)) + x)


def test_a_residual_is_added_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    with_tile(monkeypatch, GemmTile(16, 32, 32))
    model = drawn(Block()).to(F16)
    program = compiled(model, [torch.randn(2, 64, 7, 8, dtype=F16)], [IMAGES])
    assert program.ran(torch.randn(2, 64, 6, 7, dtype=F16)) == ["loop", "linear", "linear", "loop"]
    for size in ((2, 64, 6, 7), (1, 64, 1, 1), (1, 64, 9, 20)):
        is_as_exact(program, model, torch.randn(size, dtype=F16))


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(32, 32, 3, 1, 1, groups=2),
        nn.Conv2d(24, 32, 3, 1, 1),
        nn.Conv1d(32, 32, 3, 1, 1),
        nn.Conv2d(32, 32, 3, 1, 1).to(F32),
    ],
    ids=["groups", "odd channels", "one axis", "float32"],
)
def test_others_are_atens(conv: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    with_tile(monkeypatch, GemmTile(16, 16, 16))
    dtype = F16 if conv.padding_mode != "zeros" or conv.groups == 2 else conv.weight.dtype
    model = nn.Sequential(conv, nn.ReLU()).eval().to(dtype)
    rank = conv.weight.dim()
    x = torch.randn((2, conv.in_channels, *[6] * (rank - 2)), dtype=dtype)
    program = compiled(model, [x], [(True, False, *[True] * (rank - 2))])
    assert "aten::convolution" in program.ran(x) and "linear" not in program.ran(x)


def test_pools_of_halves_read_channels_last() -> None:
    """No image is copied into another order between the two convolutions."""
    torch.manual_seed(5)
    first, last = nn.Conv2d(8, 16, 3, bias=False), nn.Conv2d(16, 16, 1, bias=False)
    model = nn.Sequential(first, nn.MaxPool2d(3, 2, 1), last, nn.ReLU()).eval().to(F16)
    x = torch.randn(2, 8, 9, 8, dtype=F16)
    program = compiled(model, [x], [IMAGES])
    conv = "aten::convolution"
    assert program.ran(x) == ["loop", conv, "max_pool", conv, "loop"]
    is_as_exact(program, model, x)


class Patches(nn.Module):
    """How vision transformers begin."""

    def __init__(self, before: nn.Module, channels: int, patch: tuple[int, int]) -> None:
        super().__init__()
        self.before = before
        self.conv = nn.Conv2d(channels, 24, patch, patch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv(self.before(x)).flatten(2).transpose(1, 2)
        return y


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("size", [(12, 8), (14, 11)], ids=["whole", "with a rest"])
def test_patches_are_rows_of_a_product(size: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    model = Patches(nn.Identity(), 3, (4, 2)).eval().to(dtype)
    x = torch.randn(2, 3, *size, dtype=dtype)
    program = compiled(model, [x], [IMAGES])
    ran = program.ran(x)
    assert ran[0] == "loop" and "aten::convolution" not in ran and len(ran) <= 3
    is_as_exact(program, model, x)
    is_as_exact(program, model, torch.randn(3, 3, 9, 6, dtype=dtype))


def test_patches_of_what_a_convolution_made() -> None:
    """Its pixels lie channels last: their channels stay side by side."""
    torch.manual_seed(3)
    model = Patches(nn.Conv2d(3, 16, 3, 1, 1), 16, (2, 2)).eval()
    x = torch.randn(2, 3, 6, 8)
    program = compiled(model, [x], [IMAGES])
    assert program.ran(x).count("aten::convolution") == 1
    is_as_exact(program, model, x)


def test_larger_kernels_than_strides_are_no_patches() -> None:
    model = nn.Conv2d(3, 16, 4, 2).eval()
    x = torch.randn(1, 3, 8, 8)
    assert "aten::convolution" in compiled(model, [x], [IMAGES]).ran(x)


def product(batch: Dim, size: Dim, channels: int, out: int, kernel: int = 3) -> GemmProduct:
    b = IrBuilder()
    x = b.make("input", (), (batch, size, size, channels), F16, index=0)
    stored = b.make("const", (), (out, kernel, kernel, channels), F16, index=0)
    w, p = b.permute(stored, (0, 3, 1, 2)), kernel // 2
    how = {"stride": (1, 1), "padding": (p, p), "dilation": (1, 1), "groups": 1}
    shape = (batch, size, size, out)
    y = b.make("conv", (x, w), shape, F16, **how, activation=None, transposed=False)
    found = product_of(y, plain_epilogue(y))
    assert found is not None
    return found


@pytest.mark.parametrize("channels", [32, 64, 96, 128, 512])
@pytest.mark.parametrize("kernel", [1, 3])
def test_blocks_lie_within_a_tap_and_share_the_depth_evenly(channels: int, kernel: int) -> None:
    one = product(N, H, channels, 64, kernel)
    for most in classes_of(one):
        tile = candidate(one, most, GpuTarget())
        if most is None:
            assert tile is None
            continue
        assert tile is not None
        assert channels % tile.k == 0 and one.depth % (tile.k * tile.split) == 0
    assert candidate(replace(one, rows=49), 256, GpuTarget()) is not None


@pytest.mark.parametrize(
    ("channels", "out", "kernel", "most", "tile"),
    [
        (64, 64, 3, 4096, GemmTile(64, 64, 64)),
        (256, 256, 3, 256, GemmTile(64, 64, 64, split=3)),
        (512, 512, 3, 64, GemmTile(64, 64, 128, split=6, stages=3)),
        (1024, 256, 1, 256, GemmTile(32, 32, 64, split=2)),
        (2048, 512, 1, 64, GemmTile(32, 32, 64, split=4)),
        (512, 2048, 1, 64, GemmTile(64, 64, 64)),
    ],
)
def test_what_was_fastest_on_an_h200(
    channels: int, out: int, kernel: int, most: int, tile: GemmTile
) -> None:
    assert candidate(product(N, H, channels, out, kernel), most, GpuTarget()) == tile


def test_sizes_to_measure_at() -> None:
    for most in PIXEL_CLASSES[:-1]:
        assert most is not None
        assert sizes_near(product(N, H, 64, 64), most) == {N: 1, H: sympy.sqrt(most)}
    assert sizes_near(product(N, 14, 64, 64), 1024) == {N: 5}
    assert sizes_near(product(1, 14, 64, 64), 256) == {}
    assert sizes_near(product(1, 56, 64, 64), 256) is None


def test_channels_that_are_an_expression_of_sizes_are_atens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what a reshape says of another input's batch: no number could be timed."""
    found: list[GemmProduct] = []
    plan = GemmPlan(((None, None),))
    monkeypatch.setattr(choose, "unmeasured", lambda product, _: found.append(product) or plan)
    conv = nn.Conv2d(32, 16, 1, bias=False).requires_grad_(False).half()
    after = nn.Conv2d(16, 6, 1, bias=False).requires_grad_(False).half()  # makes no whole blocks

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return after(conv(x.reshape(y.shape[0], -1, 3, 3)).relu())

    x, y = torch.randn(2, 288, dtype=F16), torch.randn(2, 5)
    gm, shape_env = trace(forward, [x, y], [(True, False), (True, False)])
    program = compile_to_program(lower(gm, shape_env, forms=FORMS))
    assert not found
    torch.testing.assert_close(program(x, y), [forward(x, y)])


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_leaves_the_gradients_of_images_with_channels_last(
    dtype: torch.dtype, groups: int
) -> None:
    """ATen gets the weight's gradient alone; with the bias it made row-major images of all three."""

    def gradients(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        how = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups, [True, True, True])
        return torch.ops.aten.convolution_backward(g, x, w, [4], *how)

    def inputs(batch: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        shapes = ((batch, 4, 5, 6), (batch, 4, 5, 6), (4, 4 // groups, 3, 3))
        g, x, w = (torch.randn(shape, dtype=dtype) for shape in shapes)
        return [g.contiguous(memory_format=torch.channels_last), x, w]

    axes = [(True, False, False, False), (True, False, False, False), (False,) * 4]
    gm, shape_env = trace(gradients, inputs(2), axes)
    graph = lower(gm, shape_env, forms=FORMS)
    program = compile_to_program(graph)
    [call] = [line for line in program.text.splitlines() if "convolution_backward" in line]
    assert " lb:0,1,0 " in call
    for batch in (2, 1, 5):
        given = inputs(batch)
        want = gradients(*(t.float() for t in given))
        for got, one in zip(program(*given), want, strict=True):
            assert got.dtype == dtype
            torch.testing.assert_close(got.float(), one, rtol=0.02, atol=0.05)


LINES = {
    "one tap": ({}, 1, True),
    "three taps": ({"padding": 1}, 3, False),
    "far apart": ({"padding": 2, "dilation": 2, "stride": 2}, 3, False),
    "patches": ({"stride": 3}, 3, True),
    "each channel alone": ({"padding": 1, "groups": 4}, 3, False),
}


@pytest.mark.parametrize("how, taps, is_product", LINES.values(), ids=LINES)
def test_gradients_of_lines_have_channels_last(
    how: dict[str, int], taps: int, is_product: bool
) -> None:
    """As images one pixel high: ATen would make lines row-major."""
    groups = how.get("groups", 1)
    full = {"stride": 1, "padding": 0, "dilation": 1, **how}
    steps = [[full[name]] for name in ("stride", "padding", "dilation")]

    def gradients(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        rest = (*steps, False, [0], groups, [True] * 3)
        return torch.ops.aten.convolution_backward(g, x, w, [4], *rest)

    def inputs(batch: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x, w = torch.randn(batch, 4, 9), torch.randn(4, 4 // groups, taps)
        g = torch.randn_like(torch.conv1d(x, w, None, *steps, groups))
        last = [t.bfloat16().transpose(1, 2).contiguous().transpose(1, 2) for t in (g, x)]
        return [*last, w.bfloat16()]

    axes = [(True, False, False), (True, False, False), (False,) * 3]
    gm, shape_env = trace(gradients, inputs(2), axes)
    program = compile_to_program(lower(gm, shape_env, forms=FORMS))
    assert ("aten::convolution" in program.text) != is_product
    for batch in (2, 1, 5):
        given = inputs(batch)
        want = gradients(*(t.float() for t in given))
        for got, one in zip(program(*given), want, strict=True):
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got.float(), one, rtol=0.02, atol=0.1)


def test_gradients_of_a_weight_norm_of_lines_in_groups() -> None:
    """ATen takes the weight's gradient for row-major, and oneDNN reads the order of axes from strides of one row."""
    aten = torch.ops.aten

    def gradients(
        g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, scale: torch.Tensor
    ) -> Any:
        how = ([1], [4], [1], False, [0], 4, [True, True, False])
        image, weight, _ = aten.convolution_backward(g, x, w, None, *how)
        norm = v.norm(2, (0, 1), True)
        return image, *aten._weight_norm_interface_backward(weight.float(), v, scale, norm, 2)

    def inputs(batch: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        g, x = torch.randn(batch, 10, 16), torch.randn(batch, 9, 16)
        w, v, scale = torch.randn(16, 8, 4), torch.randn(16, 4, 8), torch.rand(1, 1, 8) + 0.5
        return [*(t.bfloat16().transpose(1, 2) for t in (g, x, w)), v, scale]

    axes = [*[(True, False, False)] * 2, *[(False,) * 3] * 3]
    program = compile_to_program(lower(*trace(gradients, inputs(2), axes), forms=FORMS))
    for batch in (2, 1, 5):
        given = inputs(batch)
        wide = [t.double() for t in given]
        how = ([1], [4], [1], False, [0], 4, [True, True, False])
        image, weight, _ = aten.convolution_backward(*wide[:3], None, *how)
        norm = wide[3].norm(2, (0, 1), True)
        rest = aten._weight_norm_interface_backward(weight.contiguous(), *wide[3:], norm, 2)
        for got, want in zip(program(*given), (image, *rest), strict=True):
            assert (got - want).abs().max() <= 0.02 * want.abs().max()


class ScaledLines(nn.Module):
    """Lines in groups, by weights that each call computes and writes with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(16, 4, 8)), nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        kernel = (self.weight * self.scale + shift).to(x.dtype)
        return torch.conv1d(x, kernel, padding=4, groups=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computed_weights_of_lines_in_groups(dtype: torch.dtype) -> None:
    """oneDNN reads the order of axes from strides of a single row, too."""
    torch.manual_seed(0)
    model, shift = ScaledLines(), torch.randn(1, 4, 1)
    program = compiled(
        model, [torch.randn(2, 16, 9, dtype=dtype), shift], [(True, False, False), (False,) * 3]
    )
    for batch in (2, 1, 5):
        x = torch.randn(batch, 16, 9, dtype=dtype)
        got, want = program(x, shift)[0], model.double()(x.double(), shift.double())
        model.float()
        assert (got - want).abs().max() <= 4 * torch.finfo(dtype).eps * want.abs().max()


@pytest.mark.parametrize("first", [False, True])
def test_the_weight_gradient_of_patches_is_a_product(first: bool) -> None:
    """Of images with channels first or last."""

    def gradients(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        how = ([2, 3], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
        return torch.ops.aten.convolution_backward(g, x, w, None, *how)[1]

    torch.manual_seed(0)
    form = torch.contiguous_format if first else torch.channels_last
    x = torch.randn(3, 5, 6, 10).bfloat16().contiguous(memory_format=form)
    g, w = torch.randn(3, 4, 3, 3).bfloat16(), torch.randn(4, 5, 2, 3).bfloat16()
    gm, shape_env = trace(gradients, [g, x, w], [(True, False, False, False)] * 2 + [(False,) * 4])
    program = compile_to_program(lower(gm, shape_env, forms=FORMS))
    assert "convolution_backward" not in program.text
    [got] = program(g, x, w)
    want = gradients(g.float(), x.float(), w.float())
    torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.1)


class Shuffled(nn.Module):
    """A pixel shuffle of a convolution, before another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.pixel_shuffle(torch.relu(self.first(x)), 2))


def test_a_shuffle_is_written_by_what_computes_its_pixels() -> None:
    torch.manual_seed(0)
    model = Shuffled().half()
    program = compiled(model, [torch.randn(2, 3, 6, 5).half()], [IMAGES])
    ran = program.ran(torch.randn(2, 3, 6, 5).half())
    # the image with channels last; bias, relu and shuffle; the last bias, and channels first
    assert ran == ["loop", "aten::convolution", "loop", "aten::convolution", "loop"]
    for size in ((2, 3, 6, 5), (1, 3, 2, 3)):
        is_as_exact(program, model, torch.randn(size).half())


def test_the_sum_of_a_shuffled_gradient_copies_nothing() -> None:
    """Over pixels that a pixel shuffle has split."""

    class Summed(nn.Module):
        def forward(self, g: torch.Tensor) -> torch.Tensor:
            return nn.functional.pixel_unshuffle(g, 2).sum((0, 2, 3))

    g, summed = torch.randn(2, 3, 8, 6), Summed()
    program = compiled(summed, [g], [(True, False, True, True)])
    assert sorted(program.ran(g)) == ["loop", "row", "row"]  # the loop reorders sums of lines
    for size in ((2, 3, 8, 6), (1, 3, 2, 2), (4, 3, 6, 10)):
        g = torch.randn(size)
        torch.testing.assert_close(program(g)[0], summed(g), rtol=1e-5, atol=1e-5)


class Exchange(nn.Module):
    """Two groups of channels that are shuffled, and the way back, as in gradients."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.back = back
        self.parts = nn.ModuleList(nn.Conv2d(4, 8, 1, bias=False) for _ in range(2))
        self.last = nn.Conv2d(16, 3, 1, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.cat([torch.relu(part(x)) for part in self.parts], 1)
        n, _, h, w = y.shape
        y = y.view(n, 2, 8, h, w).transpose(1, 2).reshape(n, 16, h, w)
        if not self.back:
            return (self.last(y),)
        y = (y * self.last.weight[0]).view(n, 8, 2, h, w).transpose(1, 2).reshape(n, 16, h, w)
        return tuple(torch.tanh(part).amax((2, 3)) for part in y.chunk(2, 1))


@pytest.mark.parametrize("back", [False, True])
def test_a_channel_shuffle_is_written_by_what_computes_the_channels(back: bool) -> None:
    torch.manual_seed(0)
    model = Exchange(back).half()
    program = compiled(model, [torch.randn(2, 4, 5, 6).half()], [IMAGES])
    ran = program.ran(torch.randn(2, 4, 5, 6).half())
    if not back:  # channels last, the parts, and channels first
        assert [name for name in ran if name == "loop"] == ["loop"] * 3
    for size in ((2, 4, 5, 6), (1, 4, 1, 1), (3, 4, 2, 7)):
        x = torch.randn(size).half()
        for got, want in zip(program(x), model(x), strict=True):
            torch.testing.assert_close(got, want, rtol=4e-3, atol=4e-3)
