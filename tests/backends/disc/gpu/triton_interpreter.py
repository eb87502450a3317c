# SPDX-License-Identifier: Apache-2.0
"""Runs units in Triton's interpreter, on CPU, and compares kernels with the reference interpreter.

check(kernel, buffers, {"s0": 3})       # same buffers through interpret() and the choice for these sizes

Triton's interpreter knows no libdevice, cuts where it should round to bfloat16 (and errs at tiny ones),
loses the carry of what it rounds to floats of 8 bits,
does not fuse a multiply-add, and walks reductions with other functions than its own element by element:
those parts are replaced by torch's here. It has to be told to interpret before Triton is imported.
"""

import importlib.util
import os
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu_native import evaluate

from blade.backends.disc.gpu.compile.triton_unit import LaunchChoice, TritonUnit
from blade.backends.disc.gpu.emit.kernel import emit
from blade.backends.disc.ir.kernel import Kernel
from blade.backends.disc.reference.interpret_kernel import interpret
from blade.backends.disc.target.gpu import GpuTarget

TARGET = GpuTarget()
ran: dict[str, TritonUnit] = {}  # what was interpreted, by name
_FOLDER = tempfile.TemporaryDirectory(prefix="blade-interpreted-")
_DIRECT = (
    "exp exp2 expm1 log log2 log1p sin cos tan tanh sinh cosh asin acos atan erf erfc floor ceil trunc "
    "sqrt rsqrt pow atan2 copysign"
).split()
_OTHER: dict[str, Callable[..., torch.Tensor]] = {
    "rint": torch.round,
    "fast_dividef": torch.divide,
    # torch's own errs where an operand is tiny
    "fmod": lambda a, b: torch.from_numpy(np.fmod(a.numpy(), b.numpy())),
}


@cache
def why_unavailable() -> str | None:
    """Imports Triton as an interpreter."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    if not hasattr(interpreter, "InterpretedFunction") or not _interprets():
        return "Triton was imported before it was told to interpret"
    _mend(interpreter)
    return None


def _interprets() -> bool:
    import triton

    return type(triton.jit(_interprets)).__name__ == "InterpretedFunction"


def _mend(interpreter: Any) -> None:
    builder, ops = interpreter.InterpreterBuilder, interpreter.ReduceOps
    handle, tl = interpreter.TensorHandle, interpreter.tl
    cast, dot, reduce = builder.cast_impl, builder.create_dot, ops.apply_impl
    convert = builder.create_fp_to_fp
    only = interpreter.interpreter_builder  # assertions are nothing without `debug`
    only.options = replace(only.options, debug=True, sanitize_overflow=False)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            x = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
            return handle(x.view(torch.int16).numpy().view(np.uint16), target.scalar)
        if source.dtype.scalar == tl.bfloat16 and target.scalar == tl.float32:
            bits = source.data.astype(np.uint32) << 16
            return handle(bits.view(np.float32), target.scalar)
        return cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.float8e4nv:
            x = torch.from_numpy(np.ascontiguousarray(source.data)).clamp(-448, 448)
            return handle(x.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), target.scalar)
        return convert(self, source, target, rounding)

    def apply_impl(self: Any, tensors: Any) -> Any:
        whole = {"max_nan": np.max, "min_nan": np.min, "product": np.prod}
        function = whole.get(getattr(self.combine_fn, "fn", self.combine_fn).__name__)
        if function is None:
            return reduce(self, tensors)
        x = tensors[0]
        found = function(x.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found.astype(x.handle.data.dtype), x.dtype)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        wide = np.longdouble if z.data.dtype == np.float64 else np.float64
        total = x.data.astype(wide) * y.data + z.data
        return handle(total.astype(z.data.dtype), z.dtype.scalar)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = [cast_impl(self, x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, *rest)  # it would multiply bits

    builder.cast_impl, builder.create_fma, ops.apply_impl = cast_impl, create_fma, apply_impl
    builder.create_dot, builder.create_fp_to_fp = create_dot, create_fp_to_fp


class _Libdevice:
    """torch's functions under libdevice's names, on the interpreter's tensors."""

    def __getattr__(self, name: str) -> Any:
        assert name in (*_DIRECT, *_OTHER), name
        function = _OTHER[name] if name in _OTHER else getattr(torch, name)

        def call(*args: Any) -> Any:
            from triton.runtime.interpreter import TensorHandle, tl

            values = [torch.from_numpy(np.ascontiguousarray(a.handle.data)) for a in args]
            result = function(*values).numpy()
            like = max(args, key=lambda a: a.handle.data.size)
            return tl.tensor(TensorHandle(result, like.dtype.scalar), like.type)

        return call


@cache
def load(unit: TritonUnit) -> types.ModuleType:
    """The unit's module, for the interpreter."""
    ran[unit.name] = unit
    path = Path(_FOLDER.name, f"{unit.name}.py")
    path.write_text(unit.text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(unit.name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if hasattr(module, "libdevice"):
        module.libdevice = _Libdevice()  # type: ignore[attr-defined]
    module.range = _range  # type: ignore[attr-defined]
    for name in (
        "gdc_wait",
        "gdc_launch_dependents",
        "prefetch",
    ):  # programs run one after the other
        setattr(module, name, lambda *_: None)
    return module


def _range(*bounds: Any) -> range:
    """Python's, of the interpreter's scalars: arrays of one element, which numpy takes for no integers."""
    return range(*(b if isinstance(b, int) else int(b.handle.data.item()) for b in bounds))


def chosen(choices: Sequence[LaunchChoice], sizes: Mapping[str, int]) -> LaunchChoice:
    """The one choice for these sizes."""

    def holds(choice: LaunchChoice) -> bool:
        if choice.when is None:
            return True
        values = {s: sizes[str(s)] for s in choice.when.free_symbols}
        return bool(choice.when.subs(values))

    (one,) = [c for c in choices if holds(c)]
    return one


def run(
    kernel: Kernel,
    choices: Sequence[LaunchChoice],
    buffers: Sequence[torch.Tensor],
    sizes: Mapping[str, int],
) -> None:
    """Launch what ``choices`` say for ``sizes``."""
    choice = chosen(choices, sizes)
    grid = tuple(evaluate(d, sizes) for d in choice.grid)
    launch(choice.unit, grid, buffers, [evaluate(d, sizes) for d in kernel.sizes()])


def launch(
    unit: TritonUnit, grid: Sequence[int], pointers: Sequence[torch.Tensor], ints: Sequence[int]
) -> None:
    """As the executor launches it: an empty grid is nothing."""
    if 0 in grid:
        return
    function = getattr(load(unit), unit.name)
    with np.errstate(all="ignore"):
        function[tuple(grid)](*pointers, *map(_int64, ints), **dict(unit.constants))


def _int64(number: int) -> Any:
    """A size as the interpreter's scalar; from an int it would make one of 32 bits."""
    from triton.runtime.interpreter import TensorHandle, tl

    return tl.tensor(TensorHandle(np.array([number], dtype=np.int64), tl.int64), tl.int64)


def both(
    kernel: Kernel, buffers: Sequence[torch.Tensor], sizes: Mapping[str, int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(Triton's, the reference's) for every buffer, whole, so that stray writes show too."""
    mine, reference = [b.clone() for b in buffers], [b.clone() for b in buffers]
    interpret(kernel, reference, sizes)
    run(kernel, emit(kernel, TARGET), mine, sizes)
    return list(zip(mine, reference))


def check(kernel: Kernel, buffers: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> None:
    for got, want in both(kernel, buffers, sizes):
        torch.testing.assert_close(got, want, equal_nan=True)
