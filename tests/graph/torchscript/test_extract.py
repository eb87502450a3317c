# SPDX-License-Identifier: Apache-2.0
"""A group as FX and as TorchScript: same values, same weights, symbolic shapes."""

from typing import Any

import pytest
import torch
from cutting import assert_fx_same, cut, groups_of, ops, script, trace

from blade.core.reason import Code
from blade.errors import Refused
from blade.graph.torchscript.extract import extract
from blade.graph.torchscript.observe_values import observe_tensors
from blade.graph.torchscript.to_fx import to_fx
from blade.graph.torchscript.view import view


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 6)
        self.norm = torch.nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x))
        return y.view(x.shape[0] * x.shape[1], -1)


def test_shapes_are_symbolic_and_constants_are_not() -> None:
    captured = trace(Small(), (torch.randn(2, 5, 8),), (torch.randn(3, 7, 8),))
    [extracted] = cut(captured)
    cluster = extracted.cluster
    [x] = [n for n in cluster.gm.graph.nodes if n.op == "placeholder"]
    batch, length, features = x.meta["val"].shape
    assert isinstance(batch, torch.SymInt) and isinstance(length, torch.SymInt)
    assert features == 8
    [out] = cluster.gm.graph.output_node().args[0]
    assert str(out.meta["val"].shape[0]) == str(batch * length)
    assert out.meta["val"].shape[1] == 6
    assert any("8" in str(g.expr) for g in cluster.shape_env.guards)
    assert_fx_same([extracted])


def test_one_compilation_serves_sizes_never_seen() -> None:
    [extracted] = cut(trace(Small(), (torch.randn(2, 5, 8),), (torch.randn(3, 7, 8),)))
    for shape in [(1, 1, 8), (9, 2, 8), (1, 31, 8)]:
        x = torch.randn(shape)
        torch.testing.assert_close(extracted.cluster.gm(x)[0], extracted.fallback(x))


def test_weights_are_the_same_tensors_on_both_sides() -> None:
    [extracted] = cut(trace(Small(), (torch.randn(2, 5, 8),)))
    fx = dict(extracted.cluster.gm.named_buffers())
    original = dict(extracted.fallback.named_buffers())
    assert list(fx) == list(original) == ["const_0", "const_1", "const_2", "const_3"]
    for name, tensor in fx.items():
        assert tensor.data_ptr() == original[name].data_ptr()


def test_tied_weights_are_one_constant() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(11, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(self.table(ids), self.table.weight)

    [extracted] = cut(trace(Tied(), (torch.tensor([[1, 2, 3]]),)))
    assert len(list(extracted.fallback.buffers())) == 1
    assert_fx_same([extracted])


def test_two_groups_around_an_unsupported_node() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x) * 3
        z = torch.bernoulli(y.clamp(0, 1))
        return torch.sigmoid(z) + 1

    captured = trace(model, (torch.rand(4, 5),), (torch.rand(3, 7),))
    clusters = cut(captured)
    assert ops(clusters) == [["relu", "mul", "clamp"], ["sigmoid", "add"]]
    assert_fx_same(clusters)


def test_several_outputs_and_sizes_for_nodes_outside() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.relu(x)
        b = a * 2
        mask = torch.nonzero(y)
        return b, mask.repeat(a.shape[0], 1)

    captured = trace(model, (torch.randn(2, 3), torch.ones(3)), (torch.randn(5, 4), torch.ones(3)))
    clusters = cut(captured)
    [extracted] = [c for c in clusters if "aten.relu.default" in c.cluster.ops]
    assert len(extracted.outputs) == 2  # b, and a for the sake of its size
    assert_fx_same(clusters)


@pytest.mark.parametrize("count", [2, 3])
def test_chunk_split_and_unbind(count: int) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        pieces = torch.chunk(torch.relu(x), count, -1)
        a, b = torch.split(x, [2, x.shape[-1] - 2], -1)
        first, second = torch.unbind(x.view(2, -1), 0)
        return pieces[0] * pieces[-1] + a.sum() * b.sum() + first.mean() - second.mean()

    captured = trace(model, (torch.randn(2, 6),), (torch.randn(4, 6),))
    clusters = cut(captured)
    assert sum(len(group) for group in ops(clusters)) >= 10
    assert_fx_same(clusters)


def test_bool_and_int_tensors_and_an_index() -> None:
    def model(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1])
        kept = (mask.to(torch.bool) & (ids > 2)).to(torch.int64)
        return kept[:, positions] * ids.cumsum(1)

    captured = trace(
        model,
        (torch.randint(0, 9, (2, 5)), torch.ones(2, 5, dtype=torch.int64)),
        (torch.randint(0, 9, (3, 7)), torch.ones(3, 7, dtype=torch.int64)),
    )
    clusters = cut(captured)
    assert len(clusters) == 1
    assert_fx_same(clusters)


def test_a_traced_size_used_as_a_tensor_becomes_one() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x * (torch.as_tensor(x.shape[1]) + 1)

    captured = trace(model, (torch.randn(2, 3),), (torch.randn(2, 5),))
    clusters = cut(captured)
    assert_fx_same(clusters)


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scale = float(x.size(-1)) ** 0.5
        sizes = [x.size(0), y.size(-1) * 2 - 1]
        return torch.relu(y / scale).new_zeros(sizes) + x.size(1) // 2


