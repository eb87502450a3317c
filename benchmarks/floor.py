# SPDX-License-Identifier: Apache-2.0
"""How fast a model could be at best on this machine: what a result is to be compared with.

    machine = measure_machine(threads=2)
    print(machine.how)                                    # what was measured, and how
    floor_s(count_work(model, inputs), machine)

Matrix products, convolutions and attention cost their FLOPs at the highest rate seen; everything
between them is taken as fused perfectly: what such an op reads from others (weights apart) and what it
writes is moved once, at memory bandwidth. Weights are counted where they alone take longer. So it is
a floor for data that comes from memory; small tensors in caches can beat its second part.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from zoo.model import Tensors

UNITS, STEPS, CHAINS = 256, 4096, 24  # of the FMA kernel; its chains hide the latency of the adders
WORDS = 1 << 24  # per array of the bandwidth measurement: 64 MiB, beyond caches
BEST_OF_S = 0.3


@dataclass(frozen=True)
class Machine:
    """``flops`` and ``bytes`` per second, and a sentence on how they were measured."""

    flops: float
    bytes: float
    how: str


@dataclass(frozen=True)
class Work:
    """Of one call: FLOPs of the counted ops, bytes they exchange with others, bytes of their weights."""

    flops: int
    exchanged: int
    weights: int


def floor_s(work: Work, machine: Machine) -> float:
    """Seconds one call takes at least."""
    moved = work.flops / machine.flops + work.exchanged / machine.bytes
    return max(moved, work.weights / machine.bytes)


def measure_machine(threads: int) -> Machine:
    """Takes about two seconds; everything else on the machine should be quiet."""
    torch.set_num_threads(threads)
    rates = {"torch.mm of 1024 x 1024": _mm_rate(), **_fma_rate()}
    best = max(rates, key=lambda name: rates[name])
    a, b = torch.rand(WORDS), torch.rand(WORDS)
    moved = 3 * a.numel() * a.element_size()
    bandwidth = moved / _shortest(lambda: torch.add(a, 1.5, out=b)) * 2 / 3
    told = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in rates.items())
    how = (
        f"peak: {best} ({told}); bandwidth: {bandwidth / 1e9:.1f} GB/s, reading and writing 64 MiB; "
        f"{threads} threads"
    )
    return Machine(rates[best], bandwidth, how)


def _mm_rate() -> float:
    a, b, c = (torch.rand(1024, 1024) for _ in range(3))
    return 2 * 1024**3 / _shortest(lambda: torch.mm(a, b, out=c))


def _fma_rate() -> dict[str, float]:
    """Of a kernel that does nothing but fused multiply-adds in registers; empty without a compiler."""
    try:
        import numpy

        from blade.backends.disc.cpu.compile.parallel import compile_kernels
        from blade.backends.disc.target.cpu import host
        from blade.runtime.engine import make_engine
    except ImportError:
        return {}
    target = host()
    code = compile_kernels([("fma", _fma_text(target.lanes))], target)
    held = torch.from_numpy(numpy.frombuffer(code, dtype=numpy.uint8).copy())
    engine = make_engine("fma", "disc", _fma_program(target.isa, target.lanes), held, [])
    x = torch.full((UNITS, target.lanes), 0.5)
    count = 2 * UNITS * STEPS * CHAINS * target.lanes
    return {"multiply-adds in registers": count / _shortest(lambda: engine.try_execute([x]))}


def _fma_text(lanes: int) -> str:
    """``out[unit] = `` the sum of CHAINS accumulators after STEPS rounds of ``acc = acc * x + x``."""
    vector = f"vector<{lanes}xf32>"
    chains = range(CHAINS)
    carried = ", ".join(f"%a{k} = %x" for k in chains)
    types = ", ".join([vector] * CHAINS)
    fma = [
        f"%n{k} = llvm.intr.fma(%a{k}, %x, %x) : ({vector}, {vector}, {vector}) -> {vector}"
        for k in chains
    ]
    sums = [
        f"%s{k + 1} = llvm.fadd %{f's{k}' if k else 'r#0'}, %r#{k + 1} : {vector}"
        for k in range(CHAINS - 1)
    ]
    return "\n".join(
        [
            "llvm.func @fma(%ptrs: !llvm.ptr, %ints: !llvm.ptr, %begin: i64, %end: i64) {",
            "%zero = arith.constant 0 : i64",
            "%one = arith.constant 1 : i64",
            f"%steps = arith.constant {STEPS} : i64",
            f"%lanes = arith.constant {lanes} : i64",
            "%in = llvm.load %ptrs : !llvm.ptr -> !llvm.ptr",
            "%second = llvm.getelementptr %ptrs[1] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr",
            "%out = llvm.load %second : !llvm.ptr -> !llvm.ptr",
            "scf.for %unit = %begin to %end step %one : i64 {",
            "%at = arith.muli %unit, %lanes : i64",
            "%source = llvm.getelementptr %in[%at] : (!llvm.ptr, i64) -> !llvm.ptr, f32",
            f"%x = llvm.load %source {{alignment = 4 : i64}} : !llvm.ptr -> {vector}",
            f"%r:{CHAINS} = scf.for %i = %zero to %steps step %one iter_args({carried}) -> ({types}) : i64 {{",
            *fma,
            f"scf.yield {', '.join(f'%n{k}' for k in chains)} : {types}",
            "}",
            *sums,
            "%target = llvm.getelementptr %out[%at] : (!llvm.ptr, i64) -> !llvm.ptr, f32",
            f"llvm.store %s{CHAINS - 1}, %target {{alignment = 4 : i64}} : {vector}, !llvm.ptr",
            "}",
            "llvm.return",
            "}",
            "",
        ]
    )


def _fma_program(isa: tuple[str, ...], lanes: int) -> str:
    cost = STEPS * CHAINS * lanes
    registers = ("dim 0 0", f"const {lanes}", f"const {cost}", "const 0")
    lines = [
        "blade.disc 1",
        " ".join(("isa", *isa)),
        "inputs 1",
        "input 0 f32 cpu 2",
        f"registers {len(registers)}",
        *(f"reg {k} {text}" for k, text in enumerate(registers)),
        "guards 0",
        "slots 2",
        "slot 0 input 0",
        "slot 1 output f32 2 0 1",
        "instructions 1",
        "kernel fma 0 2 3 2 0 1 0",
        "outputs 1 1",
        "end",
        "",
    ]
    return "\n".join(lines)


def _shortest(call: Callable[[], Any]) -> float:
    """The shortest of the calls that fit into ``BEST_OF_S``, after one to warm up."""
    assert call() is not None
    times: list[float] = []
    while sum(times) < BEST_OF_S:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def count_work(module: torch.nn.Module, inputs: Tensors) -> Work:
    """Run the eager model once and count; recurrent layers are taken apart for that."""
    weights = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    counter = _Counter(weights)
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False), counter:
        module(*inputs)
    return Work(counter.flops, counter.exchanged, sum(counter.read.values()))


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    flops: int = sdpa_flop_count(query.shape, key.shape, value.shape)
    return flops


_COUNTED = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
}


class _Counter(TorchDispatchMode):
    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self.weights = weights
        self.flops = self.exchanged = 0
        self.read: dict[int, int] = {}  # a weight used twice is read from memory once

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count = _COUNTED.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=out)
            for tensor in tree_leaves((args, kwargs, out)):
                if isinstance(tensor, torch.Tensor):
                    self._move(tensor)
        return out

    def _move(self, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage().data_ptr()
        if storage in self.weights:
            self.read[storage] = max(size, self.read.get(storage, 0))
        else:
            self.exchanged += size
