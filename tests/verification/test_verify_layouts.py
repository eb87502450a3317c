# SPDX-License-Identifier: Apache-2.0
"""verify: in which order of their axes results may lie in memory."""

from dataclasses import replace
from typing import Any

import torch
from fake_backends import PythonEngine
from torch.fx import symbolic_trace
from verified import cluster, run

from blade.core.reason import Reason
from blade.report import Verdict
from blade.verification.verify import verify

aten = torch.ops.aten


class _Images(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (aten.relu.default(x),)


RNG = torch.Generator().manual_seed(0)
LAST = [torch.randn(n, 6, 5, 3, generator=RNG).permute(0, 3, 1, 2) for n in (4, 3)]
IMAGES = cluster(_Images(), LAST[:1], LAST[1:])


def channels_first(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
    return [t.contiguous() for t in outputs]


def test_at_other_sizes_results_may_lie_as_at_the_sample() -> None:
    """Torch chooses another layout at size 1, where the engine has the sample's; or the other way round."""
    first = symbolic_trace(_Images())

    def original(x: torch.Tensor) -> tuple[torch.Tensor]:
        (y,) = first(x)
        return (y.contiguous() if x.shape[0] == 1 else y,)

    assert isinstance(verify(IMAGES, PythonEngine(IMAGES.gm), original, "fake"), Verdict)  # type: ignore[arg-type]

    def at_the_probe(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
        return channels_first(outputs, inputs, call) if inputs[0].shape[0] == 3 else outputs

    reason = run(IMAGES, run=at_the_probe)
    assert isinstance(reason, Reason) and reason.detail.startswith("at probe 0 (")
    assert "output 0 has stride" in reason.detail


def test_at_another_sample_results_may_lie_as_at_the_first() -> None:
    first = symbolic_trace(_Images())
    of = cluster(_Images(), LAST)

    def original(x: torch.Tensor) -> tuple[torch.Tensor]:
        (y,) = first(x)
        return (y.contiguous() if x.shape[0] == 3 else y,)

    assert isinstance(verify(of, PythonEngine(of.gm), original, "fake"), Verdict)  # type: ignore[arg-type]
    reason = run(of, run=channels_first)
    assert isinstance(reason, Reason) and reason.detail.startswith("at sample 0 (")


def test_at_the_sample_results_lie_as_the_original_s() -> None:
    reason = run(IMAGES, run=channels_first)
    assert isinstance(reason, Reason) and reason.detail.startswith("at sample 0 (")
    assert "output 0 has stride" in reason.detail


def test_results_may_lie_as_the_graph_around_a_cluster_was_traced() -> None:
    gm = symbolic_trace(_Images())
    [output] = gm.graph.find_nodes(op="output")
    [result] = output.args[0]
    result.meta["val"] = torch.empty(LAST[0].shape, device="meta")  # the shape function's layout
    of = cluster(gm, LAST[:1], LAST[1:])
    reason = run(of, run=channels_first)
    assert isinstance(reason, Reason) and "output 0 has stride" in reason.detail
    traced = replace(of, traced=True)
    assert isinstance(run(traced, run=channels_first), Verdict)
    assert isinstance(run(traced), Verdict)  # it lies as the original's

    def neither(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
        return [t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for t in outputs]

    assert isinstance(run(traced, run=neither), Reason)
