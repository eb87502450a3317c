# SPDX-License-Identifier: Apache-2.0
"""Which nodes of a functional graph compute indices on the CPU for another device."""

from typing import Any

import pytest
import torch
from built_graph import THERE, Built
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx import Node

from blade.dynamo import index_tables
from blade.dynamo.forward_backward import partition
from blade.dynamo.index_tables import _are_alike, move_index_tables

aten = torch.ops.aten


def _table(b: Built) -> tuple[Node, Node, Node]:
    first = b.call(aten.arange.default, 4, device=torch.device("cpu"))
    scaled = b.call(aten.mul.Tensor, first, 2)
    return first, scaled, b.call(aten.clamp.default, scaled, 0, 5)


def test_a_table_that_only_a_gpu_reads_is_made_there() -> None:
    b = Built()
    table = _table(b)
    read = b.call(aten.index.Tensor, b.input(6, 3), [table[-1]])
    b.graph.output((read,))
    move_index_tables(b.graph)
    assert b.places(*table, read) == ["meta"] * 4
    assert table[0].kwargs["device"] == THERE and "device" not in table[1].kwargs
    b.graph.lint()


def test_a_gradient_that_is_added_at_indices_reads_them_too() -> None:
    b = Built()
    table = _table(b)
    b.graph.output(
        (b.call(aten.index_put.default, b.input(6, 3), [table[-1]], b.input(4, 3), True),)
    )
    move_index_tables(b.graph)
    assert b.places(*table) == ["meta"] * 3


@pytest.mark.parametrize("other", ["output", "cpu", "values"])
def test_what_something_else_reads_stays(other: str) -> None:
    b = Built()
    table = _table(b)
    outputs = [b.call(aten.index.Tensor, b.input(6, 3), [table[-1]])]
    if other == "output":
        outputs.append(table[1])
    elif other == "cpu":
        outputs.append(
            b.call(aten.index.Tensor, b.input(6, 3, device=torch.device("cpu")), [table[1]])
        )
    else:
        outputs.append(b.call(aten.mul.Tensor, table[1], 0.5))
    b.graph.output(tuple(outputs))
    move_index_tables(b.graph)
    assert b.places(*table) == ["cpu"] * 3
    [copied] = outputs[0].args[1]
    assert copied.target is aten._to_copy.default and copied.args == (table[-1],)
    assert b.places(copied) == ["meta"]
    b.graph.lint()


def test_a_table_that_the_gradient_reads_too_is_made_there() -> None:
    """It may be saved for the backward graph, which then gets it where it is read."""
    b = Built()
    base, grad = b.input(6, 3), b.input(4, 3)
    base.name, grad.name = base.target, grad.target = "primals_1", "tangents_1"
    table = _table(b)
    out = b.call(aten.index.Tensor, base, [table[-1]])
    zeros = b.call(aten.zeros.default, [6, 3], device=THERE)
    back = b.call(aten.index_put.default, zeros, [table[-1]], grad, True)
    b.graph.output((out, back))
    joint = torch.fx.GraphModule({}, b.graph)
    given = [node.meta["val"] for node in (base, grad)]
    parts = partition(joint, given, num_fwd_outputs=1)
    nodes = [node for part in parts for node in part.graph.nodes if node.op != "output"]
    assert {node.meta["val"].device.type for node in nodes} == {"meta"}
    for part, reader in zip(parts, (aten.index.Tensor, aten.index_put.default), strict=True):
        assert [n.target for n in part.graph.nodes].count(reader) == 1


def test_an_input_is_copied_once_for_all_readers() -> None:
    b = Built()
    base = b.input(6, 3)
    index = b.graph.placeholder("index")
    with b.mode:
        index.meta["val"] = torch.empty(4, dtype=torch.int64)
    last = b.input(6, 3)
    reads = [b.call(aten.index.Tensor, x, [index]) for x in (base, last)]
    b.graph.output((*reads, b.call(aten.index.Tensor, base, [None, index])))
    move_index_tables(b.graph)
    copies = [n for n in b.graph.nodes if n.target is aten._to_copy.default]
    assert len(copies) == 1 and [n.args[1] for n in reads] == [[copies[0]]] * 2
    assert len(index.users) == 1
    b.graph.lint()


@pytest.mark.parametrize("made", [aten.randint.default, aten.full.default])
def test_numbers_that_are_drawn_or_not_whole_stay(made: torch._ops.OpOverload) -> None:
    b = Built()
    if made is aten.full.default:
        floats = b.call(made, [4], 1.5, device=torch.device("cpu"))
        table = b.call(aten._to_copy.default, floats, dtype=torch.int64)
    else:
        table = b.call(made, 5, [4], device=torch.device("cpu"))
    read = b.call(aten.index.Tensor, b.input(6, 3), [table])
    b.graph.output((read,))
    move_index_tables(b.graph)
    assert b.places(table, read.args[1][0]) == ["cpu", "meta"]


