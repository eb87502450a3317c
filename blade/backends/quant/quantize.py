# SPDX-License-Identifier: Apache-2.0
"""One cluster quantized: prepare, plan, choose. A cluster that says itself how to quantize is taken at its word."""

from typing import Any

from blade.backends.base import Cluster, device_of
from blade.backends.quant.choose import Compile, choose
from blade.backends.quant.existing import accept, given_layers
from blade.backends.quant.forms import check_kind, forms_of
from blade.backends.quant.gpu_plans import make_gpu_plans
from blade.backends.quant.plans import make_plans
from blade.backends.quant.prepare import prepare
from blade.config import Config
from blade.report import LayerPrecision


def quantize(
    cluster: Cluster, config: Config, compile_: Compile
) -> tuple[Any, tuple[LayerPrecision, ...]]:
    """What ``compile_`` makes of the quantized cluster, and what was decided of each layer.

    Raises ``Refused`` where no layer can be quantized, no sample shows how, the budget leaves none, or none
    is faster.
    """
    accepted = accept(cluster)
    if accepted is not None:
        return compile_(accepted), given_layers(accepted.gm)
    device = device_of(cluster)
    on_gpu = device.type == "cuda"
    if on_gpu:
        check_kind(config)
    prepared = prepare(cluster, config, on_gpu)
    plans = (
        make_gpu_plans(prepared, config, forms_of(device, config))
        if on_gpu
        else make_plans(prepared, config)
    )
    chosen = choose(cluster, prepared, plans, config, compile_)
    return chosen.engine, chosen.layers
