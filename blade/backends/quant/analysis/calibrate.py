# SPDX-License-Identifier: Apache-2.0
"""Calibration: ranges, and some rows, of the activations that layers read, over all samples.

    seen = calibrate(gm, layers, samples, "entropy")
    seen.ranges["layer_norm_1"]            # (-3.1, 4.2)
    seen.against["relu_7"]                 # why it cannot be quantized: NaN among its values, or always zero

The cluster's own graph runs, node by node, on every sample; only these statistics are kept.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch.fx import GraphModule, Node

from blade.backends.quant.analysis.layers import Layer
from blade.backends.quant.analysis.observers import Observer, Range, make_observer
from blade.backends.quant.analysis.simulate import Inputs, Simulation
from blade.core.progress import announce, is_watched
from blade.core.reason import Code
from blade.errors import Refused

ROWS = 256  # rows kept per activation, spread over the samples
LONG = 8  # runs from which a progress bar is shown


@dataclass(frozen=True)
class CalibrationStats:
    """Statistics by the name of the activation's node. ``rows`` [n, features] and ``peaks`` [features] (the
    largest magnitudes) exist for activations that products read; features are the last axis."""

    ranges: dict[str, Range] = field(default_factory=dict)
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    peaks: dict[str, torch.Tensor] = field(default_factory=dict)
    against: dict[str, str] = field(default_factory=dict)
    samples: int = 0


def calibrate(
    gm: GraphModule, layers: Sequence[Layer], samples: Iterable[Inputs], method: str
) -> CalibrationStats:
    """Run ``gm`` on all ``samples``, twice for a method that needs histograms.

    Raises ``Refused(CALIBRATION)`` if there is no sample.
    """
    run = _CalibrationRun(gm, layers, method)
    every = list(samples)
    if not every:
        raise Refused(
            Code.CALIBRATION, "There is no sample to calibrate on: give some in `inputs`."
        )
    passes = max((o.passes for o in run.observers.values()), default=1)
    with _progress(passes * len(every)) as advance:
        for number in range(passes):
            for inputs in every:
                run.see(inputs, first=number == 0)
                advance()
            for observer in run.observers.values():
                observer.end_of_pass()
    return run.seen(len(every))


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Report progress to the observer of ``optimize``; without one, draw a bar if ``total`` is large."""
    if is_watched():
        done = iter(range(1, total + 1))
        announce("calibrate", 0, total)
        yield lambda: announce("calibrate", next(done), total)
        return
    console = Console(stderr=True)
    quiet = total < LONG or not console.is_terminal
    with Progress(console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("calibrating", total=total)
        yield lambda: bar.advance(task)


class _CalibrationRun:
    def __init__(self, gm: GraphModule, layers: Sequence[Layer], method: str) -> None:
        self._simulation = Simulation(gm, layers, [])
        self._products = {layer.x.name for layer in layers if layer.kind == "linear"}
        self.observers: dict[str, Observer] = {
            layer.x.name: make_observer(method) for layer in layers
        }
        self._rows: dict[str, list[torch.Tensor]] = {}
        self._peaks: dict[str, torch.Tensor] = {}
        self._against: dict[str, str] = {}
        self._first = True

    def see(self, inputs: Inputs, first: bool) -> None:
        self._first = first
        self._simulation.run(inputs, {}, self._watch)

    def _watch(self, node: Node, made: Any, alive: Any) -> None:
        name = node.name
        if name not in self.observers or name in self._against:
            return
        if not bool(torch.isfinite(made).all()):
            self._against[name] = "it reads a NaN or an infinity in at least one sample"
            return
        made = made.float()
        self.observers[name].see(made)
        if self._first and name in self._products and made.numel():
            rows = made.reshape(-1, made.shape[-1])
            peaks = rows.abs().amax(0)
            known = self._peaks.get(name)
            self._peaks[name] = peaks if known is None else torch.maximum(known, peaks)
            self._rows.setdefault(name, []).append(_some(rows, ROWS).clone())

    def seen(self, samples: int) -> CalibrationStats:
        ranges = {}
        for name, observer in self.observers.items():
            if name in self._against:
                continue
            low, high = observer.range()
            if low > high:
                self._against[name] = "it reads a tensor without elements in every sample"
            elif low == high:
                self._against[name] = f"what it reads is the constant {low:.4g} in every sample"
            else:
                ranges[name] = low, high
        kept = {n: _some(torch.cat(r), ROWS) for n, r in self._rows.items() if n in ranges}
        return CalibrationStats(ranges, kept, self._peaks, self._against, samples)


def _some(rows: torch.Tensor, count: int) -> torch.Tensor:
    """At most ``count`` of ``rows``, evenly spread."""
    if len(rows) <= count:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, count).long()]
