# SPDX-License-Identifier: Apache-2.0
"""Quantization as a backend: calibrate a cluster, quantize its layers to 8 bits, and compile it with DISC.

The backend supports the same nodes as DISC, so that clusters stay whole. Its engines are DISC engines: a
saved file does not need this package, and the fp32 original remains the fallback.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from blade.backends import registry
from blade.backends.quant.device_dtypes import served_names, why_not_device
from blade.config import Config
from blade.core.backend import Backend
from blade.core.cluster import (
    Cluster,
    OpNode,
    device_of,
    values_in,
)
from blade.core.equal_constants import shared
from blade.core.reason import Code, Reason, Stage
from blade.errors import Refused
from blade.report import LayerPrecision
from blade.report.layer_notes import annotated
from blade.runtime.engine import make_engine

GPU_FIXED_S = 5.0  # to compile and time several blocks per product
FIXED_S, NODE_S = 2.0, 0.04  # to compile a few variants
RUNS, MULTIPLICATIONS_PER_S = 30, 5e10  # of the simulation

_COMPILER = "disc"
_LIBRARY = "quantized_decomposed"


class QuantBackend(Backend):
    """Layers in int8 or fp8, chosen by measured speed and accuracy, if the config permits it."""

    name = "quant"
    in_process = True  # like DISC: only our own code could crash
    reduced_precision = True

    @property
    def precisions(self) -> tuple[str, ...]:
        """int8, and fp8 on GPUs that multiply it."""
        if not torch.cuda.is_available():
            return ("int8",)
        return (
            "int8",
            *(n for n in served_names(torch.cuda.get_device_capability()) if n != "int8"),
        )

    @property
    def version(self) -> str | None:
        compiler = registry.load(_COMPILER).version
        return None if compiler is None else f"{compiler} quant 2"

    def why_unavailable(self) -> str | None:
        return registry.available(_COMPILER)

    def why_not(self, node: OpNode, config: Config) -> Reason | None:
        for value in (*values_in((*node.args, *node.kwargs.values())), *node.outputs):
            if value.device is not None and (why := why_not_device(value.device, config)):
                detail = f"{node.target} stays as it is: {why}."
                return Reason(Stage.SUPPORT, Code.UNSUPPORTED_DEVICE, self.name, node.name, detail)
        reason = registry.load(_COMPILER).why_not(node, config)
        return None if reason is None else replace(reason, backend=self.name)

    def estimate_s(self, cluster: Cluster) -> float:
        """Seconds for a few compilations, and for eager float32 runs to measure the layers' errors."""
        from blade.backends.quant.analysis.layers import find_layers
        from blade.backends.quant.search.cpu_plans import multiplications

        if device_of(cluster).type == "cuda":
            return GPU_FIXED_S + NODE_S * len(cluster.gm.graph.nodes)
        work = sum(multiplications(layer) for layer in find_layers(cluster.gm))
        return FIXED_S + NODE_S * len(cluster.gm.graph.nodes) + RUNS * work / MULTIPLICATIONS_PER_S

    def convert(self, cluster: Cluster, config: Config) -> torch.ScriptObject:
        """The engine. Raises ``Refused`` if no layer can be quantized, or none gains from it."""
        # lazy: the import of torch.ao takes a second
        from blade.backends.quant.quantize import quantize

        compiler = registry.load(_COMPILER)
        trials = config.evolve(dump_dir=None)
        engine, layers = quantize(cluster, config, _compile_with(compiler, trials))
        check_is_portable(engine.program())
        return _with_notes(engine, layers, cluster)


def check_is_portable(program: str) -> None:
    """Raises ``Refused`` for a program that calls an op that exists only after torch.ao is imported.

    In a process without that import, a file with such an engine would run its original.
    """
    calls = (line.split()[1] for line in program.splitlines() if line.startswith("call "))
    if missing := sorted({name for name in calls if name.startswith(_LIBRARY)}):
        raise Refused(
            Code.UNSUPPORTED_OP,
            f"DISC has no form for {', '.join(missing)} as it is used here, and a saved file must not need "
            "torch.ao.",
        )


def _compile_with(compiler: Backend, config: Config) -> Callable[[Cluster], Any]:
    return lambda cluster: compiler.convert(cluster, config)


def _with_notes(
    engine: Any, layers: tuple[LayerPrecision, ...], cluster: Cluster
) -> torch.ScriptObject:
    """The same engine with the precision of each layer noted in its program, and with quantized weights that
    engines of other paths hold already.
    """
    _, (name, backend, program, *_), numbers, tensors = engine._get_method("__getstate__")()
    limits = {key: value for key, value in numbers.items() if key != "checksum"}
    payload, *constants = tensors
    given = {t.untyped_storage().data_ptr() for _, t in cluster.gm.named_buffers()}
    held = [c if c.untyped_storage().data_ptr() in given else shared(c) for c in constants]
    return make_engine(name, backend, annotated(program, layers), payload, held, limits)
