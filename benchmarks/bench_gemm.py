# SPDX-License-Identifier: Apache-2.0
"""The generated GEMM alone, against MKL (torch.mm) and oneDNN with packed weights.

    python benchmarks/bench_gemm.py [--threads 1,2] [--rows 1,16,128] [--shapes 768x768] [--peak 276] [--bf16 | --int8]

Rows x columns x depth in fp32, or in bfloat16; with ``--int8`` in bytes, where what is timed begins with bytes (blade,
oneDNN) or, in FBGEMM's dynamic product, with floats. GFLOP/s at the median of interleaved rounds. Every product goes
through several copies of its weights in turn, ``--weights`` MB of them: a model's weights do not stay in the caches
between two of its layers. ``--weights 0`` uses one copy.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import sympy
import torch

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.ir.graph import Graph, IrBuilder, contiguous_strides
from blade.backends.disc.target.cpu import host
from blade.runtime.engine import make_engine

SHAPES = "384x384,1536x384,384x1536,768x768,3072x768,768x3072,2304x768"
Product = Callable[[torch.Tensor, int], object]  # x and the number of the weight


def blade_product(weights: Sequence[torch.Tensor]) -> Product:
    """One engine per weight, all with the same code."""
    shape, dtype = tuple(weights[0].shape), weights[0].dtype
    builder = IrBuilder()
    size = sympy.Symbol("s0", integer=True, positive=True)
    given = builder.make("input", (), (size, shape[1]), dtype, index=0)
    constant = builder.make("const", (), shape, dtype, contiguous_strides(shape), index=0)
    out = builder.make("linear", (given, constant), (size, shape[0]), dtype)
    strides = (contiguous_strides(out.shape),)
    graph = Graph(builder.values, (out,), strides, (given,), (weights[0],))
    compiled = compile_ir(graph, host())
    engines = [make_engine("g", "disc", compiled.program, compiled.object, [w]) for w in weights]
    return lambda x, k: engines[k].try_execute([x])


def mkl(weights: Sequence[torch.Tensor]) -> Product:
    return lambda x, k: torch.mm(x, weights[k].t())


def onednn(weights: Sequence[torch.Tensor]) -> Product:
    """Inductor's call for frozen weights."""
    packed = [torch.ops.mkldnn._reorder_linear_weight(w) for w in weights]
    linear = torch.ops.mkldnn._linear_pointwise
    return lambda x, k: linear(x, packed[k], None, "none", [], "")


def blade_int8(weights: Sequence[torch.Tensor]) -> Product:
    """One engine per weight, all with the same code; a scale for each row, as dynamic quantization has it."""
    shape = tuple(weights[0].shape)
    builder = IrBuilder()
    size = sympy.Symbol("s0", integer=True, positive=True)
    given = builder.make("input", (), (size, shape[1]), torch.uint8, index=0)
    scale = builder.make("input", (), (size, 1), torch.float32, index=1)
    held = [[w, torch.ones(shape[0]), torch.ones(shape[0])] for w in weights]
    constants = [
        builder.make("const", (), c.shape, c.dtype, contiguous_strides(c.shape), index=k)
        for k, c in enumerate(held[0])
    ]
    operands = (given, *constants, scale)
    out = builder.make(
        "int8_linear", operands, (size, shape[0]), torch.float32, scale=1.0, zero=128
    )
    strides = (contiguous_strides(out.shape),)
    graph = Graph(builder.values, (out,), strides, (given, scale), tuple(held[0]))
    compiled = compile_ir(graph, host())
    engines = [make_engine("g", "disc", compiled.program, compiled.object, c) for c in held]
    scales = {rows: torch.ones(rows, 1) for rows in range(4097)}
    return lambda x, k: engines[k].try_execute([x, scales[len(x)]])


