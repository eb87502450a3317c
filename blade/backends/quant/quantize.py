# SPDX-License-Identifier: Apache-2.0
"""Quantization of one cluster: prepare, plan, choose. A model's own Q/DQ or fake-quantize ops are kept."""

from typing import Any

from blade.backends.quant.device_dtypes import check_kind, device_dtypes
from blade.backends.quant.prepare import prepare
from blade.backends.quant.search.choose import Compile, choose
from blade.backends.quant.search.cpu_plans import make_plans
from blade.backends.quant.search.gpu_plans import make_gpu_plans
from blade.backends.quant.transforms.accept_quantized import accept, given_layers
from blade.config import Config
from blade.core.cluster import Cluster, device_of
from blade.report import LayerPrecision


def quantize(
    cluster: Cluster, config: Config, compile_: Compile
) -> tuple[Any, tuple[LayerPrecision, ...]]:
    """The result of ``compile_`` for the quantized cluster, and the precision of each layer.

    Raises ``Refused`` if no layer can be quantized, there is no sample, no layer keeps the budget, or none is
    faster.
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
        make_gpu_plans(prepared, config, device_dtypes(device, config))
        if on_gpu
        else make_plans(prepared, config)
    )
    chosen = choose(cluster, prepared, plans, config, compile_)
    return chosen.engine, chosen.layers
