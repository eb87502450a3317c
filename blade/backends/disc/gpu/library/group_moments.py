# SPDX-License-Identifier: Apache-2.0
"""Mean and deviation of groups of channels on a GPU (``group_moments``): one launch reads every element once.

launches = moments(value, target, counters, facts)

A program takes one group of one sample, in tiles of pixels and channels in memory order, and combines the
tiles' means and sums of squares (Chan, Golub and LeVeque 1983), which avoids cancellation. If groups are
few and large, several programs split a group, and the last to arrive combines their results in a fixed
order.
"""

import sympy

from blade.backends.disc.gpu.compile.triton_unit import LaunchChoice, condition, named_unit
from blade.backends.disc.gpu.emit.device_functions import EARLY
from blade.backends.disc.gpu.emit.library_launch import LibraryLaunch, pointer, starts_aligned
from blade.backends.disc.gpu.emit.specialize_sizes import specialize_sizes
from blade.backends.disc.gpu.emit.tile_table import power
from blade.backends.disc.ir.graph import Value, numel, plain
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.ir.views import collapse, view_of
from blade.backends.disc.program.instructions import Counters, ScratchBuffer
from blade.backends.disc.target.gpu import GpuTarget

PARTS = 8  # programs that split a large group
TILE = 8192  # elements in registers at once
WARPS = 8

_TEXT = """\
import triton
import triton.language as tl
%(imports)s

@triton.jit
def kernel(
    x, %(memory)sout, %(numbers)s,
    GROUPS: tl.constexpr, CHANNELS: tl.constexpr, EPS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr,
):
    program = tl.program_id(0)
    part = program %% PARTS
    of = program // PARTS
    sample = (of // GROUPS).to(tl.int64)
    channel = of %% GROUPS * CHANNELS
    inside = tl.arange(0, BLOCK_C)
    pixels = tl.cast(P, tl.int32)
    x += sample * X_SAMPLE + channel.to(tl.int64) * X_CHANNEL
    share = tl.cdiv(tl.cdiv(pixels, BLOCK_P), PARTS) * BLOCK_P
    start = part * share
    stop = tl.minimum(pixels, start + share)
    count = 0.0
    mean = 0.0
    spread = 0.0
%(begin)s    for first in range(start, stop, BLOCK_P):
        pixel = first + tl.arange(0, BLOCK_P)
        there = (pixel < stop)[:, None] & (inside < CHANNELS)[None, :]
%(place)s        x_at = x + place[:, None] + inside.to(tl.int64)[None, :] * X_CHANNEL
        value = tl.load(x_at, mask=there, other=0.0).to(tl.float32)
        found = (tl.minimum(stop - first, BLOCK_P) * CHANNELS).to(tl.float32)
        average = tl.sum(tl.sum(value, 1), 0) / found
        apart = tl.where(there, value - average, 0.0)
        total = count + found
        further = average - mean
        spread += tl.sum(tl.sum(apart * apart, 1), 0) + further * further * (count * found / total)
        mean += further * (found / total)
        count = total
"""

_JOIN = """\
    left = partial + of.to(tl.int64) * (PARTS * 3)
    tl.store(left + part * 3, count)
    tl.store(left + part * 3 + 1, mean)
    tl.store(left + part * 3 + 2, spread)
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + of, 1, sem="acq_rel", scope="gpu")
    if arrived == PARTS - 1:
        tl.store(counters + of, 0)
        each = left + tl.arange(0, PARTS) * 3
        counts = tl.load(each, cache_modifier=".cg")
        means = tl.load(each + 1, cache_modifier=".cg")
        count = tl.sum(counts, 0)
        mean = tl.sum(counts * means, 0) / count
        means = means - mean
        spread = tl.sum(tl.load(each + 2, cache_modifier=".cg") + counts * means * means, 0)
"""

_STORE = """\
    out_at = out + sample * (GROUPS * CHANNELS) + channel + inside
    rstd = tl.rsqrt(spread / count + EPS)
    row = tl.zeros((BLOCK_C,), tl.float32)
    tl.store(out_at, row + mean, mask=inside < CHANNELS)
    tl.store(out_at + tl.cast(N, tl.int64) * (GROUPS * CHANNELS), row + rstd, mask=inside < CHANNELS)
"""


