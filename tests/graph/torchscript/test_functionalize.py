# SPDX-License-Identifier: Apache-2.0
"""Writes to a graph's own tensors go, where nobody can tell; all others stay."""

from collections.abc import Callable

import pytest
import torch

import blade
from blade.graph.torchscript.functionalize import functionalize

Model = Callable[[torch.Tensor], object]


def _relu(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.relu_()
    return y + 1


def _chain(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y += x
    y *= 3
    return y.sigmoid_()


def _residual_blocks(x: torch.Tensor) -> torch.Tensor:
    """As torchvision's ResNets write them: what a block added to is written to and added to in the next."""
    y = x * 2
    y += x
    y.relu_()
    z = y * 3
    z += y
    z.relu_()
    u = z * 4
    u += z
    return u.relu_()


def _smaller_operand(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y += x[0]
    return y


def _view_made_after(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.neg_()
    return y[0] * y[1]


def _view_read_before(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y[0] + 1
    y.neg_()
    return y + z


def _returned_twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    z = y.relu_()
    return y, z


def _filled(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.masked_fill_(x[0] > 0, -1.0)
    y.index_put_((torch.tensor([1]),), torch.tensor(7.0))
    return y.clamp_(-3, 3)


def _ints(x: torch.Tensor) -> torch.Tensor:
    y = (x > 0).long()
    y += (x > 1).long() * 16
    return y


def _answers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Written to floats, what is true is 1.0; written to a mask it stays one."""
    y = x * 2
    y.gt_(0.5)
    z = (x + 1).logical_not_()
    return y, z, (x > 0).logical_xor_(x > 1)


REPLACED = (
    _relu,
    _chain,
    _residual_blocks,
    _smaller_operand,
    _view_made_after,
    _view_read_before,
    _returned_twice,
    _filled,
    _ints,
    _answers,
)


def _of_caller(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + 1


def _view_of_caller(x: torch.Tensor) -> torch.Tensor:
    x.view(-1).mul_(2)
    return x + 1


def _through_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[0].neg_()
    return y


def _view_read_after(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y[0]
    y.neg_()
    return z + y


def _view_returned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    z = y.t()
    y.neg_()
    return y, z


def _in_a_list(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    kept = [y, x]
    y.neg_()
    return torch.cat(kept) + y.sum()


def _other_dtype(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y += x.double()  # stays float32; out of place it would be float64
    return y


def _in_a_loop(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    for _ in range(x.size(0)):
        y.add_(1)
    return y


def _random(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y.bernoulli_(1.0)


def _may_be_itself(x: torch.Tensor) -> torch.Tensor:
    return (
        x.clone().conj_physical_()
    )  # of a real tensor it is that tensor: without the copy, the caller's


KEPT = (
    _of_caller,
    _view_of_caller,
    _through_view,
    _view_read_after,
    _view_returned,
    _in_a_list,
    _other_dtype,
    _in_a_loop,
    _random,
    _may_be_itself,
)


def _script(model: Model) -> torch.jit.ScriptModule:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.function = torch.jit.script(model)

        def forward(self, x: torch.Tensor):  # type: ignore[no-untyped-def]
            return self.function(x)

    scripted = torch.jit.freeze(torch.jit.script(Holder().eval()), optimize_numerics=False)
    torch._C._jit_pass_inline(scripted.graph)
    return scripted


def _sample(rows: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def _writes(module: torch.jit.ScriptModule) -> int:
    nodes = module.graph.findAllNodes
    names = "relu add mul sigmoid neg masked_fill index_put clamp bernoulli gt logical_not logical_xor conj_physical"
    return sum(len(nodes(f"aten::{name}_")) for name in names.split())


def _check_same(model: Model, module: torch.jit.ScriptModule) -> None:
    for rows in (3, 2, 5):
        ours, theirs = _sample(rows, seed=rows), _sample(rows, seed=rows)
        got, want = module(ours), model(theirs)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("model", REPLACED)
def test_is_replaced(model: Model) -> None:
    module = _script(model)
    assert _writes(module)
    functionalize(module, [(_sample(),)])
    assert not _writes(module), module.graph
    torch._C._jit_pass_lint(module.graph)
    _check_same(model, module)


@pytest.mark.parametrize("model", KEPT)
def test_is_kept(model: Model) -> None:
    module = _script(model)
    before = _writes(module)
    functionalize(module, [(_sample(),)])
    assert _writes(module) == before > 0
    _check_same(model, module)


def test_still_raises_where_the_operand_is_larger() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x[:1] * 2
        y += x
        return y

    module = _script(model)
    functionalize(module, [(_sample(rows=1),)])
    assert not _writes(module)
    with pytest.raises(RuntimeError, match="expand"):
        module(_sample(rows=3))


def test_returned_tensors_are_still_one() -> None:
    module = _script(_returned_twice)
    functionalize(module, [(_sample(),)])
    first, second = module(_sample())
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.needs("runtime", "torch_mlir")
def test_a_block_with_writes_is_one_cluster() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
            self.act = torch.nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.second(self.act(self.first(x)))
            y += x
            return torch.sigmoid_(y)

    torch.manual_seed(0)
    optimized = blade.optimize(Block().eval(), _sample(), blade.Config(timing=False))
    report = blade.report(optimized)
    assert [c.backend for c in report.clusters] == ["disc"]
    assert not report.outside
