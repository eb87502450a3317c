# SPDX-License-Identifier: Apache-2.0
"""Cut apart and put together again, a module means what it meant: values, writes, aliases, raises."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cutting import assert_same, cut, ops, rebuilt, run, script, trace
from saved import loaded

from blade.graph.torchscript.splice import splice
from blade.graph.torchscript.view import view

X = (torch.randn(2, 6),)
Y = (torch.randn(5, 4),)


def test_the_fallback_is_readable() -> None:
    optimized = rebuilt(trace(lambda x: torch.relu(x) * 2, X, Y))
    assert "(self.cluster_0).forward(" in optimized.code
    assert "(fallback).forward(x0" in optimized.cluster_0.code
    assert "torch.relu(x0)" in optimized.cluster_0.fallback.code


def test_nothing_to_replace_is_a_copy() -> None:
    captured = trace(lambda x: torch.nonzero(x), X, Y)
    optimized = splice(captured, [])
    assert_same(optimized, captured)
    assert optimized.graph is not captured.module.graph


def test_the_captured_module_is_not_changed() -> None:
    captured = trace(lambda x: torch.relu(x) * 2, X, Y)
    before = str(captured.module.graph)
    rebuilt(captured)
    assert str(captured.module.graph) == before


def _write_input(x: torch.Tensor) -> torch.Tensor:
    before = torch.sin(x) * 2
    x.add_(1)
    return before + torch.cos(x)


def _write_view(x: torch.Tensor) -> torch.Tensor:
    y = x.view(-1)
    y.add_(1)
    return torch.relu(x) + 1


def _write_inner_view(x: torch.Tensor) -> torch.Tensor:
    a = x * 2
    a.view(-1).add_(1)
    return torch.relu(a) - a


def _write_slice(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x) + 1
    y[:, 1] = x[:, 0]
    return y * 2


def _write_chunk(x: torch.Tensor) -> torch.Tensor:
    a, b = torch.chunk(x * 2, 2, -1)
    a.mul_(b)
    return torch.relu(a) + b


def _write_between(x: torch.Tensor) -> torch.Tensor:
    a = torch.sin(x)
    x.mul_(2)
    b = torch.sin(x)
    x.mul_(2)
    return a + b + torch.sin(x)


def _resize_view(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x)
    before = y.shape[0]
    y.unsqueeze_(0)
    return torch.cos(y).expand(before, y.shape[1], y.shape[2])


@pytest.mark.parametrize(
    "model",
    [
        _write_input,
        _write_view,
        _write_inner_view,
        _write_slice,
        _write_chunk,
        _write_between,
        _resize_view,
    ],
)
def test_writes_keep_their_meaning(model: Any) -> None:
    captured = trace(model, X, Y)
    optimized = rebuilt(captured)
    assert "cluster_0" in optimized.code
    assert_same(optimized, captured)
    assert_same(loaded(optimized), captured)
    answer, left = run(optimized, X)
    own = tuple(t.clone() for t in X)
    torch.testing.assert_close(answer, model(*own))
    torch.testing.assert_close(left, own)


def test_a_result_that_is_a_view_of_an_input_stays_one() -> None:
    optimized = rebuilt(trace(lambda x: (x.view(-1), torch.relu(x) + 1), X, Y))
    x = torch.zeros(3, 2)
    flat, _ = optimized(x)
    x.fill_(7)
    assert flat.tolist() == [7.0] * 6


def test_results_that_alias_each_other_still_do() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.relu(x) + 1
        return a, a.t()

    a, b = rebuilt(trace(model, X, Y))(torch.zeros(2, 3))
    a[0, 1] = 9
    assert b[1, 0] == 9


class Checked(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x) * 2
        if bool(y.sum() > 100):
            raise ValueError("too much")
        x.add_(1)
        return torch.sigmoid(y) + 1


def test_raising_is_kept_and_comes_before_later_writes() -> None:
    captured = script(Checked(), X, Y)
    seen = view(captured)
    names = [node.name.split(" = ")[-1].split("#")[0] for node in seen.nodes]
    assert (names.index("prim::If"), names.index("aten::add_")) in seen.effects
    optimized = rebuilt(captured)
    assert "cluster_0" in optimized.code
    assert_same(optimized, captured)
    x = torch.full((2, 60), 5.0)
    with pytest.raises(torch.jit.Error, match="too much"):
        optimized(x)
    assert x.eq(5).all()


class Printing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("first", x.size(0))  # noqa: T201
        y = torch.relu(x) + 1
        print("second")  # noqa: T201
        return y


def test_prints_are_kept_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    optimized = rebuilt(script(Printing(), X))
    capfd.readouterr()
    optimized(*X)
    assert capfd.readouterr().out == "first 2\nsecond\n"


class Branching(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.relu(x) * 2
        if n > 2:
            y = y * x.size(0)
        total = torch.zeros(y.size(1))
        for i in range(n):
            total = total + y[0] * i
        return torch.sigmoid(total) + y


def test_control_flow_stays_and_the_rest_is_cut() -> None:
    captured = script(Branching(), (*X, 4), (*Y, 0))
    optimized = rebuilt(captured)
    assert optimized.graph.findNode("prim::If") and optimized.graph.findNode("prim::Loop")
    assert ["relu", "mul"] in ops(cut(captured))
    assert_same(optimized, captured, (torch.randn(1, 1), 3))


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 3)
        self.scale = 3
        self.title = "counter"
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return torch.relu(self.linear(x)) * self.calls

    @torch.jit.export
    def project(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def test_buffers_written_by_forward_and_preserved_members_are_kept() -> None:
    model = Counter()
    captured = script(model, (torch.randn(2, 6),), keep=["project", "scale", "title"])
    optimized = rebuilt(captured)
    x = torch.randn(4, 6)
    for calls in (1, 2, 3):
        torch.testing.assert_close(optimized(x), torch.relu(model.linear(x)) * calls)
    again = loaded(optimized)
    torch.testing.assert_close(again(x), torch.relu(model.linear(x)) * 4)
    torch.testing.assert_close(again.project(x), model.linear(x) * 3)
    assert (again.scale, again.title) == (3, "counter")


def test_a_preserved_submodule_keeps_its_class() -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.inner(x)) + 1

    model = Outer()
    captured = script(model, (torch.randn(2, 6),), keep=["inner"])
    optimized = loaded(rebuilt(captured))
    assert_same(optimized, captured)
    x = torch.randn(3, 6)
    torch.testing.assert_close(optimized.inner(x), model.inner(x))


class Nested(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        y = torch.relu(x) + 1
        pieces = [y, y * 2]
        pieces.append(y - 1)
        return {"pieces": pieces, "rest": [torch.sigmoid(y)]}


def test_lists_and_dicts_come_out_as_they_were() -> None:
    captured = script(Nested(), X, Y)
    optimized = rebuilt(captured)
    assert "cluster_0" in optimized.code
    assert_same(loaded(optimized), captured)


def test_random_ops_draw_the_same_numbers() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        a = torch.nn.functional.dropout(torch.relu(x) * 2, 0.5, True)
        return torch.rand_like(x) + torch.sigmoid(a) * 2

    captured = trace(model, X, Y)
    optimized = rebuilt(captured)
    answers = []
    for module in (captured.module, optimized):
        torch.manual_seed(3)
        answers.append(run(module, X)[0])
    torch.testing.assert_close(*answers)


def test_empty_and_one_element_sizes() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.relu(x), x * 2], -1).softmax(-1).sum(0)

    captured = trace(model, X, Y)
    assert_same(rebuilt(captured), captured, (torch.randn(1, 1),), (torch.randn(0, 3),))


def test_weights_are_stored_once(tmp_path: Path) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(1000, 64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.table(ids)) + 1
            y[0] = 0  # what is around it stays outside and reads the same weight
            z = torch.nn.functional.linear(y, self.table.weight)
            return (
                torch.nonzero(z)
                + torch.nn.functional.linear(torch.sigmoid(y), self.table.weight).sum()
            )

    captured = trace(Two(), (torch.tensor([1, 2, 3]),), (torch.tensor([1, 2, 3, 4, 5]),))
    optimized = rebuilt(captured)
    path = tmp_path / "model.pt"
    torch.jit.save(optimized, path)
    weights = 1000 * 64 * 4
    assert weights < path.stat().st_size < 1.2 * weights
    assert_same(torch.jit.load(path), captured)


class _TensorsOut(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> Any:
        out = self.model(input_ids=ids, attention_mask=mask, token_type_ids=types)
        return out.last_hidden_state, out.pooler_output


@pytest.mark.needs("minilm")
def test_minilm_is_one_cluster_and_runs_in_another_process(
    minilm: torch.nn.Module, minilm_inputs: Any, tmp_path: Path
) -> None:
    model = _TensorsOut(minilm)
    samples = [tuple(minilm_inputs(b, n).values()) for b, n in [(2, 16), (3, 21), (1, 1), (4, 7)]]
    captured = trace(model, samples[0], samples[1])
    [extracted] = cut(captured)
    hidden, pooled = extracted.cluster.gm.graph.output_node().args[0]
    batch, length, features = hidden.meta["val"].shape
    assert isinstance(batch, torch.SymInt) and isinstance(length, torch.SymInt)
    assert features == 384 and pooled.meta["val"].shape[1] == 384
    guards = " ".join(str(g.expr) for g in extracted.cluster.shape_env.guards)
    assert "512" in guards  # the number of positions the model has
    optimized = rebuilt(captured)
    for sample in samples:
        expected = run(model, sample)[0]
        for answer in (extracted.cluster.gm(*_as_inputs(extracted, sample)), optimized(*sample)):
            torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-5)
    path, answers = tmp_path / "model.pt", tmp_path / "answers.pt"
    torch.jit.save(optimized, path)
    torch.save((samples, [run(model, s)[0] for s in samples]), answers)
    code = (
        "import sys, torch; m = torch.jit.load(sys.argv[1]); s, a = torch.load(sys.argv[2])\n"
        "with torch.no_grad():\n"
        "    for x, y in zip(s, a): torch.testing.assert_close(m(*x), y, rtol=1e-5, atol=1e-5)"
    )
    subprocess.run([sys.executable, "-c", code, str(path), str(answers)], check=True, timeout=120)


def _as_inputs(extracted: Any, sample: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """``sample`` in the order of the cluster's inputs."""
    order = extracted.view.program.inputs[1:]
    return [sample[order.index(value)] for value in extracted.inputs]
