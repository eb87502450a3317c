# SPDX-License-Identifier: Apache-2.0
"""Runs kernels as native code in the tests, and compares them with the interpreter.

native = Native({"k": kernel})
native.check("k", buffers, {"s0": 3})       # same buffers through interpret() and the native code
"""

import ctypes
import itertools
from collections.abc import Mapping, Sequence

import sympy
import torch

from blade.backends.disc.cpu.compile.llvm import load
from blade.backends.disc.cpu.emit.kernel import emit
from blade.backends.disc.ir.kernel import (
    Access,
    Arg,
    Compute,
    Dim,
    Kernel,
    Load,
    Store,
)
from blade.backends.disc.reference.interpret_kernel import interpret
from blade.backends.disc.target.cpu import CpuTarget, host

_CANARY = 0xA5


def symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)


def evaluate(dim: Dim, sizes: Mapping[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    return int(dim.subs({s: sizes[str(s)] for s in dim.free_symbols}))


class Native:
    """Compiled kernels by name."""

    def __init__(self, kernels: Mapping[str, Kernel], target: CpuTarget | None = None) -> None:
        self.kernels, target = dict(kernels), target or host()
        self.emitted = {name: emit(k, name, target) for name, k in kernels.items()}
        self.engine = load([(name, e.text) for name, e in self.emitted.items()])

    def run(
        self, name: str, buffers: Sequence[torch.Tensor], sizes: Mapping[str, int], parts: int = 1
    ) -> None:
        """The whole extent in ``parts`` calls; checks that scratch is not overrun."""
        emitted = self.emitted[name]
        extent, need = evaluate(emitted.extent, sizes), evaluate(emitted.scratch, sizes)
        memory = torch.full((need + 192,), _CANARY, dtype=torch.uint8)
        skip = -memory.data_ptr() % 64
        scratch = memory.data_ptr() + skip if need else 0
        pointers = (ctypes.c_void_p * (len(buffers) + 1))(*[b.data_ptr() for b in buffers], scratch)
        ints = [evaluate(d, sizes) for d in self.kernels[name].sizes()]
        numbers = (ctypes.c_int64 * max(1, len(ints)))(*ints)
        # The engine's entry takes the address of each argument.
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.engine.raw_lookup(name))
        bounds = [extent * k // parts for k in range(parts + 1)]
        for begin, end in itertools.pairwise(bounds):
            values = (
                ctypes.c_void_p(ctypes.addressof(pointers)),
                ctypes.c_void_p(ctypes.addressof(numbers)),
                ctypes.c_int64(begin),
                ctypes.c_int64(end),
            )
            function((ctypes.c_void_p * 4)(*[ctypes.addressof(v) for v in values]))
        assert bool((memory[skip + need :] == _CANARY).all()), f"{name} wrote past its scratch"

    def both(
        self, name: str, buffers: Sequence[torch.Tensor], sizes: Mapping[str, int], parts: int = 1
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(native, interpreted) for every buffer, whole, so that stray writes show too."""
        mine, reference = [b.clone() for b in buffers], [b.clone() for b in buffers]
        interpret(self.kernels[name], reference, sizes)
        self.run(name, mine, sizes, parts)
        return list(zip(mine, reference))

    def check(
        self, name: str, buffers: Sequence[torch.Tensor], sizes: Mapping[str, int], parts: int = 1
    ) -> None:
        for got, want in self.both(name, buffers, sizes, parts):
            torch.testing.assert_close(got, want, equal_nan=True)


def samples(dtype: torch.dtype, count: int, rng: torch.Generator) -> torch.Tensor:
    """Random values of ``dtype``, no zeros among integers."""
    if dtype == torch.bool:
        return torch.rand(count, generator=rng) < 0.5
    if dtype.is_floating_point:
        return (torch.randn(count, generator=rng, dtype=torch.float64) * 3).to(dtype)
    low = 1 if dtype == torch.uint8 else -100
    values = torch.randint(low, 100, (count,), generator=rng)
    return torch.where(values == 0, 7, values).to(dtype)


def pointwise_kernel(op: str, sources: Sequence[torch.dtype], dtype: torch.dtype) -> Kernel:
    """``out[i] = op(in0[i], ...)`` over s0 elements."""
    args = tuple(Arg(d, False) for d in sources) + (Arg(dtype, True),)
    loads = tuple(Load(Access(k, (1,)), d) for k, d in enumerate(sources))
    count = len(sources)
    body = (*loads, Compute(op, tuple(range(count)), dtype), Store(Access(count, (1,)), count))
    return Kernel((), symbol("s0"), args, body)
