# SPDX-License-Identifier: Apache-2.0
"""Indices out of range: flagged in the graph, or made such that a library raises."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cutting import cut, trace

from blade.graph.fx.check_indices import flag
from blade.graph.fx.exported_program import to_exported

TABLE = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def flag_of(function: Callable[..., Any], *sample: torch.Tensor) -> Callable[..., Any]:
    """The flag of ``function`` as a graph, without the lookup, which would raise itself."""
    [extracted] = cut(trace(function, sample))
    program = to_exported(extracted.cluster, reduce=flag)
    output = program.graph.output_node()
    _, made = output.args[0]
    output.args = ((made,),)
    program.graph.eliminate_dead_code()
    run = torch.fx.GraphModule(torch.nn.Module(), program.graph)
    kinds = [value.dtype for value in extracted.cluster.inputs]  # in the order of their first use

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        given = {tensor.dtype: tensor for tensor in inputs}
        return run(*program.state_dict.values(), *(given[kind] for kind in kinds))[0]

    return call


LOOKUPS = {
    "embedding": lambda ids, x: torch.nn.functional.embedding(ids, TABLE) + x.mean(),
    "index_select": lambda ids, x: x.index_select(-1, ids) + 1,
    "gather": lambda ids, x: x.gather(1, ids.expand(x.shape[0], -1)) + 1,
    "index": lambda ids, x: x[:, ids] + 1,
}


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize(
    ("ids", "good", "good_from_the_end"),
    [([0, 5, 3], True, True), ([6, 0], False, False), ([0, -1], False, True), ([-7], False, False)],
)
def test_the_flag_says_whether_all_indices_are_in_range(
    name: str, ids: Sequence[int], good: bool, good_from_the_end: bool
) -> None:
    found = flag_of(LOOKUPS[name], torch.tensor([1, 2]), torch.randn(3, 6))
    got = found(torch.tensor(ids), torch.randn(5, 6))
    assert got.shape == () and bool(got) is (good_from_the_end if name == "index" else good)


def test_without_lookups_there_is_no_flag() -> None:
    [extracted] = cut(trace(lambda x: x.exp() + 1, (torch.randn(3, 6),)))
    program = to_exported(extracted.cluster, reduce=flag)
    assert len(program.graph.output_node().args[0]) == 1


def test_the_flag_adds_no_guards() -> None:
    [extracted] = cut(
        trace(lambda i, x: x.gather(1, i) + 1, (torch.ones(3, 2).long(), torch.ones(3, 6)))
    )
    before = list(extracted.cluster.shape_env.guards)
    to_exported(extracted.cluster, reduce=flag)
    assert list(extracted.cluster.shape_env.guards) == before
