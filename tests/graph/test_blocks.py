# SPDX-License-Identifier: Apache-2.0
"""What is inside Ifs and Loops is cut and put together again like anything else."""

import copy
import io
from typing import Any

import pytest
import torch
from cutting import assert_fx_same, assert_same, cut, ops, pins, rebuilt, script, trace

from blade.core.reason import Code
from blade.graph.torchscript.view import view

X = torch.randn(3, 4)


def calls(module: torch.jit.ScriptModule) -> dict[str, int]:
    """Where the spliced graph calls clusters: kind of the block around it -> how often."""
    found: dict[str, int] = {}

    def walk(block: Any, around: str) -> None:
        for node in block.nodes():
            if node.kind() == "prim::CallMethod":
                found[around] = found.get(around, 0) + 1
            for inner in node.blocks():
                walk(inner, node.kind())

    walk(module.graph, "top")
    return found


def check(captured: Any, *more: Any, loops: bool = True) -> torch.jit.ScriptModule:
    """Spliced, saved and loaded, it answers like the captured module."""
    assert_fx_same(cut(captured, loops))
    optimized = rebuilt(captured, loops)
    assert_same(optimized, captured, *more)
    buffer = io.BytesIO()
    torch.jit.save(optimized, buffer)
    assert_same(torch.jit.load(io.BytesIO(buffer.getvalue())), captured, *more)
    return optimized


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, flag: bool) -> torch.Tensor:
        y = torch.relu(x) + 1
        if flag:
            z = torch.sigmoid(self.linear(y)) * y.size(0)
        else:
            z = torch.tanh(y) - x
        return z * 2 + y


def test_both_branches_are_clusters_and_the_outside_is_one_across_the_if() -> None:
    captured = script(Branches(), (X, True), (torch.randn(5, 4), False))
    assert ops(cut(captured)) == [
        ["relu", "add"],
        ["linear", "sigmoid", "mul"],
        ["tanh", "sub"],
        ["mul", "add"],
    ]
    optimized = check(captured, (torch.randn(1, 4), False), (torch.randn(7, 4), True))
    assert calls(optimized) == {"top": 2, "prim::If": 2}


def test_a_branch_no_sample_takes_stays() -> None:
    captured = script(Branches(), (X, True))
    assert pins(captured)["aten::tanh"] == Code.UNKNOWN_TYPE
    assert calls(check(captured, (X, False))) == {"top": 2, "prim::If": 1}


def test_a_branch_only_a_probe_takes_has_that_as_its_sample() -> None:
    captured = script(Branches(), (X, True), (torch.randn(5, 4), False))
    [tanh] = [c for c in cut(captured) if "aten.tanh.default" in c.cluster.ops]
    assert [tuple(t.shape) for t in tanh.cluster.samples[0]] == [(5, 4), (5, 4)]
    assert len(tanh.cluster.samples) == 1 and not tanh.cluster.probes


def test_an_if_is_no_barrier() -> None:
    class Aside(torch.nn.Module):
        def forward(self, x: torch.Tensor, flag: bool) -> tuple[torch.Tensor, torch.Tensor]:
            y = torch.relu(x)
            z = x
            if flag:
                z = torch.sin(z) * 2
            return torch.sigmoid(y) + 1, z

    captured = script(Aside(), (X, True))
    assert ops(cut(captured)) == [["relu", "sigmoid", "add"], ["sin", "mul"]]
    check(captured, (X, False))


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outs = []
        for t in range(x.size(0)):
            h = torch.tanh(self.cell(torch.cat([x[t], h], -1))) * 0.5
            outs.append(h + 1)
        return torch.stack(outs), h


def test_the_body_of_a_recurrent_loop_is_one_cluster() -> None:
    sample, probe = (
        (torch.randn(5, 2, 4), torch.zeros(2, 4)),
        (torch.randn(3, 6, 4), torch.ones(6, 4)),
    )
    captured = script(Recurrent(), sample, probe)
    found = ops(cut(captured, loops=False))
    assert ["cat", "linear", "tanh", "mul", "add"] in found, found
    [body] = [c for c in cut(captured, loops=False) if "aten.tanh.default" in c.cluster.ops]
    assert len(body.cluster.samples) == 1  # three iterations were looked at, of one size
    assert len(body.cluster.probes) == 2 + 3
    optimized = check(captured, (torch.randn(9, 1, 4), torch.randn(1, 4)), loops=False)
    assert calls(optimized) == {"prim::Loop": 1}
    assert calls(check(captured, (torch.randn(9, 1, 4), torch.randn(1, 4)))) == {"top": 1}