def moments(
    value: Value, target: GpuTarget, counters: Counters, facts: SizeRelations
) -> list[LibraryLaunch]:
    """The launches that compute ``value``, a ``group_moments``."""
    x, groups = value.args[0], int(value.attrs["groups"])
    programs = plain(sympy.sympify(x.shape[0]) * groups)
    each = plain(sympy.sympify(numel(x.shape[2:])) * (int(value.shape[2]) // groups))
    few = sympy.Le(programs, min(target.multiprocessors, counters.numel))
    shared = sympy.And(sympy.sympify(few), sympy.sympify(sympy.Gt(each, TILE)))
    made = [
        _launch(value, target, facts, sympy.Not(shared), None),
        _launch(value, target, facts, shared, counters),
    ]
    return [one for one in made if one.choice.when != sympy.false]


def _launch(
    value: Value,
    target: GpuTarget,
    facts: SizeRelations,
    when: sympy.Basic,
    counters: Counters | None,
) -> LibraryLaunch:
    """``counters``: those of the programs that split a group; ``None``: one program per group."""
    [x] = value.args
    view = view_of(x)
    assert view is not None, value
    batch, groups, each = x.shape[0], int(value.attrs["groups"]), int(value.shape[2])
    each //= groups
    dims, [steps] = collapse(x.shape[2:], [view.strides[2:]])
    numbers = specialize_sizes(
        {
            "N": batch,
            "P": numel(x.shape[2:]),
            "X_SAMPLE": view.strides[0],
            "X_CHANNEL": view.strides[1],
            **{f"D{k}": d for k, d in enumerate(dims) if k},
            **{f"X_PIXEL_{k}": s for k, s in enumerate(steps)},
        },
        facts,
    )
    programs, parts = plain(sympy.sympify(batch) * groups), PARTS if counters else 1
    partial = ScratchBuffer(value.dtype, plain(sympy.sympify(programs) * (PARTS * 3)))
    memory = () if counters is None else (("partial", partial), ("counters", counters))
    operands = (("x", x), *memory, ("out", value))
    early = target.starts_early
    text = _TEXT % {
        "imports": EARLY * early,
        "memory": "".join(f"{name}, " for name, _ in memory),
        "numbers": ", ".join(numbers.names),
        "begin": "    gdc_launch_dependents()\n    gdc_wait()\n" * early,
        "place": _place(len(dims)),
    }
    body = _STORE if counters is None else _JOIN + _indented(_STORE)
    block_c = power(each)
    unit = named_unit(
        "group_moments",
        text + body,
        (*((name, pointer(o)) for name, o in operands), *numbers.signature),
        (
            *numbers.constants,
            ("GROUPS", groups),
            ("CHANNELS", each),
            ("EPS", value.attrs["eps"]),
            ("BLOCK_P", max(1, TILE // block_c)),
            ("BLOCK_C", block_c),
            ("PARTS", parts),
        ),
        (
            *(n for n, o in operands if not isinstance(o, Value) or starts_aligned(o, facts)),
            *numbers.aligned,
        ),
        WARPS,
        early=early,
    )
    grid = (plain(sympy.sympify(programs) * parts), 1, 1)
    choice = LaunchChoice(condition(when), unit, grid)
    return LibraryLaunch(choice, tuple(o for _, o in operands), numbers.values)


def _place(rank: int) -> str:
    """Lines that compute the address of ``pixel`` over ``rank`` axes that are not contiguous."""
    lines = ["rest = pixel", "place = tl.zeros((BLOCK_P,), tl.int64)"]
    for axis in reversed(range(rank)):
        size = f"tl.cast(D{axis}, tl.int32)"
        at = f"(rest % {size})" if axis else "rest"
        lines.append(f"place += {at}.to(tl.int64) * X_PIXEL_{axis}")
        lines += [f"rest = rest // {size}"] * (axis > 0)
    return "".join(f"        {line}\n" for line in lines)


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
