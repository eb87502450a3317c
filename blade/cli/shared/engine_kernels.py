# SPDX-License-Identifier: Apache-2.0
"""Time per kernel of the engines in an optimized file, at given samples.

kernels_of(optimized, samples)["cluster_0"][0]      # KernelTime("gemm_f32", 24, (1.3, 9.8))
"""

from collections.abc import Sequence
from typing import Any

import torch

from blade.graph.torchscript.observe_values import observe_tensors
from blade.graph.torchscript.program import read
from blade.report import ENGINES, KernelTime
from blade.selection.kernel_times import kernel_times


def kernels_of(
    optimized: torch.jit.ScriptModule, samples: Sequence[tuple[Any, ...]]
) -> dict[str, tuple[KernelTime, ...]]:
    """Return the kernels of each engine of DISC, by cluster, the longest first.

    A cluster that a sample does not reach has none at that sample; in a loop its first call counts.
    """
    program = read(optimized.graph)
    calls: dict[str, Any] = {}
    for line in program.lines:
        if line.node.kind() == "prim::CallMethod" and line.node.s("name") == "forward":
            held = line.node.inputsAt(0).node()
            if held.kind() == "prim::GetAttr" and hasattr(optimized, held.s("name")):
                calls[held.s("name")] = line
    found: dict[str, tuple[KernelTime, ...]] = {}
    wanted = {line.index: [(value, True) for value in line.inputs[1:]] for line in calls.values()}
    runs = [observe_tensors(program, optimized, sample, wanted) for sample in samples]
    for name, line in calls.items():
        keys = [(line.index, value) for value, _ in wanted[line.index]]
        reached = [seen for seen in runs if all(seen.get(key) for key in keys)]
        inputs = [tuple(seen[key][0] for key in keys) for seen in reached]
        engine = getattr(getattr(optimized, name), ENGINES[0], None)
        times = kernel_times(engine, inputs) if inputs and engine is not None else ()
        if times:
            found[name] = times
    return found
