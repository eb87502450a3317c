# SPDX-License-Identifier: Apache-2.0
"""Packing of computed convolution weights (as in training) into panels, before each call.

    conv_f32_panels(ptrs = w, packed; ints = SIZES), units = groups x panels
    winograd_f32_panels(ptrs = w, packed; ints = WINOGRAD_SIZES), units = panels

The layout is that of conv_f32_pack and winograd_f32_pack, which run per constant and output channel; these
run per panel, one vector of output channels at a time. Strides may be negative: a gradient reverses the taps.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from blade.backends.disc.cpu.conv.winograd import PLACES, transform_weights
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirRoutine
from blade.backends.disc.target.cpu import CpuTarget

NAME = "conv_f32_panels"
WINOGRAD = "winograd_f32_panels"
SIZES = "o offset depth taps_d taps_h taps_w step_o step_c step_d step_h step_w groups".split()
WINOGRAD_SIZES = "offset c step_o step_c step_h step_w".split()

Gather = Callable[[SsaValue], SsaValue]
"""Loads the weights of a panel's output channels at one position of depth and taps."""


@functools.cache
def panels_text(target: CpuTarget) -> str:
    """MLIR of ``conv_f32_panels``. Lanes beyond a group's last output channel repeat that channel."""
    f = MlirRoutine(NAME, lanes=target.lanes)
    w, packed = f.unpack(f["ptrs"], ("w", "packed"), POINTER).values()
    size = f.unpack(f["ints"], SIZES, "i64")
    columns = f.over(size["o"], size["groups"])
    panels = f.above(columns, target.lanes)
    taps = f.product(size["taps_d"], size["taps_h"], size["taps_w"])
    length = f.product(taps, size["depth"], target.lanes)
    with f.range(f["begin"], f["end"]) as unit:
        first = f.product(f.rest(unit, panels), target.lanes)
        column = f.sum(f.product(f.over(unit, panels), columns), first)
        source = f.at(f.at(w, size["offset"]), f.product(column, size["step_o"]))
        weights = _gather(f, source, size["step_o"], f.minus(columns, first), target.lanes)
        to = f.at(packed, f.product(unit, length))
        with taps_of(f, size) as (tap, start):
            row = f.at(to, f.product(tap, size["depth"], target.lanes))
            with f.range(0, size["depth"]) as k:
                place = f.sum(start, f.product(k, size["step_c"]))
                f.put(weights(place), row, f.product(k, target.lanes))
    return f.text(internal=False)


@functools.cache
def winograd_panels_text(target: CpuTarget) -> str:
    """MLIR of ``winograd_f32_panels``; output channels are a multiple of the lanes."""
    lanes = target.lanes
    f = MlirRoutine(WINOGRAD, lanes=lanes)
    w, packed = f.unpack(f["ptrs"], ("w", "packed"), POINTER).values()
    size = f.unpack(f["ints"], WINOGRAD_SIZES, "i64")
    plane = f.product(size["c"], lanes)
    with f.range(f["begin"], f["end"]) as panel:
        column = f.product(panel, lanes)
        source = f.at(f.at(w, size["offset"]), f.product(column, size["step_o"]))
        weights = _gather(f, source, size["step_o"], f.whole(lanes), lanes)
        to = f.at(packed, f.product(panel, plane, PLACES))
        with f.range(0, size["c"]) as k:
            start = f.product(k, size["step_c"])
            taps = [
                [
                    f.convert(
                        "arith.extf",
                        weights(
                            f.sum(start, f.product(size["step_h"], y), f.product(size["step_w"], x))
                        ),
                        "f64",
                    )
                    for x in range(3)
                ]
                for y in range(3)
            ]
            for at, value in enumerate(transform_weights(f, taps)):
                place = f.sum(f.product(plane, at), f.product(k, lanes))
                f.put(f.convert("arith.truncf", value, "f32"), to, place)
    return f.text(internal=False)


@contextmanager
def taps_of(f: MlirRoutine, size: Mapping[str, SsaValue]) -> Iterator[tuple[SsaValue, SsaValue]]:
    """A loop over a kernel's taps: each tap's number and the offset of its weights, in elements."""
    with (
        f.range(0, size["taps_d"]) as a,
        f.range(0, size["taps_h"]) as b,
        f.range(0, size["taps_w"]) as c,
    ):
        steps = zip((a, b, c), "dhw", strict=True)
        start = f.sum(*(f.product(t, size[f"step_{axis}"]) for t, axis in steps))
        tap = f.sum(f.product(f.sum(f.product(a, size["taps_h"]), b), size["taps_w"]), c)
        yield tap, start


def _gather(
    f: MlirRoutine, source: SsaValue, step: SsaValue, count: SsaValue, lanes: int
) -> Gather:
    """Elements ``step`` apart, starting at ``source``; those from ``count`` on repeat the last one."""
    last = f.minus(count, 1)
    starts = [f.at(source, f.product(f.least(j, last), step)) for j in range(lanes)]
    return lambda place: f.from_lanes([f.get(start, place) for start in starts])
