# SPDX-License-Identifier: Apache-2.0
"""Index tensors: one kernel with their neighbours, and no element from out of bounds."""

import pytest
import torch
import torch.nn.functional as F
from disc_programs import legalized
from op_trace import trace

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.fusion.fuse import FusionGroup, fuse
from blade.backends.disc.ir.graph import Graph
from blade.backends.disc.target.cpu import CpuTarget, host
from blade.runtime.engine import Engine, make_engine

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]
VOCABULARY, WIDTH = 11, 24


def embeddings(ids: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """BERT's: words + kinds + positions, then layer norm."""
    x = F.embedding(ids, WORDS) + F.embedding(kinds, WORDS[:2]) + WORDS[: ids.shape[1]]
    return F.layer_norm(x, (WIDTH,), SCALE, SHIFT)


def pick(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x[i], x.index_select(0, i).exp()


WORDS = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0))
SCALE, SHIFT = WORDS[3].clone(), WORDS[4].clone()


def lowered(function: object, *samples: torch.Tensor) -> Graph:
    gm, shape_env = trace(function, samples, [[True] * s.dim() for s in samples])  # type: ignore[arg-type]
    return lower(gm, shape_env)


def compiled(graph: Graph, target: CpuTarget | None = None) -> Engine:
    made = compile_ir(graph, target or host())
    return make_engine("test", "disc", made.program, made.object, list(made.constants), {})


def ids(batch: int, length: int, below: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, below, (batch, length), generator=torch.Generator().manual_seed(batch))


def test_embeddings_and_layer_norm_are_one_kernel() -> None:
    graph = legalized(lowered(embeddings, ids(2, 5), ids(2, 5, 2)))
    groups = [u for u in fuse(graph).units if isinstance(u, FusionGroup)]
    assert [g.kind for g in groups if any(m.op == "gather" for m in g.members)] == ["stitch"]
    assert sum(m.op == "gather" for g in groups for m in g.members) == 2


@pytest.mark.parametrize("lanes", [8, 16])
def test_embeddings_are_eagers(lanes: int) -> None:
    target = host() if lanes == host().lanes else CpuTarget(host().isa, lanes)
    engine = compiled(lowered(embeddings, ids(2, 5), ids(2, 5, 2)), target)
    for batch, length in [(1, 1), (3, 7), (2, 11), (0, 4)]:
        given = [ids(batch, length), ids(batch, length, 2)]
        found = engine.try_execute(given)
        assert found is not None, engine.last_error()
        torch.testing.assert_close(found[0], embeddings(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [VOCABULARY, -1, 1 << 40])
def test_an_index_out_of_bounds_is_no_answer(wrong: int) -> None:
    engine = compiled(lowered(embeddings, ids(2, 5), ids(2, 5, 2)))
    bad = ids(2, 5)
    bad[1, 3] = wrong
    assert engine.try_execute([bad, ids(2, 5, 2)]) is None
    assert "index_out_of_range" in engine.last_error()


def test_only_indexing_counts_from_the_end() -> None:
    x, i = torch.randn(6, 5), torch.tensor([0, -1, -6, 5])
    engine = compiled(lowered(lambda x, i: x[i], x, i))
    found = engine.try_execute([x, i])
    assert found is not None, engine.last_error()
    assert torch.equal(found[0], x[i])
    assert engine.try_execute([x, torch.tensor([-7])]) is None
    engine = compiled(lowered(pick, x, i.abs()))
    assert engine.try_execute([x, i]) is None


@pytest.mark.parametrize("mode", ["mean", "max"])
@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("width", [2, 24, 37])
def test_bags_of_one_length_are_read_by_their_reduction(mode: str, lanes: int, width: int) -> None:
    table = torch.randn(VOCABULARY, width, generator=torch.Generator().manual_seed(0))
    graph = lowered(lambda i: F.embedding_bag(i, table, mode=mode), ids(2, 5))
    groups = [u for u in fuse(legalized(graph)).units if isinstance(u, FusionGroup)]
    together = [g for g in groups if {"gather", "reduce"} <= {m.op for m in g.members}]
    assert len(together) == (width > 3)
    target = host() if lanes == host().lanes else CpuTarget(host().isa, lanes)
    engine = compiled(graph, target)
    for batch, length in [(1, 1), (3, 1), (2, 70), (0, 4), (33, 7)]:
        given = ids(batch, length)
        found = engine.try_execute([given])
        assert found is not None, engine.last_error()
        want = F.embedding_bag(given, table, mode=mode)
        torch.testing.assert_close(found[0], want, rtol=1e-5, atol=1e-6)
    for wrong in (VOCABULARY, -1):
        assert engine.try_execute([torch.full((2, 3), wrong)]) is None
        assert "index_out_of_range" in engine.last_error()


def test_the_largest_of_a_bag_passes_over_nan_but_the_first() -> None:
    table = WORDS.clone()
    table[2, ::2] = table[5] = torch.nan
    table[7] = -torch.inf
    bags = torch.tensor([[2, 1, 5], [1, 2, 5], [5, 5, 5], [7, 2, 7], [2, 7, 1]])
    engine = compiled(lowered(lambda i: F.embedding_bag(i, table, mode="max"), bags))
    found = engine.try_execute([bags])
    assert found is not None, engine.last_error()
    want = F.embedding_bag(bags, table, mode="max")
    torch.testing.assert_close(found[0], want, rtol=0, atol=0, equal_nan=True)


def test_bags_that_atens_kernel_keeps() -> None:
    wide, ends = torch.randn(VOCABULARY, 64), torch.tensor([0, 2, 2])
    weights = torch.ones(2, 5)

    def bags(i: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            F.embedding_bag(i, WORDS, mode="sum"),
            F.embedding_bag(i, WORDS, mode="sum", per_sample_weights=weights),
            F.embedding_bag(i, WORDS, mode="max", padding_idx=1),
            F.embedding_bag(i, wide, mode="mean"),
            F.embedding_bag(i.reshape(-1), WORDS, offsets, mode="max"),
        )

    calls = [v for v in lowered(bags, ids(2, 5), ends).values if v.op == "call"]
    assert sum("embedding_bag" in str(v.attrs["target"]) for v in calls) == 5


def test_bookkeeping_of_bags_is_atens() -> None:
    def bags(i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        offsets = torch.arange(0, i.numel(), i.shape[1])
        found = torch.ops.aten._embedding_bag(WORDS, i.reshape(-1), offsets, False, 2)
        return found[0], found[3]

    calls = [v for v in lowered(bags, ids(2, 5)).values if v.op == "call"]
    assert ["_embedding_bag" in str(v.attrs["target"]) for v in calls] == [True]


def test_a_constant_index_is_a_slice() -> None:
    graph = lowered(lambda i: F.embedding(torch.zeros_like(i), WORDS) * 2, ids(2, 5))
    assert not any(v.op in ("gather", "call") for v in graph.values)
