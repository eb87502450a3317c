# SPDX-License-Identifier: Apache-2.0
"""What scripted code computes of sizes, by itself or in lists, has an FX form or costs only its own op."""

from collections.abc import Callable

import pytest
import torch
from cutting import assert_fx_same, cut, groups_of, pins, script

from blade.core.reason import Code
from blade.graph.torchscript.functionalize import functionalize
from blade.graph.torchscript.view import view

Model = Callable[[torch.Tensor], torch.Tensor]


def _slice_of_sizes(x: torch.Tensor) -> torch.Tensor:
    sizes = x.shape[1:]
    return x.view(x.size(0) * sizes[0], sizes[1]) * 2


def _lists_added(x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(x.shape[:1] + [3] + x.shape[1:]) + x.unsqueeze(1)


def _list_copied(x: torch.Tensor) -> torch.Tensor:
    sizes = list(x.shape)
    turned = sizes.copy()
    return x.reshape(turned[-1:] + turned[:-1]) + sum(sizes)


def _list_repeated(x: torch.Tensor) -> torch.Tensor:
    return x.new_ones([x.size(1)] * 2).sum() + x * len(x.shape[1:])


def _largest(x: torch.Tensor) -> torch.Tensor:
    height, width = x.shape[-2:]
    most = min(x.shape[1], 3)
    return torch.relu(x)[:, :most] * float(max(height, width)) / (height * width) ** 0.5


def _largest_of_a_list(x: torch.Tensor) -> torch.Tensor:
    return x * max(x.shape) + min(x.shape[1:])


def _whole_numbers(x: torch.Tensor) -> torch.Tensor:
    half, rest = divmod(x.size(1), 2)
    return x * half + rest + abs(-x.size(0)) + (x.size(1) >> 1) + (x.size(2) << 2)


def _tuple_of_sizes(x: torch.Tensor) -> torch.Tensor:
    pair = (x.size(1), x.size(2))
    height, width = pair
    return x.transpose(1, 2).reshape(-1, width, height) + pair[0]


def _tensors_of_numbers(x: torch.Tensor) -> torch.Tensor:
    size = torch.tensor(x.size(1), dtype=x.dtype)
    sizes = torch.tensor([x.size(0), x.size(1), 2])
    return x / size + torch.tensor(0.5) * sizes.to(x.dtype).sum()


EXPRESSED = (
    _slice_of_sizes,
    _lists_added,
    _list_copied,
    _list_repeated,
    _largest,
    _largest_of_a_list,
    _whole_numbers,
    _tuple_of_sizes,
    _tensors_of_numbers,
)


class Holder(torch.nn.Module):
    """A function as a module, for scripting."""

    def __init__(self, function: Model) -> None:
        super().__init__()
        self.function = torch.jit.script(function)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize("model", EXPRESSED)
def test_is_one_cluster_at_all_sizes(model: Model) -> None:
    captured = script(Holder(model), (torch.randn(2, 4, 5),), (torch.randn(3, 6, 7),))
    torch._C._jit_pass_inline(captured.module.graph)
    functionalize(captured.module, captured.samples)
    [extracted] = cut(captured)
    assert not view(captured).excluded
    assert_fx_same([extracted])
    x = torch.randn(5, 8, 3)
    torch.testing.assert_close(extracted.cluster.gm(x)[0], captured.module(x))


def test_a_bool_is_written_to_a_mask() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        mask[:, :1] = True
        return torch.where(mask, x, -x)

    captured = script(Holder(model), (torch.randn(2, 4, 5),), (torch.randn(3, 6, 7),))
    torch._C._jit_pass_inline(captured.module.graph)
    functionalize(captured.module, captured.samples)
    assert not view(captured).excluded
    x = torch.randn(5, 8, 3)
    for _ in range(3):
        assert torch.equal(captured.module(x), model(x))


@pytest.mark.parametrize("number, dtype", [("3", torch.int64), ("0.5", torch.float32)])
def test_a_tensor_of_a_number_has_torchs_dtype(number: str, dtype: torch.dtype) -> None:
    module = torch.jit._recursive.create_script_module(
        torch.nn.Module(), lambda _: (), share_types=False
    )
    module.define(f"def forward(self, n: int) -> Tensor:\n    return torch.tensor({number})\n")
    functionalize(module, [])
    assert not module.graph.findAllNodes("aten::tensor")
    assert module(1).dtype is dtype
    assert module(1).shape == ()


def test_a_number_without_a_form_costs_its_op_alone() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x) + 1
        y = y * round(x.size(1) / 3.0)
        return torch.relu(y - 2) * 3

    captured = script(Holder(model), (torch.randn(2, 4, 5),), (torch.randn(3, 6, 7),))
    torch._C._jit_pass_inline(captured.module.graph)
    assert pins(captured) == {"aten::mul": Code.UNSUPPORTED_OP}
    assert len(groups_of(view(captured))) == 2
    assert_fx_same(cut(captured))
