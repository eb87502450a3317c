# SPDX-License-Identifier: Apache-2.0
"""Timing of a product on the GPU of this process, by our kernels and by ATen.

Steps are captured in sequence in one CUDA graph, each with its own copy of the weights, so that weights come
from memory as in a model. The times include the gaps between launches, as in a program.
"""

from collections.abc import Callable, Mapping
from functools import cache

import sympy
import torch

from blade.backends.disc.gpu.compile.driver import CudaFunction
from blade.backends.disc.gpu.compile.triton_unit import LaunchChoice
from blade.backends.disc.gpu.emit.library_launch import LibraryLaunch
from blade.backends.disc.gpu.gemm.product import GemmProduct
from blade.backends.disc.gpu.gemm.tile_table_8bit import EIGHT_BIT
from blade.backends.disc.ir.convolution import to_channels_first
from blade.backends.disc.ir.graph import Value
from blade.backends.disc.ir.kernel import Dim, Sizes, evaluate, extent_of
from blade.backends.disc.program.instructions import Counters, ScratchBuffer
from blade.core.dtypes import HALVES
from blade.timing.cuda_graph import microseconds

WEIGHT_BYTES = 96 << 20  # larger than the L2 cache of any GPU
MOST_COPIES = 24
LARGEST = 1 << 14  # the largest size tried


def sizes_for(product: GemmProduct, number: int) -> Sizes | None:
    """Values of the size symbols that give ``number`` rows: one symbol is ``number``, the others are 1."""
    symbols = _symbols(product)
    for chosen in (None, *symbols):
        sizes = {s: number if s is chosen else 1 for s in symbols}
        if sympy.sympify(product.rows).subs(sizes) == number:
            return sizes
    return None


def _symbols(product: GemmProduct) -> list[sympy.Symbol]:
    kernel, buffers = product.epilogue.kernel, product.epilogue.buffers
    dims = [
        product.rows,
        product.row,
        product.step,
        *product.weight_strides,
        *kernel.sizes(),
        *product.x.shape,
    ]
    dims += [d for b in buffers for d in (*b.shape, *(b.strides or ()))]
    return sorted({s for d in dims for s in sympy.sympify(d).free_symbols}, key=str)


def sizes_near(product: GemmProduct, most: int) -> Sizes | None:
    """Values of the size symbols that give at most, and nearly, ``most`` pixels: one square image; several
    images if only their number varies."""
    symbols = _symbols(product)
    batch = sympy.sympify(product.x.shape[0]).free_symbols
    spatial = [s for s in symbols if s not in batch]

    def at(number: int) -> Sizes:
        return {s: number if s in spatial or not spatial else 1 for s in symbols}

    def rows(number: int) -> int:
        return int(sympy.sympify(product.rows).subs(at(number)))

    low, high = 1, LARGEST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if rows(middle) <= most else (low, middle - 1)
    return at(low) if 0 < rows(low) <= most else None


def sizes_of_images(product: GemmProduct, most: int, side: int) -> Sizes | None:
    """Values of the size symbols that give at most ``most`` pixels in several images of ``side``; ``None`` if the
    images' number or their sizes are known."""
    batch = sympy.sympify(product.x.shape[0]).free_symbols
    spatial = [s for s in _symbols(product) if s not in batch]
    if not batch or not spatial:
        return None
    one = {**dict.fromkeys(spatial, side), **dict.fromkeys(batch, 1)}
    images = most // max(1, int(sympy.sympify(product.rows).subs(one)))
    return {**one, **dict.fromkeys(batch, images)} if images > 1 else None


@cache
def has_scaled_products() -> bool:
    """Can ATen multiply 8-bit floats with row scales into halves here?"""
    w = torch.ones(32, 16, device="cuda").to(torch.float8_e4m3fn)
    ones = torch.ones(32, 1, device="cuda")
    try:
        for dtype in HALVES:
            out, bias = torch.empty(3, 32, device="cuda", dtype=dtype), ones.view(-1).to(dtype)
            how = (w[:3], w.t(), ones[:3], ones.t(), bias, None, dtype, True)
            torch.ops.aten._scaled_mm.out(*how, out=out)
    except (RuntimeError, ValueError):
        return False
    return True


