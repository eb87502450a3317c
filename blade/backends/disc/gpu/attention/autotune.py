# SPDX-License-Identifier: Apache-2.0
"""Choice of the kernel for long attentions by timing on the target GPU: ours, or ATen's (attention_calls.py).

    choose_kernels(values, target, facts, cache) -> {attention_key(value): "flash"}         without ours

With few queries, or queries that all run at once, our kernel is as fast as ATen's launch. For the other sizes
both are timed at one size of the class, including the copy that ATen's result needs. The result is cached by
attention, device and versions.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence

import sympy
import torch

from blade.backends.disc.gpu.attention.calls import attention, attention_key, long_class
from blade.backends.disc.gpu.compile.compile import KernelStore, compile_units
from blade.backends.disc.gpu.compile.driver import load
from blade.backends.disc.gpu.emit.library_launch import LibraryLaunch
from blade.backends.disc.ir.graph import Shape, Value
from blade.backends.disc.ir.kernel import Dim, Sizes, evaluate, extent_of
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.ir.views import view_of
from blade.backends.disc.program.attention_calls import (
    HeadsView,
    kernels,
    operands_of,
    result_of,
    run_sdpa,
)
from blade.backends.disc.target.gpu import GpuTarget
from blade.core.cuda_driver import DriverError
from blade.core.disk_cache import code_version, digest
from blade.timing.cuda_graph import microseconds

log = logging.getLogger(__name__)

WORTH = 0.95  # ATen's kernel is chosen if it takes at most this fraction of our time
LENGTH = 1024  # queries and keys at which kernels are timed
_MOST_BATCH = 1024
_STEPS = 4
_OURS = "ours"


def choose_kernels(
    values: Iterable[Value], target: GpuTarget, facts: SizeRelations, cache: KernelStore | None
) -> dict[str, str]:
    """ATen's kernels for long attentions, by ``attention_key``, if they are faster on a target that is here."""
    if not (target.here and torch.cuda.is_available()):
        return {}
    found: dict[str, str] = {}
    for key, value in {attention_key(v): v for v in values}.items():
        names = kernels(value, facts)
        sizes = long_sizes(value, target) if names else None
        if sizes is None:
            continue
        kept = _cache_key(key, target)
        data = None if cache is None else cache.get("attention", kept)
        if data is None:
            data = _fastest(value, names, sizes, target, facts, cache).encode()
            if cache is not None:
                cache.put("attention", kept, data)
        found[key] = data.decode()
    return {key: name for key, name in found.items() if name != _OURS}


def long_sizes(value: Value, target: GpuTarget) -> Sizes | None:
    """Sizes in the class of long attentions: at least LENGTH queries and keys, and the smallest batch."""
    q, k = value.args[:2]
    lengths = sympy.Tuple(q.shape[-2], k.shape[-2]).free_symbols
    others = sorted(_symbols(value) - lengths, key=str)
    when = long_class(value, target)
    length = 1
    while not all(_is_long(x.shape[-2], dict.fromkeys(lengths, length)) for x in (q, k)):
        length *= 2
        if length > LENGTH:
            return None  # it grows more slowly than each of its sizes
    batch = 1
    while batch <= _MOST_BATCH:
        sizes = {**dict.fromkeys(lengths, length), **dict.fromkeys(others, batch)}
        if when.subs(sizes) == sympy.true:
            return sizes
        batch *= 2
    return None


def _is_long(dim: Dim, sizes: Sizes) -> bool:
    return isinstance(dim, int) or bool(dim.subs(sizes) >= LENGTH)


def _symbols(value: Value) -> set[sympy.Symbol]:
    views = [view_of(x) for x in value.args]
    dims = [d for x in (*value.args, value) for d in x.shape]
    dims += [d for view in views if view is not None for d in (*view.strides, view.offset)]
    return set().union(*(sympy.sympify(d).free_symbols for d in dims))


