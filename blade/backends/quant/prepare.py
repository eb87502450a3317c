# SPDX-License-Identifier: Apache-2.0
"""Preparation of a cluster: find its layers, move scales where that is exact and helps, calibrate.

prepared = prepare(cluster, config)
"""

import logging
from collections.abc import Sequence
from itertools import chain, islice
from time import perf_counter

import torch
from torch.fx import GraphModule

from blade.backends.quant.analysis.calibrate import calibrate
from blade.backends.quant.analysis.layers import FLOATS, Layer, find_layers
from blade.backends.quant.analysis.simulate import Inputs, Simulation
from blade.backends.quant.search.cpu_plans import PreparedCluster
from blade.backends.quant.transforms.equalize import equalize
from blade.backends.quant.transforms.smoothquant import smoothquant
from blade.config import Config
from blade.core.cluster import Cluster
from blade.core.reason import Code
from blade.errors import Refused

log = logging.getLogger(__name__)
JUDGED = 8  # samples on which the search measures accuracy, at most
JUDGED_S = 0.5  # limit for one run over them; one sample per shape is always included


def prepare(cluster: Cluster, config: Config, on_gpu: bool = False) -> PreparedCluster:
    """Raises ``Refused`` if there is no layer to quantize, no sample, or no layer that can be calibrated."""
    gm = cluster.gm
    layers = _layers(gm, on_gpu)
    if not layers:
        what = "no product of an" if on_gpu else "no product and no convolution of a float32"
        raise Refused(
            Code.UNSUPPORTED_OP,
            f"It has no layer to quantize: {what} activation with a constant weight of its dtype.",
        )
    every = list(islice(chain(cluster.samples, cluster.calibration), config.calibration_samples))
    method = config.calibration_method if config.quantization_type != "dynamic" else "min_max"
    if any(layer.kind == "conv" for layer in layers):
        gm, pairs = equalize(gm, layers)
        layers = find_layers(gm)
        log.info("%s: %d pairs of convolutions equalized", cluster.name, pairs)
    seen = calibrate(gm, layers, every, method)
    if len(seen.against) == len({layer.x.name for layer in layers}):
        name, why = next(iter(seen.against.items()))
        raise Refused(
            Code.CALIBRATION,
            f"None of its {len(layers)} layers can be calibrated on {len(every)} sample(s): {why} ({name}).",
        )
    floats = all(layer.weight.dtype == torch.float32 for layer in layers)
    if config.quantization_type != "weight_only" and floats:
        smoothed, moved = smoothquant(gm, layers, seen, config.quantization_type != "static")
        if moved:
            gm, layers = smoothed, _layers(smoothed, on_gpu)
            seen = calibrate(gm, layers, every, method)
            log.info("%s: scales moved at %s", cluster.name, ", ".join(moved))
    judged, wanted = _judged(cluster, every)
    return PreparedCluster(gm, tuple(layers), seen, Simulation(gm, layers, judged, wanted))


def _layers(gm: GraphModule, on_gpu: bool) -> list[Layer]:
    """The layers to quantize; on GPUs only products, also of models in halves."""
    if not on_gpu:
        return find_layers(gm)
    return [layer for layer in find_layers(gm, FLOATS) if layer.kind == "linear"]


def _judged(
    cluster: Cluster, samples: Sequence[Inputs]
) -> tuple[Sequence[Inputs], Sequence[Inputs]]:
    """The first sample of every shape, then others while that is quick, up to ``JUDGED``; their outputs."""
    first: dict[tuple[torch.Size, ...], Inputs] = {}
    for inputs in samples:
        first.setdefault(tuple(t.shape for t in inputs), inputs)
    known = {id(inputs) for inputs in first.values()}
    rest = [inputs for inputs in samples if id(inputs) not in known]
    original, start = Simulation(cluster.gm, [], []), perf_counter()
    wanted: list[Inputs] = []
    ordered = [*first.values(), *rest][:JUDGED]
    for i, inputs in enumerate(ordered):
        if i >= len(first) and perf_counter() - start > JUDGED_S:
            break
        wanted.append(original.run(inputs, {}))
    return ordered[: len(wanted)], wanted
