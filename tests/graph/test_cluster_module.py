# SPDX-License-Identifier: Apache-2.0
"""A cluster's module: the engine's answer where there is one, else the original's, in any arity."""

import io
from typing import Any

import pytest
import torch
from cutting import cut, trace

from blade.errors import BackendError
from blade.fallback.cluster_module import cluster_module
from blade.graph.torchscript.extract import Extracted
from blade.graph.torchscript.splice import splice

pytestmark = pytest.mark.needs("runtime")


class _Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(256, 256)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.relu(self.linear(x))
        return z + y, z * y


_PROGRAM = """blade.disc 1
isa
inputs 2
input 0 f32 cpu 2
input 1 f32 cpu 2
registers 0
guards 0
slots 0
instructions 0
outputs 0
end
"""
"""Guards only: two float matrices. What runs is the function behind the engine."""


def _engine(extracted: Extracted, name: str) -> Any:
    """An engine that interprets the cluster's FX graph and marks its answers by adding 1."""
    from blade.runtime.engine import make_engine, register_runner

    def load(*_: Any) -> Any:
        return lambda inputs: [out + 1 for out in extracted.cluster.gm(*inputs)]

    register_runner(name, load)
    constants = list(extracted.fallback.buffers())
    return make_engine("cluster_0", name, _PROGRAM, b"", constants)


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_engine_answers_and_when_disabled_the_original_does(outputs: int) -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (torch.relu(x) + y, x * y)[:outputs] if outputs > 1 else torch.relu(x) + y

    captured = trace(model, (torch.randn(2, 3), torch.randn(2, 3)))
    [extracted] = cut(captured)
    engine = _engine(extracted, f"test_marked_{outputs}")
    module = cluster_module(extracted, engine)
    x = extracted.cluster.samples[0]
    expected = extracted.fallback(*x)
    first = (lambda answer: answer[0]) if outputs > 1 else (lambda answer: answer)
    torch.testing.assert_close(first(module(*x)), first(expected) + 1)
    module.engine.set_enabled(False)
    torch.testing.assert_close(first(module(*x)), first(expected))
    assert "(engine).try_execute([x0, x1], )" in module.code


def test_engine_and_original_share_their_weights_in_the_file_and_after_loading() -> None:
    captured = trace(_Two(), (torch.randn(2, 256), torch.randn(2, 256)))
    [extracted] = cut(captured)
    optimized = splice(captured, [(extracted, cluster_module(extracted, _engine(extracted, "t3")))])
    buffer = io.BytesIO()
    torch.jit.save(optimized, buffer)
    weights = 256 * 257 * 4
    assert weights < len(buffer.getvalue()) < 1.3 * weights
    loaded = torch.jit.load(io.BytesIO(buffer.getvalue()))
    x, y = torch.randn(5, 256), torch.randn(5, 256)
    for answer, expected in zip(loaded(x, y), captured.module(x, y), strict=True):
        torch.testing.assert_close(answer, expected + 1)


def test_a_missing_backend_runs_the_original() -> None:
    from blade.runtime.engine import make_engine, register_runner

    captured = trace(_Two(), (torch.randn(2, 256), torch.randn(2, 256)))
    [extracted] = cut(captured)

    def load(*_: Any) -> Any:
        raise BackendError("not on this machine")

    register_runner("test_missing", load)
    engine = make_engine(
        "cluster_0", "test_missing", _PROGRAM, b"", list(extracted.fallback.buffers())
    )
    optimized = splice(captured, [(extracted, cluster_module(extracted, engine))])
    assert "not on this machine" in engine.why_unavailable()
    x, y = torch.randn(5, 256), torch.randn(5, 256)
    for answer, expected in zip(optimized(x, y), captured.module(x, y), strict=True):
        torch.testing.assert_close(answer, expected)
