# SPDX-License-Identifier: Apache-2.0
"""Every sample of the op table, compiled once and run at many shapes, against eager torch.

Where eager raises, the engine gives no answer.
"""

from typing import Any

import pytest
from op_compare import different, eager, exact, sizes_of
from op_samples import Sample, inputs
from op_table import EVERY
from op_trace import ops_of, trace

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.cpu.target import host
from blade.backends.disc.interpret_ir import interpret
from blade.backends.disc.ir import Graph
from blade.backends.disc.lower import lower
from blade.backends.disc.ops.table import TABLE
from blade.runtime.engine import make_engine

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]

SPECIAL = {"a": 11, "b": 13, "c": 3, "d": 2}


def check(sample: Sample) -> tuple[Graph, list[str]]:
    sizes = list(sizes_of(sample))
    first = inputs(sample, sizes[0])
    gm, shape_env = trace(sample.function, first, [s.dynamic() for s in sample.specs])
    graph = lower(gm, shape_env)
    compiled = compile_ir(graph, host())
    engine = make_engine(
        sample.name, "disc", compiled.program, compiled.object, list(compiled.constants), {}
    )
    assert not engine.why_unavailable(), engine.why_unavailable()
    wrong = []
    runs = [(s, False) for s in sizes]
    runs += [({**SPECIAL, **s}, True) for s in [sample.sizes or {}] if sample.special]
    for size, special in runs:
        tensors = inputs(sample, size, special)
        want = eager(sample, tensors)
        got = engine.try_execute(tensors)
        engine.rearm()
        if got is None:
            text = engine.last_error() or str(engine.stats())
            expected = want is None or min(size.values(), default=2) <= sample.refuses
            text = "" if expected else f"no answer: {text[:300]}"
        elif want is None:
            text = "answers where eager raises"
        else:
            ideal = exact(sample, tensors)
            text = different(got, want, ideal)
            reference = different(interpret(graph, tensors), want, ideal)
            text += f" | interpreter: {reference}" if reference else ""
        if text:
            wrong.append(f"{size}{' special' * special}: {text}")
    return graph, wrong


@pytest.mark.parametrize("sample", EVERY, ids=lambda s: s.name)
def test_answers_are_eagers(sample: Sample) -> None:
    graph, wrong = check(sample)
    assert not wrong, "\n".join(wrong)
    calls = [v for v in graph.values if v.op == "call"]
    assert sample.called == bool(calls), "\n".join(map(str, calls)) or graph


def test_every_row_has_a_sample() -> None:
    seen: set[Any] = set()
    for sample in EVERY:
        seen |= ops_of(sample.function, inputs(sample, next(sizes_of(sample))))
    assert sorted(map(str, set(TABLE) - seen)) == []