def test_scripted_scalar_arithmetic() -> None:
    captured = script(
        Scaled(), (torch.randn(2, 9), torch.randn(3)), (torch.randn(4, 16), torch.randn(5))
    )
    clusters = cut(captured)
    assert_fx_same(clusters)


def test_what_fx_cannot_express_is_refused_by_name() -> None:
    class Formatted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x).reshape(x.numel() + len(str(x.size(0))) - 1)

    captured = script(Formatted(), (torch.randn(2, 3),), (torch.randn(4, 5),))
    seen = view(captured)
    with pytest.raises(Refused, match="aten::reshape") as refused:
        extract(captured, seen, [range(len(seen.nodes))])
    assert refused.value.code == Code.CONVERSION_FAILED


def test_declared_sizes_are_numbers() -> None:
    captured = trace(lambda x: torch.relu(x), (torch.randn(2, 3),), (torch.randn(4, 5),))
    seen = view(captured)
    [extracted] = extract(captured, seen, [[0]], fixed=lambda name, axis: axis == 1)
    [x] = [n for n in extracted.cluster.gm.graph.nodes if n.op == "placeholder"]
    rows, columns = x.meta["val"].shape
    assert isinstance(rows, torch.SymInt) and columns == 5


def test_samples_are_what_the_group_reads_when_it_runs() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        y = torch.relu(x) * 2
        x.mul_(100)
        return y

    sample = (torch.ones(3),)
    [extracted] = cut(trace(model, sample))
    [[seen]] = extracted.cluster.samples
    torch.testing.assert_close(seen, torch.full((3,), 2.0))
    torch.testing.assert_close(sample[0], torch.ones(3))


def test_arithmetic_on_a_size_that_is_known_is_a_number() -> None:
    """A feature size is no symbol: dividing it must not need one."""

    class Heads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = self.linear(x).shape
            return self.linear(x).view(batch, length, 2, width // 2).transpose(1, 2)

    captured = trace(Heads(), (torch.randn(2, 5, 8),), (torch.randn(3, 7, 8),))
    [extracted] = cut(captured)
    assert_fx_same([extracted])


def test_what_the_caller_gives_needs_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cluster over the whole graph: its inputs are the samples, copied with their strides."""
    sample, probe = (torch.randn(4, 6).t(),), (torch.randn(5, 3),)
    captured = trace(lambda x: torch.relu(x) * 2 + x, sample, probe)
    seen = view(captured)

    def never(*args: object) -> None:
        raise AssertionError("a run that shows nothing new")

    monkeypatch.setattr("blade.graph.torchscript.boundary_samples.observe_tensors", never)
    [extracted] = extract(captured, seen, groups_of(seen))
    for (found,), (given,) in zip((*extracted.samples, *extracted.probes), (sample, probe)):
        assert torch.equal(found, given) and found.stride() == given.stride()
        assert found.data_ptr() != given.data_ptr()


def test_only_what_is_made_inside_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = trace(lambda x, y: torch.relu(x.sin()) + y, (torch.randn(3), torch.randn(3)))
    seen = view(captured)
    asked: list[int] = []

    def noted(program: Any, module: Any, sample: Any, wanted: Any) -> Any:
        asked.extend(value for line in wanted.values() for value, _ in line)
        return observe_tensors(program, module, sample, wanted)

    monkeypatch.setattr("blade.graph.torchscript.boundary_samples.observe_tensors", noted)
    [extracted] = extract(captured, seen, [range(1, len(seen.nodes))])
    x, y = captured.samples[0]
    assert [seen.program.lines[seen.program.producer[v]].kind for v in asked] == ["aten::sin"]
    inside, given = extracted.samples[0]
    assert torch.equal(inside, x.sin()) and torch.equal(given, y)


def test_a_size_of_1_in_a_sample_that_a_mask_broadcasts_along() -> None:
    """A shape function makes it equal to the size beside it; the user's own sample has to be served all the same."""

    class Attention(torch.nn.Module):
        def forward(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
        ) -> torch.Tensor:
            packed = q.reshape(q.size(0), 1, 2, 16)
            return torch.nn.functional.scaled_dot_product_attention(packed, k, v, mask)

    def inputs(batch: int, rows: int) -> tuple[torch.Tensor, ...]:
        k, v = torch.randn(2, batch, 1, 12, 16)
        return torch.randn(batch, 2, 1, 16), k, v, torch.rand(batch, 1, rows, 12) > 0.2

    [one] = cut(trace(Attention(), inputs(1, 1)))
    names = [one.view.program.values[v].debugName() for v in one.inputs]
    larger = dict(zip(("q", "k", "v", "mask"), inputs(3, 2), strict=True))
    examples = [tuple(larger[name] for name in names), *one.samples]
    for samples, size in (((), 2), (one.samples, 1)):
        gm, _ = to_fx(one.view, one.boundary, examples, samples=samples)
        placed = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
        assert placed[names.index("mask")].shape[2] == size
