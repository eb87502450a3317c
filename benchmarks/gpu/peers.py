# SPDX-License-Identifier: Apache-2.0
"""What blade is measured against on a GPU: one function each, which makes the function that is called.

    run = PEERS["reduce_overhead"](model, [sample, ...])
    run(*sample)                                        # a tuple of tensors

``model`` and samples are on the device already. Every peer serves every shape of the model.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from zoo.model import Model, Tensors

Run = Callable[..., Tensors]
Prepare = Callable[[Model, Sequence[Tensors]], Run]


def eager(model: Model, samples: Sequence[Tensors]) -> Run:
    return model.module


def torchscript(model: Model, samples: Sequence[Tensors]) -> Run:
    """Traced and frozen; the fuser specializes on the first calls of each shape."""
    traced = torch.jit.trace(model.module, samples[0], check_trace=False, strict=False)
    return torch.jit.freeze(traced)


def inductor(model: Model, samples: Sequence[Tensors]) -> Run:
    """torch.compile with dynamic shapes."""
    return torch.compile(model.module, dynamic=True)


def inductor_static(model: Model, samples: Sequence[Tensors]) -> Run:
    """torch.compile, compiled anew for every shape."""
    torch._dynamo.config.recompile_limit = 512
    return torch.compile(model.module, dynamic=False)


def reduce_overhead(model: Model, samples: Sequence[Tensors]) -> Run:
    """torch.compile with dynamic shapes and its CUDA graphs, one per shape."""
    return _in_steps(torch.compile(model.module, dynamic=True, mode="reduce-overhead"))


def reduce_overhead_static(model: Model, samples: Sequence[Tensors]) -> Run:
    """The same compiled anew for every shape: its fastest code, and its slowest start."""
    torch._dynamo.config.recompile_limit = 512
    return _in_steps(torch.compile(model.module, dynamic=False, mode="reduce-overhead"))


def _in_steps(compiled: Run) -> Run:
    def run(*inputs: torch.Tensor) -> Tensors:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*inputs)

    return run


def inductor_graph(model: Model, samples: Sequence[Tensors]) -> Run:
    """torch.compile with dynamic shapes, captured by hand: a CUDA graph per shape, inputs copied into it."""
    compiled = torch.compile(model.module, dynamic=True)
    graphs: dict[tuple[torch.Size, ...], Callable[[Tensors], Tensors]] = {}

    def run(*inputs: torch.Tensor) -> Tensors:
        key = tuple(t.shape for t in inputs)
        if key not in graphs:
            graphs[key] = _captured(compiled, inputs)
        return graphs[key](inputs)

    return run


def _captured(run: Run, inputs: Tensors) -> Callable[[Tensors], Tensors]:
    static = tuple(t.clone() for t in inputs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(*static)

    def replay(given: Tensors) -> Tensors:
        for into, tensor in zip(static, given, strict=True):
            into.copy_(tensor)
        graph.replay()
        return outputs

    return replay


def blade(model: Model, samples: Sequence[Tensors]) -> Run:
    """DISC, whose engine keeps a CUDA graph per shape."""
    return _optimized(model, samples)


def blade_launches(model: Model, samples: Sequence[Tensors]) -> Run:
    """DISC without CUDA graphs: every kernel launched by its executor."""
    return _optimized(model, samples, cuda_graphs=False)


def blade_static_outputs(model: Model, samples: Sequence[Tensors]) -> Run:
    """DISC whose later calls may overwrite what earlier ones returned, as reduce-overhead's do."""
    return _optimized(model, samples, reuse_output_buffers=True)


def _optimized(model: Model, samples: Sequence[Tensors], **fields: Any) -> Run:
    import blade

    if not torch.cuda.is_available():
        fields = {}  # a trial of this script: those fields are about GPUs
    config = blade.Config(
        optimization_pipeline="DISC",
        min_cluster_size=1,
        dynamic_shapes=model.declared or None,
        **fields,
    )
    return blade.optimize(model.module, list(samples), config)


def served(run: Any) -> dict[str, Any]:
    """Who answers inside of what ``_optimized`` made; empty for other peers."""
    import blade

    try:
        report = blade.report(run)
    except blade.InputError:
        return {}
    counters = list(blade.stats(run).values())
    return {
        "clusters": [f"{c.backend}: {sum(c.ops.values())} ops" for c in report.clusters],
        "engine_runs": sum(c.get("engine_runs", 0) for c in counters),
        "counters": counters,
        "seconds": dict(report.seconds),
        "reasons": reasons(report.all_reasons()),
    }


def reasons(given: Iterable[Any]) -> list[str]:
    """The first few different ones; of long ones both ends, as shapes of all inputs come between."""
    texts = dict.fromkeys(f"{r.code.value}: {_short(r.detail)}" for r in given)
    return list(texts)[:16]


def _short(text: str) -> str:
    return text if len(text) <= 360 else f"{text[:100]} ... {text[-250:]}"


PEERS: dict[str, Prepare] = {
    "blade": blade,
    "blade_launches": blade_launches,
    "blade_static_outputs": blade_static_outputs,
    "eager": eager,
    "torchscript": torchscript,
    "inductor": inductor,
    "inductor_static": inductor_static,
    "inductor_graph": inductor_graph,
    "reduce_overhead": reduce_overhead,
    "reduce_overhead_static": reduce_overhead_static,
}
