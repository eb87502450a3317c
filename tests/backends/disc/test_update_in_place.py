# SPDX-License-Identifier: Apache-2.0
"""Updates of a part of an input: written where it lies, unless the old contents are read."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from disc_programs import S0, S1, add_input, compile_to_engine, finish, new_builder
from torch import nn

import blade
from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.ir.graph import Graph, IrBuilder, Value, plain
from blade.backends.disc.passes.update_in_place import update_in_place
from blade.backends.disc.reference.interpret_graph import interpret
from blade.backends.disc.target.cpu import host

F32 = torch.float32
Made = tuple[list[Value], Value]  # what is returned, and the new contents of the first input


def _row(b: IrBuilder, y: Value) -> Value:
    return b.slice(b.pointwise("mul", y, y), 0, 0, 1, 1)


def _with(b: IrBuilder, x: Value, row: Value, start: int) -> Value:
    """``x`` with ``row`` as its row ``start``."""
    rest = plain(S0 - start - 1)
    pieces = [b.slice(x, 0, 0, 1, start), row, b.slice(x, 0, start + 1, 1, rest)]
    return b.make("concat", pieces[start == 0 :], x.shape, F32, axis=0)


def read_afterwards(b: IrBuilder, x: Value, y: Value) -> Made:
    new = _with(b, x, _row(b, y), 1)
    return [b.pointwise("add", b.slice(new, 0, 0, 1, 2), b.slice(y, 0, 0, 1, 2))], new


def from_the_first(b: IrBuilder, x: Value, y: Value) -> Made:
    return [], _with(b, x, _row(b, y), 0)


def in_a_column(b: IrBuilder, x: Value, y: Value) -> Made:
    """A part of a part: two concatenations."""
    first = b.slice(x, 0, 0, 1, 2)
    some = b.slice(_row(b, y), 1, 0, 1, 1)
    both = b.make("broadcast", (b.reshape(some, (1,)),), (2, 1), F32, axes=(1,))
    inner = b.make("concat", [both, b.slice(first, 1, 1, 1, S1 - 1)], first.shape, F32, axis=1)
    new = b.make("concat", [inner, b.slice(x, 0, 2, 1, plain(S0 - 2))], x.shape, F32, axis=0)
    return [b.pointwise("neg", new)], new


def the_part_of_a_part_is_read(b: IrBuilder, x: Value, y: Value) -> Made:
    returned, new = in_a_column(b, x, y)
    inner = next(v for v in new.args if v.op == "concat")
    return [*returned, b.pointwise("exp", inner)], new


def what_stays_is_read(b: IrBuilder, x: Value, y: Value) -> Made:
    new = _with(b, x, _row(b, y), 1)
    return [b.pointwise("neg", b.slice(x, 0, 0, 1, 1))], new


def a_constant(b: IrBuilder, x: Value, y: Value) -> Made:
    return [], _with(b, x, b.fill(3.0, (1, S1), F32), 1)


def old_row_is_read(b: IrBuilder, x: Value, y: Value) -> Made:
    new = _with(b, x, _row(b, y), 1)
    return [b.pointwise("neg", b.slice(x, 0, 1, 1, 1))], new


def row_of_the_old_one(b: IrBuilder, x: Value, y: Value) -> Made:
    row = b.pointwise("add", b.slice(x, 0, 1, 1, 1), _row(b, y))
    return [], _with(b, x, row, 1)


def of_what_stays(b: IrBuilder, x: Value, y: Value) -> Made:
    row = b.pointwise("add", b.slice(x, 0, 0, 1, 1), _row(b, y))
    return [], _with(b, x, row, 1)


def whole_old_one_is_read(b: IrBuilder, x: Value, y: Value) -> Made:
    return [b.pointwise("add", x, y)], _with(b, x, _row(b, y), 1)


def the_cut_of_the_old_one_is_read(b: IrBuilder, x: Value, y: Value) -> Made:
    returned, new = in_a_column(b, x, y)
    return [*returned, b.pointwise("neg", b.slice(x, 0, 0, 1, 2))], new


def shifted(b: IrBuilder, x: Value, y: Value) -> Made:
    pieces = (b.slice(x, 0, 1, 1, plain(S0 - 1)), _row(b, y))
    return [], b.make("concat", pieces, x.shape, F32, axis=0)


IN_PLACE = (
    *(read_afterwards, from_the_first, in_a_column, the_part_of_a_part_is_read),
    *(what_stays_is_read, a_constant),
)
BY_A_COPY = (
    old_row_is_read,
    row_of_the_old_one,
    of_what_stays,
    whole_old_one_is_read,
    the_cut_of_the_old_one_is_read,
    shifted,
)
Make = Callable[[IrBuilder, Value, Value], Made]


def graph_of(make: Make) -> Graph:
    b = new_builder()
    x, y = add_input(b, (S0, S1)), add_input(b, (S0, S1))
    returned, new = make(b, x, y)
    return replace(finish(b, *returned, new), updates=(0,))


@pytest.mark.needs("torch_mlir", "runtime")
@pytest.mark.parametrize("make", [*IN_PLACE, *BY_A_COPY], ids=lambda make: make.__name__)
def test_parts(make: Make) -> None:
    graph = graph_of(make)
    program = compile_ir(graph, host()).program
    assert (" update 0 again" in program) == (make in IN_PLACE), program
    assert not (make in IN_PLACE and "aten::copy_" in program), program
    assert not (make in IN_PLACE and "concat" in str(update_in_place(graph))), graph
    engine = compile_to_engine(graph)
    assert engine.why_unavailable() == ""
    rng = torch.Generator().manual_seed(0)
    for s0, s1 in [(2, 3), (3, 1), (2, 37), (7, 70), (300, 128)]:
        inputs = [torch.randn(s0, s1, generator=rng) for _ in range(2)]
        for layout in (lambda t: t, lambda t: t.mT.contiguous().mT):
            given = [layout(t.clone()) for t in inputs]
            found = engine.try_execute(given)
            assert found is not None, engine.last_error()
            for have, want in zip([*found, given[0]], interpret(graph, inputs), strict=True):
                torch.testing.assert_close(have, want)
            assert torch.equal(given[1], inputs[1])


@pytest.mark.parametrize("make", IN_PLACE, ids=lambda make: make.__name__)
def test_the_reference_agrees(make: Make) -> None:
    graph = graph_of(make)
    inputs = [torch.randn(5, 4), torch.randn(5, 4)]
    after = update_in_place(graph)
    assert [v.op for v in after.values].count("written") == 1
    for have, want in zip(interpret(after, inputs), interpret(graph, inputs), strict=True):
        assert torch.equal(have, want)


def test_parts_that_wait_for_each_other_stay() -> None:
    """Each part is computed of what stays in the other input."""
    b = new_builder()
    x, y = add_input(b, (S0, S1)), add_input(b, (S0, S1))
    ofs = [b.pointwise("neg", b.slice(one, 0, 0, 1, 1)) for one in (y, x)]
    new = [_with(b, one, row, 1) for one, row in zip((x, y), ofs, strict=True)]
    graph = replace(finish(b, *new), updates=(0, 1))
    assert update_in_place(graph) is graph


@pytest.mark.needs("torch_mlir", "runtime")
def test_what_one_input_becomes_is_copied_to_another() -> None:
    b = new_builder()
    x, y = add_input(b, (S0, S1)), add_input(b, (S0, S1))
    new = _with(b, x, _row(b, y), 1)
    graph = replace(finish(b, new, new), updates=(0, 1))
    program = compile_ir(graph, host()).program
    assert " update 0 again" in program and program.count("call aten::copy_") == 1
    inputs = [torch.randn(5, 4), torch.randn(5, 4)]
    given = [t.clone() for t in inputs]
    assert compile_to_engine(graph).try_execute(given) is not None
    for have, want in zip(given, interpret(graph, inputs), strict=True):
        torch.testing.assert_close(have, want)


class Cached(nn.Module):
    """Attention to all keys so far, which lie in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = torch.zeros(2, 4, 32, 2, 8).unbind()
        self.query, self.pair = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor, at: int) -> torch.Tensor:
        batch, count, _ = x.shape
        query = self.query(x).view(batch, count, 2, 8).transpose(1, 2)
        key, value = self.pair(x).view(batch, count, 2, 2, 8).unbind(2)
        self.keys = self.keys.to(x)  # so Dynamo's graph returns it
        self.keys[:batch, at : at + count] = key
        self.values[:batch, at : at + count] = value
        keys, values = (t[:batch, : at + count].transpose(1, 2) for t in (self.keys, self.values))
        found = nn.functional.scaled_dot_product_attention(query, keys, values)
        return found.transpose(1, 2).reshape(batch, count, 16)