class Counting(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: int, scale: float) -> torch.Tensor:
        total = torch.zeros_like(x)
        for i in range(n):
            total = total + torch.sin(x) * i - scale
            if i > 2:
                total = torch.relu(total) + (i * 2 + n)
        return total


def test_plain_numbers_cross_as_tensors_and_come_back_as_numbers() -> None:
    captured = script(Counting(), (X, 5, 0.25), (torch.randn(2, 6), 4, -1.5))
    assert sorted(ops(cut(captured))) == [
        ["relu", "add"],
        ["sin", "mul", "add", "sub"],
        ["zeros_like"],
    ]
    [body] = [c for c in cut(captured) if "aten.sin.default" in c.cluster.ops]
    dtypes = [(v.dtype, v.rank) for v in body.cluster.inputs]
    assert dtypes.count((torch.int64, 0)) == 1 and dtypes.count((torch.float64, 0)) == 1
    assert "aten.mul.Tensor" in body.cluster.ops
    optimized = check(captured, (torch.randn(1, 1), 0, 3.0), (X, 9, 1e-300))
    assert "torch.mul(" in body.fallback.code
    assert calls(optimized) == {"top": 1, "prim::Loop": 1, "prim::If": 1}


class TimesInt(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n


class TimesFloat(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: float) -> torch.Tensor:
        return x * n


class TimesBool(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: bool) -> torch.Tensor:
        return x.masked_fill(x > 0, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.bool])
@pytest.mark.parametrize(("model", "number"), [(TimesInt, 3), (TimesFloat, 2.5), (TimesBool, True)])
def test_numbers_cross_only_where_they_promote_alike(
    model: type[torch.nn.Module], number: Any, dtype: torch.dtype
) -> None:
    x = torch.ones(2, 3).to(dtype)
    captured = script(model(), (x, number))
    crosses = not (isinstance(number, float) and not dtype.is_floating_point)
    last = len(view(captured).nodes) - 1
    assert (last in view(captured).excluded) is not crosses
    assert check(captured)(x, number).dtype == model()(x, number).dtype
    zero_d = script(model(), (x.sum().to(dtype), number))
    assert last in view(zero_d).excluded
    check(zero_d)


