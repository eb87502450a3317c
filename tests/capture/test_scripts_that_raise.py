# SPDX-License-Identifier: Apache-2.0
"""A bad input raises, wherever the model was scripted: torch frees what frozen nodes refer to when they raise."""

import gc
from collections.abc import Callable

import pytest
import torch
from saved import loaded
from torch import nn

import blade
from blade.capture.clean import freeze
from blade.graph.torchscript.forget_calls import forget_calls


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 100:
            x = x * 2
        return torch.relu(self.inside(x)) + x


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(16) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).softmax(-1)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "by blade": lambda model: model,
    "by the user": torch.jit.script,
    "traced by the user": lambda model: torch.jit.trace(model, torch.randn(3, 16)),
    "loaded": lambda model: loaded(torch.jit.script(model)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_input_raises(way: str) -> None:
    model = Deep().eval()
    given = WAYS[way](model)
    config = blade.Config(allow_tracing=[]) if way == "by blade" else blade.Config()
    optimized = blade.optimize(given, (torch.randn(3, 16),), config)
    x = torch.randn(5, 16)
    torch.testing.assert_close(optimized(x), model(x))
    del given
    churn = [Deep() for _ in range(50)]  # takes the memory that was freed
    gc.collect()
    for bad in (torch.randn(3, 7), torch.ones(3, 16, dtype=torch.int64)):
        with pytest.raises(RuntimeError):
            optimized(bad)
    assert len(churn) == 50


def hierarchies(module: torch.jit.ScriptModule) -> set[str]:
    nodes = [node for kind in ("aten::linear", "aten::relu", "aten::mul", "prim::RaiseException")
             for node in module.graph.findAllNodes(kind, True)]  # fmt: skip
    assert nodes
    return {node.getModuleHierarchy() for node in nodes}


def test_ops_of_a_frozen_script_refer_to_no_call() -> None:
    script = torch.jit.script(Deep().eval())
    before = str(script.graph)
    assert hierarchies(torch.jit.freeze(script)) != {""}
    frozen = freeze(script, (), constants=True)
    assert hierarchies(frozen) == {""}
    assert str(script.graph) == before
    x = torch.randn(4, 16)
    torch.testing.assert_close(frozen(x), script(x))


def test_written_anew_a_graph_is_the_same() -> None:
    frozen = torch.jit.freeze(torch.jit.script(Deep().eval()))
    before = [(n.kind(), [str(v.type()) for v in n.outputs()]) for n in frozen.graph.nodes()]
    forget_calls(frozen.graph)
    frozen.graph.lint()
    after = [(n.kind(), [str(v.type()) for v in n.outputs()]) for n in frozen.graph.nodes()]
    assert before == after
