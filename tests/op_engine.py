# SPDX-License-Identifier: Apache-2.0
"""An op sample compiled once by DISC, for any target, and its engine's answers at many shapes against eager.

graph, wrong = check(sample, host())                              # the CPU
graph, wrong = check(sample, target_of(device), "cuda")
"""

from typing import Any

import torch
from op_compare import different, eager, exact, sizes_of
from op_models import placed
from op_samples import Sample, inputs
from op_trace import trace

from blade.backends.disc.compiler import compile_graph
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.ir.graph import Graph
from blade.backends.disc.reference.interpret_graph import interpret
from blade.core.disk_cache import open_cache
from blade.runtime.engine import make_engine

SPECIAL = {"a": 11, "b": 13, "c": 3, "d": 2}


def check(sample: Sample, target: Any, device: str = "cpu") -> tuple[Graph, list[str]]:
    """The graph as the CPU's lowering has it, and a line per shape at which the answer is not eager's.

    Where eager raises, the engine gives no answer.
    """
    sizes = list(sizes_of(sample))
    first = placed(inputs(sample, sizes[0]), device)
    with torch.device(device):  # tensors that a sample makes
        gm, shape_env = trace(sample.function, first, [s.dynamic() for s in sample.specs])
    graph = lower(gm, shape_env)
    cache = open_cache(device != "cpu")  # of this run: kernels of a GPU take seconds
    compiled = compile_graph(gm, shape_env, target, cache=cache)
    engine: Any = make_engine(
        sample.name, "disc", compiled.program, compiled.object, list(compiled.constants), {}
    )
    assert not engine.why_unavailable(), engine.why_unavailable()
    wrong = []
    runs = [(s, False) for s in sizes]
    runs += [({**SPECIAL, **s}, True) for s in [sample.sizes or {}] if sample.special]
    for size, special in runs:
        tensors = inputs(sample, size, special)
        if device != "cpu" and (eager(sample, tensors) is None or _ends_contexts(sample, tensors)):
            continue  # an index out of range, for one: neither side may be asked
        there = placed(tensors, device)
        with torch.device(device):
            want = eager(sample, there)
        got = engine.try_execute(there)
        engine.rearm()
        if got is None:
            text = engine.last_error() or str(engine.stats())
            expected = want is None or min(size.values(), default=2) <= sample.refuses
            text = "" if expected else f"no answer: {text[:300]}"
        elif want is None and device == "cpu":
            text = "answers where eager raises"
        else:
            want = (
                want or eager(sample, tensors) or []
            )  # where torch's kernels raise on this device alone
            got, want, ideal = placed(got, "cpu"), placed(want, "cpu"), exact(sample, tensors)
            fused = float(sample.fused(*tensors)) if sample.fused and tensors[0].numel() else 0.0
            text = different(got, want, ideal, fused)
            # what the interpreter is right about holds for every target
            reference = different(interpret(graph, tensors), want, ideal) if device == "cpu" else ""
            text += f" | interpreter: {reference}" if reference else ""
        if text:
            wrong.append(f"{size}{' special' * special}: {text}")
    return graph, wrong


def _ends_contexts(sample: Sample, tensors: list[torch.Tensor]) -> bool:
    """torch 2.11's kernel reads beyond gradients of no width (a sanitizer's word)."""
    return sample.name == "embedding_dense_backward" and not tensors[0].shape[-1]