def _fastest(
    value: Value,
    names: Sequence[str],
    sizes: Sizes,
    target: GpuTarget,
    facts: SizeRelations,
    cache: KernelStore | None,
) -> str:
    launches = attention(value, target, facts)
    assert launches is not None, value
    taken = [one for one in launches if _holds(one, sizes)]
    try:
        bench = _AttentionBenchmark(value, sizes)
        ours = microseconds(bench.ours(taken, target, cache), _STEPS)
    except (DriverError, torch.cuda.OutOfMemoryError, torch.AcceleratorError) as error:
        log.warning("an attention is not measured: %s", error)
        return _OURS
    times = {name: _time(bench, name) for name in names}
    text = ", ".join(f"{time:.1f} us by {name}" for name, time in times.items())
    log.info("attention %s at %s: %.1f us, %s", value, dict(sizes), ours, text)
    best = min(times, key=lambda name: times[name])
    return best if times[best] < WORTH * ours else _OURS


def _time(bench: "_AttentionBenchmark", kernel: str) -> float:
    """Microseconds of ATen's ``kernel``; inf if torch was built without it."""
    try:
        return microseconds(bench.theirs(kernel), _STEPS)
    except RuntimeError as error:
        log.info("attention by %s: %s", kernel, error)
        return math.inf


def _holds(launch: LibraryLaunch, sizes: Sizes) -> bool:
    when = launch.choice.when
    return when is None or when.subs(sizes) == sympy.true


class _AttentionBenchmark:
    """Operands of an attention at ``sizes``, with the program's memory layout."""

    def __init__(self, value: Value, sizes: Sizes) -> None:
        self.value, self.sizes = value, sizes
        self.memory: dict[int, torch.Tensor] = {}
        found = operands_of(value)
        assert found is not None, value
        ends = [self.heads(x) for x in reversed(found)]  # in a merged product the values come last
        self.operands = ends[::-1]
        self.out = self.heads(result_of(value))

    def ours(
        self, launches: Sequence[LibraryLaunch], target: GpuTarget, cache: KernelStore | None
    ) -> Callable[[int], None]:
        units = [one.choice.unit for one in launches]
        functions = load(compile_units(units, target, cache), {u.name for u in units})
        [launch] = launches
        x, y, z = map(self.number, launch.choice.grid)
        pointers = [self.pointer(o) for o in launch.operands if isinstance(o, Value)]
        ints = [self.number(i) for i in launch.ints]
        function = functions[launch.choice.unit.name]
        return lambda i: function.launch((x, y, z), pointers, ints)

    def theirs(self, kernel: str) -> Callable[[int], None]:
        return lambda i: run_sdpa(self.operands, self.out, self.value, kernel)

    def heads(self, x: HeadsView) -> torch.Tensor:
        sizes, strides = self.numbers(x.shape), self.numbers(x.view.strides)
        offset = self.number(x.view.offset)
        base = self.base(x.view.base, offset + extent_of(sizes, strides))
        return torch.as_strided(base, sizes, strides, offset)

    def base(self, value: Value, extent: int) -> torch.Tensor:
        """Random numbers: zeros would draw less power and run faster."""
        old = self.memory.get(value.id)
        if old is None or old.numel() < extent:
            generator = torch.Generator("cuda").manual_seed(
                0
            )  # torch's own generator stays unchanged
            made = torch.empty(extent, dtype=value.dtype, device="cuda")
            self.memory[value.id] = made.normal_(generator=generator)
        return self.memory[value.id]

    def pointer(self, x: Value) -> torch.Tensor:
        view = view_of(x)
        assert view is not None, x
        return self.memory[view.base.id][self.number(view.offset) :]

    def numbers(self, shape: Shape) -> list[int]:
        return [self.number(d) for d in shape]

    def number(self, dim: Dim) -> int:
        return evaluate(dim, self.sizes)


def _cache_key(key: str, target: GpuTarget) -> str:
    name = torch.cuda.get_device_name()
    return digest(["attention", key, name, repr(target), torch.__version__, code_version()])
