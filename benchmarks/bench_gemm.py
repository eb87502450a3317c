# SPDX-License-Identifier: Apache-2.0
"""The generated GEMM alone, against MKL (torch.mm) and oneDNN with packed weights.

    python benchmarks/bench_gemm.py [--threads 1,2] [--rows 1,16,128] [--shapes 768x768] [--peak 276]

Rows x columns x depth in fp32; GFLOP/s at the median of interleaved rounds. Every product goes through
several copies of its weights in turn, ``--weights`` MB of them: a model's weights do not stay in the
caches between two of its layers. ``--weights 0`` uses one copy.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import sympy
import torch

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.cpu.target import host
from blade.backends.disc.ir import Builder, Graph, contiguous_strides
from blade.runtime.engine import make_engine

SHAPES = "384x384,1536x384,384x1536,768x768,3072x768,768x3072,2304x768"
Product = Callable[[torch.Tensor, int], object]  # x and the number of the weight


def blade_product(weights: Sequence[torch.Tensor]) -> Product:
    """One engine per weight, all with the same code."""
    shape, dtype = tuple(weights[0].shape), weights[0].dtype
    builder = Builder()
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


MAKERS = {"blade": blade_product, "mkl": mkl, "onednn": onednn}


def measure(
    products: dict[str, Product], rows: int, depth: int, copies: int, rounds: int
) -> list[float]:
    """Median seconds of one product, per candidate."""
    x = torch.randn(rows, depth)
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
    options = parser.parse_args()
    torch.manual_seed(0)
    print("threads  rows x columns x depth " + "".join(f"{name:>14}" for name in MAKERS))
    for shape in options.shapes.split(","):
        columns, depth = map(int, shape.split("x"))
        copies = max(1, round(options.weights * 1e6 / (4 * columns * depth)))
        weights = [torch.randn(columns, depth) for _ in range(copies)]
        products = {name: make(weights) for name, make in MAKERS.items()}
        for threads in map(int, options.threads.split(",")):
            torch.set_num_threads(threads)
            for rows in map(int, options.rows.split(",")):
                few = copies if rows < 256 else -(-copies // 8)
                found = measure(products, rows, depth, few, options.rounds)
                speeds = [2e-9 * rows * columns * depth / seconds for seconds in found]
                cells = [_cell(speed, options.peak * threads) for speed in speeds]
                where = f"{rows:4} x {columns:4} x {depth:4}"
                print(f"{threads:7}  {where}     {''.join(cells)}", flush=True)


def _cell(speed: float, peak: float) -> str:
    return f"{speed:8.0f}" + (f" {speed / peak:4.0%}" if peak else "     ")


if __name__ == "__main__":
    main()