def _mask(b: Built) -> tuple[list[Node], Node]:
    """Swin-V2's mask of windows, 0 or -100, and its copy to the GPU."""
    row = b.call(aten.arange.default, 4, device=torch.device("cpu"))
    floats = b.call(aten._to_copy.default, row, dtype=torch.float32)
    apart = b.call(aten.sub.Tensor, b.call(aten.unsqueeze.default, floats, 1), floats)
    differ = b.call(aten.ne.Scalar, apart, 0)
    made = [row, floats, *apart.all_input_nodes, apart, differ]
    made.append(b.call(aten.masked_fill.Scalar, apart, differ, -100.0))
    return made, b.call(aten._to_copy.default, made[-1], dtype=torch.float16, device=THERE)


@pytest.mark.parametrize("alike", [True, False])
def test_floats_are_made_where_they_are_the_same(
    monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    monkeypatch.setattr(index_tables, "_are_alike", lambda *_: alike)
    b = Built()
    made, copied = _mask(b)
    b.graph.output((b.call(aten.add.Tensor, b.input(4, 4), copied),))
    move_index_tables(b.graph)
    assert b.places(*made, copied) == ["meta" if alike else "cpu"] * len(made) + ["meta"]
    assert ("device" in copied.kwargs) != alike and copied.kwargs["dtype"] == torch.float16
    b.graph.lint()


def test_a_whole_number_that_a_gpu_rounds_otherwise_is_not_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    b = Built()
    row = b.call(aten.arange.default, 9, device=torch.device("cpu"))
    logs = b.call(aten.log2.default, row)
    buckets = dict.fromkeys((row, logs, b.call(aten._to_copy.default, logs, dtype=torch.int64)))
    b.graph.output(b.call(aten.index.Tensor, b.input(6, 3), [list(buckets)[-1]]))
    here = torch.device("cpu")
    assert _are_alike(buckets, here) and not _are_alike(buckets, THERE)
    calls: list[torch.Tensor] = []

    def rounded_otherwise(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.log2(x) - 1e-6 * len(calls))
        return calls[-1]

    monkeypatch.setattr(logs, "target", rounded_otherwise)
    monkeypatch.setattr(index_tables, "_device_argument", lambda node: None)
    assert not _are_alike(buckets, here)

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("'log2' is not implemented on this device")

    monkeypatch.setattr(logs, "target", fails)
    assert not _are_alike(buckets, here)


def test_a_graph_of_the_cpu_alone_is_left_alone() -> None:
    b = Built()
    table = _table(b)
    b.graph.output(
        (b.call(aten.index.Tensor, b.input(6, 3, device=torch.device("cpu")), [table[-1]]),)
    )
    move_index_tables(b.graph)
    assert b.places(*table) == ["cpu"] * 3


def test_a_number_that_is_written_into_a_table_is_a_fill() -> None:
    """BEiT's relative positions of its class token."""
    b = Built()
    module = torch.nn.Module()
    module.number = torch.tensor(7)  # type: ignore[assignment]
    held = b.graph.get_attr("number")
    with b.mode:
        held.meta["val"] = torch.empty((), dtype=torch.int64)
    number = b.call(aten.lift_fresh_copy.default, held)
    _, _, table = _table(b)
    first = b.call(aten.select.int, table, 0, 0)
    table = b.call(
        aten.select_scatter.default, table, b.call(aten.copy.default, first, number), 0, 0
    )
    read = b.call(aten.index.Tensor, b.input(6, 3), [table])
    b.graph.output((read,))
    owner = torch.fx.GraphModule(module, b.graph)
    b.mode.allow_non_fake_inputs = False
    with b.mode:  # as AOTAutograd does
        move_index_tables(owner.graph)
    owner.graph.lint()
    values = [n for n in owner.graph.nodes if n.op == "call_function"]
    assert {n.meta["val"].device.type for n in values} == {"meta"}
    [fill] = [n for n in values if n.target is aten.full.default]
    assert fill.args == ([], 7) and fill.kwargs == {"dtype": torch.int64, "device": THERE}


class Positions(torch.nn.Module):
    """A bias per relative position, whose indices are made on the CPU, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.empty(9, device=THERE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.arange(5)[:, None] - torch.arange(5) + 4
        index[0, 0:] = 3
        index[0, 0] = 5
        return x + self.table[index.view(-1)].view(5, 5)


def test_a_table_that_torch_compile_sees_is_moved() -> None:
    cut: list[torch.fx.GraphModule] = []

    def cutting(*args: Any, **kwargs: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        cut.extend(partition(*args, **kwargs))
        return cut[0], cut[1]

    def unchanged(graph: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=unchanged, partition_fn=cutting)
    module = Positions()
    torch.compile(module, backend=backend)(torch.empty(2, 5, 5, device=THERE)).sum().backward()
    assert len(cut) == 2
    for half in cut:
        made = [n.meta["val"] for n in half.graph.nodes if n.op == "call_function"]
        assert {t.device.type for t in made if isinstance(t, torch.Tensor)} == {THERE.type}
