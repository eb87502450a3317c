# SPDX-License-Identifier: Apache-2.0
"""One cluster quantized: prepare, plan, choose. A cluster that says itself how to quantize is taken at its word."""

from typing import Any

from blade.backends.base import Cluster
from blade.backends.quant.choose import Compile, choose
from blade.backends.quant.existing import accept, given_layers
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
    prepared = prepare(cluster, config)
    chosen = choose(cluster, prepared, make_plans(prepared, config), config, compile_)
    return chosen.engine, chosen.layers
