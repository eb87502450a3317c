# SPDX-License-Identifier: Apache-2.0
"""What others' models do beside computing: keywords, messages, checks, ends of bags, results in double."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers.utils.import_utils import torch_compilable_check

import blade
from blade import Config
from blade.capture.derived_shapes import resized
from blade.core.reason import Code

CONFIG = Config(
    timing=False,
    cache=False,
    python_fallback=False,
    min_cluster_size=1,
    optimization_pipeline="disc",
)


class _Wrapped(nn.Module):
    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def _chunk(x: torch.Tensor) -> torch.Tensor:
    a, b = x.sin().chunk(chunks=2, dim=1)
    return a * b + (1 if x.sum() > -1e9 else 0)


def _split(x: torch.Tensor) -> torch.Tensor:
    a, b = torch.split(x.sin(), split_size_or_sections=8, dim=1)
    return a * b + (1 if x.sum() > -1e9 else 0)


def _method(x: torch.Tensor) -> torch.Tensor:
    a, b = x.sin().split(split_size=8, dim=1)
    return a * b + (1 if x.sum() > -1e9 else 0)


def _message(x: torch.Tensor) -> torch.Tensor:
    text = f"unexpected values: {x[x > 0]}"
    torch._check(True, lambda: text)
    return x.exp() / 2


def _checked_number(x: torch.Tensor) -> torch.Tensor:
    top = torch.arange(x.shape[1]).max().item()
    torch_compilable_check(top >= 0, "underflow")
    return x.exp() / 2


def _double(x: torch.Tensor) -> torch.Tensor:
    return (x * 3).softmax(-1).double().cumsum(-1)


@pytest.mark.parametrize("call", [_chunk, _split, _method, _message, _checked_number, _double])
def test_it_is_served_at_other_sizes(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    model = _Wrapped(call).eval()
    optimized = blade.optimize(model, torch.randn(4, 16), CONFIG)
    report = blade.report(optimized)
    assert {c.backend for c in report.clusters} == {"disc"}
    assert not [r.detail for r in report.reasons if r.code is Code.TRACE_FAILED]
    for rows in (4, 1, 7):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(optimized(x), model(x), rtol=1e-5, atol=1e-6)


def test_ends_of_bags_ascend_at_every_size() -> None:
    offsets, ids = torch.tensor([0, 3, 9, 17]), torch.tensor([5, 1, 7, 2])
    longer = resized((ids, offsets), {(0, 0): 6, (1, 0): 7})
    assert longer[0].tolist() == [5, 1, 7, 2, 5, 1]
    assert longer[1].tolist() == [0, 3, 9, 17, 17, 17, 17]
    assert resized((ids, offsets), {(1, 0): 2})[1].tolist() == [0, 3]


class _Noting(nn.Module):
    """Puts a tensor of the call in a buffer's place, which no result depends on, and decides on elements."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.mean()
        return {True: torch.exp, False: torch.sin}[bool(x.sum() > 0)](x)


def test_a_path_of_a_model_with_a_state_that_other_values_leave_is_kept() -> None:
    model = _Noting().eval()
    optimized = blade.optimize(model, torch.rand(4, 16), CONFIG)
    x = torch.rand(5, 16)
    torch.testing.assert_close(optimized(x), model(x))
    with pytest.raises(Exception, match="No captured path answers this call"):
        optimized(-x)


class _Keeping(nn.Module):
    """Keeps what its last call left, as recurrent models do, and makes it anew in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, is_last: bool = False) -> torch.Tensor:
        self.state = x.cumsum(-1)
        for k in range(x.shape[0] if x.shape[0] < 3 else 3):
            self.state = self.state * torch.sigmoid(x[k])
        return self.state[:, -1:] if is_last else self.state


def test_a_state_that_shows_nowhere_costs_no_argument_and_no_path() -> None:
    model = _Keeping().eval()
    optimized = blade.optimize(model, {"x": torch.rand(4, 16), "is_last": False}, CONFIG)
    assert {c.backend for c in blade.report(optimized).clusters} == {"disc"}
    x = torch.rand(5, 16)
    torch.testing.assert_close(optimized(x=x, is_last=False), model(x, False))
    with pytest.raises(Exception, match="No captured path answers this call"):
        optimized(x=x, is_last=True)


class _Listening(nn.Module):
    """Reads what a hook, which knows the module from its closure, wrote into it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.features: dict[str, torch.Tensor] = {}
        self.first.register_forward_hook(lambda *call: self.features.update(first=call[-1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()) + self.features["first"]


def test_a_hook_that_knows_its_model_knows_the_copy() -> None:
    model = _Listening().eval()
    optimized = blade.optimize(model, torch.randn(3, 4), CONFIG)
    assert not model.features
    x = torch.randn(5, 4)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x))


def test_sparse_tensors_are_made_beside_the_engines() -> None:
    class Summing(nn.Module):
        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            chosen = torch.sparse_coo_tensor(at, torch.ones(2), (4, 4))
            return torch.sparse.mm(chosen, x.sin() * 2)

    x, at = torch.randn(4, 4), torch.tensor([[0, 1], [2, 3]])
    model = Summing()
    optimized = blade.optimize(model.eval(), (x, at), CONFIG)
    torch.testing.assert_close(optimized(x + 1, at), model(x + 1, at))
