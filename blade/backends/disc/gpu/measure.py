# SPDX-License-Identifier: Apache-2.0
"""How long a product takes on the GPU of this process, by our kernels and by ATen.

Steps are captured one after the other in a CUDA graph, each with another copy of the weights, so that these
come from memory as they do in a model; what is measured has the gaps between launches that a program has.
"""

import statistics
from collections.abc import Callable, Mapping

import sympy
import torch

from blade.backends.disc.gpu.driver import Function
from blade.backends.disc.gpu.gemm import Product
from blade.backends.disc.gpu.launch import LibraryLaunch
from blade.backends.disc.gpu.unit import Choice
from blade.backends.disc.ir import Value
from blade.backends.disc.kernel import Dim
from blade.backends.disc.steps import Counters, Scratch

WEIGHT_BYTES = 96 << 20  # more than the L2 cache of any GPU holds
MOST_COPIES = 24
_REPLAYS = 5
Sizes = Mapping[sympy.Symbol, int]


def sizes_for(product: Product, number: int) -> Sizes | None:
    """Values of the size symbols for which there are ``number`` rows: one of them is that, the others 1."""
    kernel, buffers = product.epilogue.kernel, product.epilogue.buffers
    dims = [product.rows, product.row, *product.weight_strides, *kernel.sizes()]
    dims += [d for b in buffers for d in (*b.shape, *(b.strides or ()))]
    symbols = sorted({s for d in dims for s in sympy.sympify(d).free_symbols}, key=str)
    for chosen in (None, *symbols):
        sizes = {s: number if s is chosen else 1 for s in symbols}
        if sympy.sympify(product.rows).subs(sizes) == number:
            return sizes
    return None


class Bench:
    """Memory for one product at one number of rows, and the steps over it."""

    def __init__(self, product: Product, sizes: Sizes, functions: Mapping[str, Function]) -> None:
        self.product = product
        self.sizes = sizes
        self.functions = functions
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.generator = torch.Generator(self.device)  # torch's own one stays as it was
        self.rows = self.number(product.rows)
        self.x = self.tensor((self.rows - 1) * self.number(product.row) + product.depth, product.x)
        row, step = map(self.number, product.weight_strides)
        extent = (product.columns - 1) * row + (product.depth - 1) * step + 1
        count = max(1, min(MOST_COPIES, WEIGHT_BYTES // (extent * product.w.dtype.itemsize)))
        self.weights = [self.tensor(extent, product.w) for _ in range(count)]
        self.buffers = [self.tensor(self.extent(b), b) for b in product.epilogue.buffers]
        self.counters = torch.zeros(1 << 16, dtype=torch.int32, device=self.device)
        self.scratch: dict[int, torch.Tensor] = {}

    def ours(self, launch: LibraryLaunch) -> Callable[[int], None]:
        """The step that runs ``launch``."""
        function = self.functions[launch.choice.unit.name]
        grid, ints = self.grid(launch.choice), [self.number(i) for i in launch.ints]
        rest = iter(self.operands())
        scratch = [
            self.memory(o) if isinstance(o, (Scratch, Counters)) else next(rest)
            for o in launch.operands[2:]
        ]
        return lambda i: function.launch(grid, (self.x, self.weight(i), *scratch), ints)

    def theirs(self, choices: tuple[Choice, ...]) -> Callable[[int], None]:
        """ATen's product, then, where something follows it, the launch of ``choices`` for these sizes."""
        product, kernel = self.product, self.product.epilogue.kernel
        x = self.x.as_strided((self.rows, product.depth), (self.number(product.row), 1))
        shape, strides = (product.depth, product.columns), product.weight_strides[::-1]
        ws = [w.as_strided(shape, [self.number(s) for s in strides]) for w in self.weights]
        out = self.buffers[product.epilogue.product].view(self.rows, product.columns)
        bias = self.buffers[1].view(-1)[: product.columns]
        follows = [
            (self.functions[c.unit.name], self.grid(c))
            for c in choices
            if c.when is None or bool(c.when.subs(self.sizes))
        ]
        ints = [self.number(s) for s in kernel.sizes()]

        def step(i: int) -> None:
            if product.biased:
                torch.addmm(bias, x, ws[i % len(ws)], out=out)
            else:
                torch.mm(x, ws[i % len(ws)], out=out)
            for function, grid in follows:
                function.launch(grid, self.buffers, ints)

        return step

    def us(self, step: Callable[[int], None]) -> float:
        """Microseconds of one step."""
        count = max(len(self.weights), 8)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(0)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for i in range(count):
                step(i)
        times: list[float] = []
        for _ in range(_REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return 1e3 * statistics.median(times[1:]) / count

    def weight(self, i: int) -> torch.Tensor:
        return self.weights[i % len(self.weights)]

    def operands(self) -> list[torch.Tensor]:
        """Of the epilogue, without the product."""
        skipped = self.product.epilogue.product
        return [b for k, b in enumerate(self.buffers) if k != skipped]

    def memory(self, operand: Scratch | Counters) -> torch.Tensor:
        if isinstance(operand, Counters):
            return self.counters
        numel = self.number(operand.numel)
        return self.scratch.setdefault(
            numel, torch.empty(numel, dtype=operand.dtype, device=self.device)
        )

    def tensor(self, numel: int, like: Value) -> torch.Tensor:
        made = torch.zeros(max(1, numel), dtype=like.dtype, device=self.device)
        return made.normal_(generator=self.generator) if like.dtype.is_floating_point else made

    def extent(self, value: Value) -> int:
        """Elements from the first to the last of a buffer."""
        shape = [self.number(d) for d in value.shape]
        if value.strides is None:
            return int(torch.Size(shape).numel())
        strides = [self.number(s) for s in value.strides]
        return 1 + sum((d - 1) * s for d, s in zip(shape, strides, strict=True))

    def grid(self, choice: Choice) -> tuple[int, int, int]:
        x, y, z = map(self.number, choice.grid)
        return x, y, z

    def number(self, dim: Dim) -> int:
        return dim if isinstance(dim, int) else int(dim.subs(self.sizes))
