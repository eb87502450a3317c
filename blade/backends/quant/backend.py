# SPDX-License-Identifier: Apache-2.0
"""Quantization as a backend: a cluster is calibrated, its layers put into 8 bits, and DISC compiles it.

It takes the nodes DISC takes, so that clusters stay whole. Its engines are DISC's: a saved file needs
nothing of this package, and the fp32 original stays behind them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from blade.backends import registry
from blade.backends.base import Backend, Cluster, OpNode, device_of, values_in
from blade.backends.quant.forms import served, why_not_device
from blade.config import Config
from blade.errors import Refused
from blade.precision import annotated
from blade.reason import Code, Reason, Stage
from blade.report import LayerPrecision
from blade.runtime.engine import make_engine

GPU_FIXED_S = 5.0  # of compiling and measuring several blocks for each product
FIXED_S, NODE_S = 2.0, 0.04  # of compiling a handful of variants
RUNS, MULTIPLICATIONS_PER_S = 30, 5e10  # of simulating

_COMPILER = "disc"
_LIBRARY = "quantized_decomposed"


class QuantBackend:
    """Layers in int8 or fp8 chosen by measured speed and measured accuracy; only where the config permits it."""

    name = "quant"
    in_process = True  # like DISC: what could crash is ours
    lossy = True

    @property
    def precisions(self) -> tuple[str, ...]:
        """Floats of 8 bits are for GPUs that multiply them."""
        if not torch.cuda.is_available():
            return ("int8",)
        return ("int8", *(n for n in served(torch.cuda.get_device_capability()) if n != "int8"))

    @property
    def version(self) -> str | None:
        compiler = getattr(registry.load(_COMPILER), "version", None)
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
        """A few compilations, and runs of the cluster in eager float32 to see what layers cost."""
        from blade.backends.quant.layers import find_layers
        from blade.backends.quant.plans import multiplications

        if device_of(cluster).type == "cuda":
            return GPU_FIXED_S + NODE_S * len(cluster.gm.graph.nodes)
        work = sum(multiplications(layer) for layer in find_layers(cluster.gm))
        return FIXED_S + NODE_S * len(cluster.gm.graph.nodes) + RUNS * work / MULTIPLICATIONS_PER_S

    def convert(self, cluster: Cluster, config: Config) -> torch.ScriptObject:
        """Raises ``Refused`` where no layer can be quantized, or none should be."""
        # torch.ao takes a second to import: not before something is to be quantized
        from blade.backends.quant.quantize import quantize

        compiler = registry.load(_COMPILER)
        trials = config.evolve(dump_dir=None)
        engine, layers = quantize(cluster, config, _compile_with(compiler, trials))
        check_is_portable(engine.program())
        return _with_notes(engine, layers)


def check_is_portable(program: str) -> None:
    """Raises ``Refused`` for a program that calls an op that exists only once torch.ao is imported.

    A file with such an engine would run its original wherever nobody imports that.
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


def _with_notes(engine: Any, layers: tuple[LayerPrecision, ...]) -> torch.ScriptObject:
    """The same engine, whose program says what was decided of each layer."""
    _, (name, backend, program), numbers, tensors = engine._get_method("__getstate__")()
    limits = {key: value for key, value in numbers.items() if key != "checksum"}
    payload, *constants = tensors
    return make_engine(name, backend, annotated(program, layers), payload, constants, limits)
