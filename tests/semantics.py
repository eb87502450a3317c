# SPDX-License-Identifier: Apache-2.0
"""Take a model through an entrance of blade and compare it with the user's own, call by call.

What is compared: what it returns, what it raises, what it did to its inputs, which tensors share
memory.
"""

import copy
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

import blade
from blade.dynamo.live_graphs import live_graphs

SCRIPT: tuple[str, ...] = ()
"""For ``allow_tracing``: nothing is traced."""


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (made * 3).to(dtype) if dtype is not torch.bool else made > 0


def optimized(model: nn.Module, inputs: Any, **fields: Any) -> torch.jit.ScriptModule:
    """``model`` optimized without measuring, strictly, saved and loaded."""
    config = blade.Config(**{"timing": False, "min_cluster_size": 1, "strict": True, **fields})
    made = blade.optimize(model.eval(), copy.deepcopy(inputs), config)
    buffer = io.BytesIO()
    torch.jit.save(made, buffer)
    return torch.jit.load(io.BytesIO(buffer.getvalue()))


class Outcome(NamedTuple):
    answer: Any
    error: str | None
    inputs: Any
    shares: list[tuple[int, int]]  # which of the tensors in inputs and answer share memory


def outcome(module: Callable[..., Any], inputs: Sequence[Any], grad: bool = False) -> Outcome:
    own = copy.deepcopy(tuple(inputs))
    answer, error = None, None
    torch.manual_seed(7)
    with torch.set_grad_enabled(grad):
        try:
            answer = module(*own)
        except Exception as raised:
            error = _message(raised)
    tensors = [t for t in pytree.tree_leaves((own, answer)) if isinstance(t, torch.Tensor)]
    keys = [t.untyped_storage().data_ptr() for t in tensors]
    shares = [
        (i, j) for j in range(len(keys)) for i in range(j) if keys[i] == keys[j] and keys[i] != 0
    ]
    return Outcome(answer, error, own, shares)


def _message(raised: Exception) -> str:
    """What the model said: TorchScript puts a traceback before it, pytest an explanation behind."""
    lines = str(raised).strip().split("\n")
    return lines[-1].rpartition("Error: ")[2] if "TorchScript" in lines[0] else lines[0]


def assert_same(got: Any, want: Any) -> None:
    """Equal in type, structure and value; tensors in dtype, shape and closely in value."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(want.dtype, 1e-5)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert got.requires_grad == want.requires_grad
    elif isinstance(want, Mapping):
        assert isinstance(got, Mapping) and list(got) == list(want)
        for key, value in want.items():
            assert_same(got[key], value)
    elif isinstance(want, tuple | list):
        assert isinstance(got, tuple | list) and len(got) == len(want)
        assert isinstance(got, list) == isinstance(want, list)
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)
    elif isinstance(want, float):  # read out of a tensor, which is as close
        assert type(got) is float and math.isclose(got, want, rel_tol=1e-5)
    else:
        assert type(got) is type(want) and got == want


def check(
    model: nn.Module,
    *calls: Sequence[Any],
    served: bool = True,
    **fields: Any,
) -> torch.jit.ScriptModule:
    """``model`` and its optimized form do the same at ``calls``, of which the first is the sample.

    ``served``: some cluster must have an engine. Else none may fail either, but it may have none.
    """
    loaded = optimized(model, tuple(calls[0]), strict=served, **fields)
    _compare(model, loaded, calls)
    ran = [one["engine_runs"] for one in blade.stats(loaded).values()]
    assert not served or any(ran), blade.report(loaded)
    return loaded


def check_compiled(model: nn.Module, *calls: Sequence[Any], served: bool = True) -> Any:
    """The same of ``torch.compile(backend="disc")``; what it makes of a copy of ``model`` is returned."""
    torch._dynamo.reset()
    known = set(map(id, live_graphs()))
    options = {"timing": False, "min_cluster_size": 1}
    copied = copy.deepcopy(model.eval())
    compiled = torch.compile(copied, backend=blade.dynamo.disc, dynamic=True, options=options)
    _compare(model, compiled, calls)
    made = [graph for graph in live_graphs() if id(graph) not in known]
    ran = [one["engine_runs"] for graph in made for one in graph.stats().values()]
    assert not served or any(ran), [graph.report() for graph in made]
    return compiled


CHECKS: dict[str, Callable[..., Any]] = {"optimize": check, "compile": check_compiled}


def _compare(model: nn.Module, other: Callable[..., Any], calls: Sequence[Sequence[Any]]) -> None:
    own = copy.deepcopy(model)
    for inputs in calls:
        want, got = outcome(own, inputs), outcome(other, inputs)
        assert got.error == want.error
        assert_same(got.answer, want.answer)
        assert_same(got.inputs, want.inputs)
        assert got.shares == want.shares


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)