def test_a_number_as_a_size_or_beside_a_tensor_of_the_group_keeps_its_node_outside() -> None:
    class Sized(torch.nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            y = torch.relu(x)
            return y[:n] * (y.size(1) * n)

    captured = script(Sized(), (X, 2))
    assert pins(captured) == {"aten::slice": Code.DATA_DEPENDENT, "aten::mul": Code.DATA_DEPENDENT}
    check(captured, (X, 3))


def test_item_crosses() -> None:
    class Items(torch.nn.Module):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            k = int(n.item())
            return torch.relu(x) * k + k

    captured = script(Items(), (X, torch.tensor(3)))
    assert ops(cut(captured)) == [["relu", "mul", "add"]]
    check(captured, (X, torch.tensor(-(2**60))))


def test_loops_with_writes_breaks_and_nested_ifs() -> None:
    class Busy(torch.nn.Module):
        def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            y = torch.relu(x)
            i = 0
            while bool(y.sum() < 100) and i < 6:
                y = torch.sigmoid(y) * 3 + y
                cache[i % 3] = y[0]
                if i == 4:
                    break
                cache[:1].add_(torch.cos(cache[1:2]) * 2)
                i += 1
            return y + cache.sum()

    captured = script(Busy(), (X, torch.zeros(3, 4)), (torch.rand(5, 4), torch.ones(3, 4)))
    optimized = check(captured, (torch.full((2, 4), 50.0), torch.zeros(3, 4)))
    assert calls(optimized)["prim::Loop"] >= 1


def test_early_return_raise_and_optional_inputs() -> None:
    class Early(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            a = torch.relu(x) * 2
            if y is not None:
                return torch.sin(a) + y
            if x.size(0) > 4:
                raise ValueError("too many")
            return torch.cos(a) - 1

    captured = script(Early(), (X, X + 1), (torch.randn(2, 4), None))
    optimized = check(captured, (torch.randn(1, 4), None))
    assert calls(optimized)["prim::If"] == 2
    with pytest.raises(torch.jit.Error, match="too many"):
        optimized(torch.randn(5, 4))


def test_a_view_in_a_branch_that_the_caller_may_see_stays() -> None:
    class Views(torch.nn.Module):
        def forward(self, x: torch.Tensor, flag: bool) -> tuple[torch.Tensor, torch.Tensor]:
            a = torch.relu(x) + 1
            b = a
            if flag:
                b = a.t()
            else:
                b = x.t()
            return a, b

    captured = script(Views(), (X, True), (X, False))
    optimized = check(captured)
    for flag in (True, False):
        x = torch.rand(2, 3)
        a, b = optimized(x, flag)
        base = a if flag else x
        base[0, 1] = 9
        assert b[1, 0] == 9


def test_what_a_list_holds_may_alias_what_is_returned() -> None:
    class Held(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
            kept: list[torch.Tensor] = []
            y = x
            for _ in range(2):
                y = torch.relu(y) + 1
                kept.append(y)
            return kept, y.t()

    captured = script(Held(), (X,))
    optimized = check(captured)
    kept, y = optimized(torch.rand(2, 3))
    kept[1][0, 1] = 9
    assert y[1, 0] == 9


class Generating(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(9, 4)

    def forward(self, ids: torch.Tensor, steps: int) -> torch.Tensor:
        kept = [ids]
        cache = torch.zeros(ids.size(0), 0, 4)
        for i in range(steps):
            x = self.table(kept[-1])
            cache = torch.cat([cache, torch.tanh(x).unsqueeze(1)], 1)
            kept.append(torch.argmax(cache.sum(1) @ self.table.weight.t() + i, -1))
        return torch.stack(kept, 1)


def test_a_list_that_starts_with_an_input_does_not_make_its_elements_the_caller_s() -> None:
    captured = script(Generating(), (torch.tensor([1, 2]), 5), (torch.tensor([3]), 2))
    found = ops(cut(captured))
    assert any("argmax" in group and "cat" in group for group in found), found
    check(captured, (torch.tensor([4, 5, 6]), 9), (torch.tensor([0]), 0))


def test_a_list_of_the_caller_that_is_appended_to_shares_what_it_holds() -> None:
    class Appends(torch.nn.Module):
        def forward(
            self, x: torch.Tensor, kept: list[torch.Tensor]
        ) -> tuple[torch.Tensor, list[torch.Tensor]]:
            y = torch.relu(x) + 1
            kept.append(y)
            return y.t(), kept

    captured = script(Appends(), (X, [X]))
    optimized = check(captured)
    returned, kept = optimized(X, [X])
    kept[1][0, 1] = 9
    assert returned[1, 0] == 9


def test_a_list_of_numbers_that_changes_is_read_where_it_stands() -> None:
    class Changing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sizes = [x.size(0), 2]
            y = torch.relu(x).repeat(sizes[1], 1)
            sizes[1] = 3
            return torch.cat([y, torch.sigmoid(x).repeat(sizes[1], 1)])

    check(script(Changing(), (X,)))


def test_random_ops_in_a_loop_draw_the_same_numbers() -> None:
    class Noisy(torch.nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            for i in range(n):
                noise = torch.rand_like(x)
                x = torch.relu(x + noise) * 2
                if i % 2 == 1:
                    x = torch.nn.functional.dropout(x, 0.5, True) + 1
            return x

    captured = script(Noisy(), (X, 4))
    optimized = rebuilt(captured)
    answers = []
    for module in (captured.module, optimized):
        torch.manual_seed(3)
        answers.append(module(X.clone(), 5))
    torch.testing.assert_close(*answers)
    assert calls(optimized)["prim::Loop"] >= 1


def test_lists_of_tensors_cross_element_by_element() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept = torch.bernoulli(x / x)
        return torch.relu(torch.cat([kept, y, torch.sin(kept)], 0)) + 1

    captured = trace(model, (torch.rand(6), torch.rand(3)), (torch.rand(9), torch.rand(2)))
    assert ops(cut(captured)) == [["div"], ["sin", "cat", "relu", "add"]]
    assert_same(rebuilt(captured), captured)


def test_the_module_and_its_buffers_are_not_changed_by_looking() -> None:
    class Stateful(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            for _ in range(n):
                self.seen.add_(torch.relu(x).sum(0))
            return x * self.seen

    captured = script(Stateful(), (X, 3))
    before = copy.deepcopy(captured.module.seen)
    optimized = rebuilt(captured)
    torch.testing.assert_close(captured.module.seen, before)
    expected = captured.module(X, 2), captured.module(X, 2)
    optimized.seen.zero_()
    torch.testing.assert_close((optimized(X, 2), optimized(X, 2)), expected)