class GemmBenchmark:
    """Operands of one product at one number of rows, and the steps to time on them."""

    def __init__(
        self, product: GemmProduct, sizes: Sizes, functions: Mapping[str, CudaFunction]
    ) -> None:
        self.product = product
        self.sizes = sizes
        self.functions = functions
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.generator = torch.Generator(self.device)  # torch's own generator stays unchanged
        self.rows = self.number(product.rows)
        self.x = self.tensor(self.x_extent(), product.x)
        row, step = map(self.number, product.weight_strides)
        extent = (product.columns - 1) * row + (product.depth - 1) * step + 1
        count = max(1, min(MOST_COPIES, WEIGHT_BYTES // (extent * product.w.dtype.itemsize)))
        self.weights = [self.tensor(extent, product.w) for _ in range(count)]
        self.buffers = [self.tensor(self.extent(b), b) for b in product.epilogue.buffers]
        scales = () if product.scales is None else product.scales.operands
        self.scales = [self.tensor(self.extent(s), s) for s in scales]
        self.counters = torch.zeros(1 << 16, dtype=torch.int32, device=self.device)
        self.scratch: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def ours(self, launch: LibraryLaunch) -> Callable[[int], None]:
        """The step that runs ``launch``."""
        function = self.functions[launch.choice.unit.name]
        grid, ints = self.grid(launch.choice), [self.number(i) for i in launch.ints]
        rest = iter(self.operands())
        scratch = [
            self.memory(o) if isinstance(o, (ScratchBuffer, Counters)) else next(rest)
            for o in launch.operands[2:]
        ]
        return lambda i: function.launch(grid, (self.x, self.weight(i), *scratch), ints)

    def theirs(self, choices: tuple[LaunchChoice, ...]) -> Callable[[int], None]:
        """ATen's product, then the launch of ``choices`` for these sizes, if there is an epilogue."""
        product, kernel = self.product, self.product.epilogue.kernel
        follows = [
            (self.functions[c.unit.name], self.grid(c))
            for c in choices
            if c.when is None or bool(c.when.subs(self.sizes))
        ]
        ints = [self.number(s) for s in kernel.sizes()]
        multiply = self.multiplied() if product.conv is None else self.convolved()
        multiply = multiply if product.scales is None else self.scaled()
        place = product.epilogue.product

        def step(i: int) -> None:
            buffers = [*self.buffers]
            buffers[place] = multiply(i)
            for function, grid in follows:
                function.launch(grid, buffers, ints)

        return step

    def multiplied(self) -> Callable[[int], torch.Tensor]:
        """ATen's product of two matrices."""
        product = self.product
        steps = (self.number(product.row), self.number(product.step))
        x = self.x.as_strided((self.rows, product.depth), steps)
        shape, strides = (product.depth, product.columns), product.weight_strides[::-1]
        ws = [w.as_strided(shape, [self.number(s) for s in strides]) for w in self.weights]
        out = self.buffers[product.epilogue.product].view(self.rows, product.columns)
        bias = self.buffers[1].view(-1)[: product.columns]

        def multiply(i: int) -> torch.Tensor:
            if product.biased:
                return torch.addmm(bias, x, ws[i % len(ws)], out=out)
            return torch.mm(x, ws[i % len(ws)], out=out)

        return multiply

    def scaled(self) -> Callable[[int], torch.Tensor]:
        """ATen's product of 8-bit floats (scaled_mm_calls.py)."""
        product = self.product
        x = self.x.as_strided((self.rows, product.depth), (self.number(product.row), 1))
        row = self.number(product.weight_strides[0])
        ws = [w.as_strided((product.depth, product.columns), (1, row)) for w in self.weights]
        out = self.buffers[product.epilogue.product].view(self.rows, product.columns)
        columns, rows, *rest = self.scales
        bias = rest[0] if rest else None

        def multiply(i: int) -> torch.Tensor:
            w, scales = ws[i % len(ws)], (rows.view(-1, 1), columns.view(1, -1))
            return torch._scaled_mm(
                x, w, *scales, bias=bias, out_dtype=out.dtype, use_fast_accum=True, out=out
            )

        return multiply

    def convolved(self) -> Callable[[int], torch.Tensor]:
        """cuDNN's convolution, on channels-last memory."""
        conv = self.product.conv
        assert conv is not None
        a, shape = conv.attrs, [self.number(d) for d in self.product.x.shape]
        first = to_channels_first(len(shape))
        x = self.x.view(shape).permute(first)
        out, channels, *taps = (self.number(d) for d in self.product.w.shape)
        ws = [w.view(out, *taps, channels).permute(first) for w in self.weights]
        how = (a["stride"], a["padding"], a["dilation"], False, [0] * len(taps), a["groups"])
        return lambda i: torch.convolution(x, ws[i % len(ws)], None, *how)

    def x_extent(self) -> int:
        if self.product.conv is not None:
            return self.extent(self.product.x)
        row, step = self.number(self.product.row), self.number(self.product.step)
        return (self.rows - 1) * row + (self.product.depth - 1) * step + 1

    def us(self, step: Callable[[int], None]) -> float:
        """Microseconds of one step."""
        return microseconds(step, max(len(self.weights), 8))

    def weight(self, i: int) -> torch.Tensor:
        return self.weights[i % len(self.weights)]

    def operands(self) -> list[torch.Tensor]:
        """Operands of the scales and of the epilogue, without the product."""
        skipped = self.product.epilogue.product
        return [*self.scales, *(b for k, b in enumerate(self.buffers) if k != skipped)]

    def memory(self, operand: ScratchBuffer | Counters) -> torch.Tensor:
        if isinstance(operand, Counters):
            return self.counters
        numel, dtype = self.number(operand.numel), operand.dtype
        made = self.scratch.get((numel, dtype))
        if made is None:
            made = self.scratch[numel, dtype] = torch.empty(numel, dtype=dtype, device=self.device)
        return made

    def tensor(self, numel: int, like: Value) -> torch.Tensor:
        if like.dtype in EIGHT_BIT:  # up to 64, which is 2 as an 8-bit float
            made = torch.randint(65, (max(1, numel),), generator=self.generator, device=self.device)
            return made.to(torch.int8).view(like.dtype)
        made = torch.zeros(max(1, numel), dtype=like.dtype, device=self.device)
        return made.normal_(generator=self.generator) if like.dtype.is_floating_point else made

    def extent(self, value: Value) -> int:
        """Elements of a buffer from its first to its last."""
        shape = [self.number(d) for d in value.shape]
        if value.strides is None:
            return int(torch.Size(shape).numel())
        strides = [self.number(s) for s in value.strides]
        return extent_of(shape, strides)

    def grid(self, choice: LaunchChoice) -> tuple[int, int, int]:
        x, y, z = map(self.number, choice.grid)
        return x, y, z

    def number(self, dim: Dim) -> int:
        return evaluate(dim, self.sizes)