@pytest.mark.needs("torch_mlir", "runtime")
def test_a_cache_is_written_where_it_lies(tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Cached().eval()
    twin = copy.deepcopy(model)
    options = {"timing": False, "dump_dir": tmp_path}
    compiled = torch.compile(twin, backend=blade.dynamo.disc, options=options)
    with torch.no_grad():
        for batch, at, count in ((4, 0, 5), (4, 5, 1), (4, 6, 1), (3, 7, 2), (2, 9, 4)):
            x = torch.randn(batch, count, 16)
            place = twin.keys.data_ptr(), twin.values.data_ptr()
            torch.testing.assert_close(compiled(x, at), model(x, at))
            torch.testing.assert_close(twin.keys, model.keys)
            torch.testing.assert_close(twin.values, model.values)
            assert (twin.keys.data_ptr(), twin.values.data_ptr()) == place
    programs = [path.read_text() for path in tmp_path.rglob("*program.txt")]
    assert programs and all(text.count(" again") == 2 for text in programs)


class StaticCache(nn.Module):
    """Keys are put at an index, by ``how``, and all places are read under a mask."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("keys", torch.zeros(2, 2, 16, 8))
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        query, key = (
            one(x).view(*x.shape[:2], 2, 8).transpose(1, 2) for one in (self.query, self.key)
        )
        if self.how == "index_copy":
            self.keys.index_copy_(2, at, key)
        else:
            self.keys[:, :, at] = key
        mask = torch.arange(16)[None] <= at[:, None] % 16
        found = nn.functional.scaled_dot_product_attention(query, self.keys, self.keys, mask)
        return found.transpose(1, 2).reshape(x.shape)


@pytest.mark.needs("torch_mlir", "runtime")
@pytest.mark.parametrize("how", ["index_copy", "index_put"])
def test_a_static_cache_is_written_where_it_lies(how: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = StaticCache(how).eval()
    twin = copy.deepcopy(model)
    options = {"timing": False, "dump_dir": tmp_path}
    compiled = torch.compile(twin, backend=blade.dynamo.disc, options=options)
    steps = [[0, 1, 2], [3], [4]] + ([[-1, 5]] if how == "index_put" else [])
    with torch.no_grad():
        for at in map(torch.tensor, steps):
            x = torch.randn(2, len(at), 16)
            torch.testing.assert_close(compiled(x, at), model(x, at))
            torch.testing.assert_close(twin.keys, model.keys)
    programs = [path.read_text() for path in tmp_path.rglob("*program.txt")]
    assert programs and all(f"call aten::{how}_ " in text for text in programs)
    assert not any("aten::copy_" in text for text in programs)


@pytest.mark.needs("torch_mlir", "runtime")
def test_an_index_out_of_range_raises_as_it_did() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        StaticCache("index_copy").eval(), backend=blade.dynamo.disc, options={"timing": False}
    )
    x = torch.randn(2, 1, 16)
    with torch.no_grad():
        compiled(x, torch.tensor([1]))
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            compiled(x, torch.tensor([16]))