def onednn_int8(weights: Sequence[torch.Tensor]) -> Product:
    """Inductor's call for static quantization."""
    columns = len(weights[0])
    packed = [torch.ops.onednn.qlinear_prepack(w, None) for w in weights]
    scales, zeros = torch.ones(columns), torch.zeros(columns, dtype=torch.int64)
    linear = torch.ops.onednn.qlinear_pointwise.default
    rest = (scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return lambda x, k: linear(x, 1.0, 128, packed[k], *rest)


def fbgemm_int8(weights: Sequence[torch.Tensor]) -> Product:
    """torch's dynamic quantization: reads floats and quantizes them first."""
    scales, zeros = torch.ones(len(weights[0])), torch.zeros(len(weights[0]), dtype=torch.int64)
    packed = []
    for w in weights:
        q = torch._make_per_channel_quantized_tensor(w, scales, zeros, 0)
        packed.append(torch.ops.quantized.linear_prepack(q, None))
    floats = {rows: torch.randn(rows, weights[0].shape[1]) for rows in (1, 4, 16, 64, 128, 512)}
    return lambda x, k: torch.ops.quantized.linear_dynamic(floats[len(x)], packed[k])


INT8_MAKERS = {"blade": blade_int8, "onednn": onednn_int8, "fbgemm": fbgemm_int8}
MAKERS = {"blade": blade_product, "mkl": mkl, "onednn": onednn}
BF16_MAKERS = {"blade": blade_product, "onednn": onednn}


def measure(products: dict[str, Product], x: torch.Tensor, copies: int, rounds: int) -> list[float]:
    """Median seconds of one product, per candidate."""
    for product in products.values():
        for k in range(copies):
            product(x, k)
    times: dict[str, list[float]] = {name: [] for name in products}
    for _ in range(rounds):
        for name, product in products.items():
            start = time.perf_counter()
            for k in range(copies):
                product(x, k)
            times[name].append((time.perf_counter() - start) / copies)
    return [statistics.median(seconds) for seconds in times.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rows", default="1,4,16,64,128,512")
    parser.add_argument("--shapes", default=SHAPES, help="columns x depth")
    parser.add_argument("--peak", type=float, default=0.0, help="GFLOP/s of one core, for percents")
    parser.add_argument("--weights", type=float, default=48.0, help="MB of weights in turn")
    parser.add_argument("--rounds", type=int, default=9)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--int8", action="store_true", help="products of bytes")
    kinds.add_argument("--bf16", action="store_true", help="products of bfloat16")
    options = parser.parse_args()
    makers = INT8_MAKERS if options.int8 else BF16_MAKERS if options.bf16 else MAKERS
    of_weights, of_x = torch.float32, torch.float32
    if options.bf16:
        of_weights = of_x = torch.bfloat16
    elif options.int8:
        of_weights, of_x = torch.int8, torch.uint8
    torch.manual_seed(0)
    print("threads  rows x columns x depth " + "".join(f"{name:>14}" for name in makers))
    for shape in options.shapes.split(","):
        columns, depth = map(int, shape.split("x"))
        size = of_weights.itemsize * columns * depth
        copies = max(1, round(options.weights * 1e6 / size))
        weights = [_matrix(columns, depth, of_weights) for _ in range(copies)]
        products = {name: make(weights) for name, make in makers.items()}
        for threads in map(int, options.threads.split(",")):
            torch.set_num_threads(threads)
            for rows in map(int, options.rows.split(",")):
                few = copies if rows < 256 else -(-copies // 8)
                x = _matrix(rows, depth, of_x)
                found = measure(products, x, few, options.rounds)
                speeds = [2e-9 * rows * columns * depth / seconds for seconds in found]
                cells = [_cell(speed, options.peak * threads) for speed in speeds]
                where = f"{rows:4} x {columns:4} x {depth:4}"
                print(f"{threads:7}  {where}     {''.join(cells)}", flush=True)


def _matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(rows, columns, dtype=dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, (rows, columns), dtype=dtype)


def _cell(speed: float, peak: float) -> str:
    return f"{speed:8.0f}" + (f" {speed / peak:4.0%}" if peak else "     ")


if __name__ == "__main__":
    main()
