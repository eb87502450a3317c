# SPDX-License-Identifier: Apache-2.0
"""The emitted text itself (golden), and which choice runs at which shape."""

import itertools
from pathlib import Path

import pytest
import sympy
import torch
from cpu_native import pointwise_kernel, symbol
from test_cpu_kernels import F16, F32, _args, gelu, layer_norm, softmax
from triton_interpreter import TARGET, chosen

from blade.backends.disc.gpu.emit.kernel import emit
from blade.backends.disc.gpu.emit.tile_table import KernelTile, transposed
from blade.backends.disc.ir.kernel import (
    Access,
    Compute,
    Const,
    Kernel,
    Load,
    Reduce,
    Stmt,
    Store,
)
from blade.backends.disc.target.gpu import GpuTarget

S0, S1, S2 = symbol("s0"), symbol("s1"), symbol("s2")


def chain() -> Kernel:
    """Bound by memory: tanh(x * y + 1) of halves."""
    body: tuple[Stmt, ...] = (
        Load(Access(0, (1,)), F16),
        Load(Access(1, (1,)), F16),
        Const(1.0, F16),
        Compute("fma", (0, 1, 2), F16),
        Compute("tanh", (3,), F16),
        Store(Access(2, (1,)), 4),
    )
    return Kernel((), S0 * S1, _args([F16] * 2, [F16]), body)


def masked_softmax() -> Kernel:
    """softmax(where(mask, x / 8, -inf)) over rows of [batch, heads, queries, keys]; a mask for each batch."""
    row = (S1 * S2 * S2, S2 * S2, S2, 1)
    body: tuple[Stmt, ...] = (
        Load(Access(0, row), F16),
        Const(0.125, F16),
        Compute("mul", (0, 1), F16),
        Load(Access(1, (S2, 0, 0, 1)), torch.bool),
        Const(float("-inf"), F16),
        Compute("where", (3, 2, 4), F16),
        Compute("cast", (5,), F32),
        Reduce("max", 6, F32),
        Compute("sub", (6, 7), F32),
        Compute("exp", (8,), F32),
        Reduce("sum", 9, F32),
        Compute("div", (9, 10), F32),
        Compute("cast", (11,), F16),
        Store(Access(2, row), 12),
    )
    args = _args([F16, torch.bool], [F16])
    return Kernel((S0, S1, S2), S2, args, body)


GOLDEN = {"chain": chain(), "layer_norm_768": layer_norm(768), "masked_softmax": masked_softmax()}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_text(name: str, update_golden: bool) -> None:
    path = Path(__file__).parent.parent / "golden" / f"gpu_{name}.txt"
    text = "\n\n".join(
        f"# {name} where {c.when}: grid {c.grid}, {c.unit.warps} warps\n{c.unit.text}"
        for c in emit(GOLDEN[name], TARGET)
    )
    if update_golden:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), (
        f"{path.name} differs; --update-golden rewrites it"
    )


def test_one_choice_at_every_shape() -> None:
    for kernel in (*GOLDEN.values(), softmax(), gelu(S1), layer_norm(S1)):
        choices = emit(kernel, TARGET)
        assert len({c.unit.name for c in choices}) == len(choices)
        lengths = (0, 1, 7, 8, 255, 256, 257, 1024, 1025, 1032, 4096, 4097, 4104, 100000)
        for s0, s1, s2 in itertools.product((0, 3), lengths, lengths):
            sizes = {"s0": s0, "s1": s1, "s2": s2}
            chosen(choices, sizes)


def test_rows_of_a_known_length_have_one_choice_and_no_mask_where_it_is_a_power_of_two() -> None:
    (choice,) = emit(layer_norm(1024), TARGET)
    assert choice.when is None and choice.grid == (S0, 1, 1)
    assert "mask" not in choice.unit.text
    (choice,) = emit(layer_norm(768), TARGET)
    assert "mask=cm" in choice.unit.text
    assert "for c0" not in choice.unit.text


@pytest.mark.parametrize(
    ("length", "few", "many"), [(768, (2, 2, 3), (4, 4, 3)), (4096, (1, 8, 1), (1, 4, 4))]
)
def test_rows_of_halves_are_in_pieces(
    length: int, few: tuple[int, int, int], many: tuple[int, int, int]
) -> None:
    """(rows, warps, pieces) of a program. It lets the next launch start when it has asked for its rows."""
    for choice, (rows, warps, pieces) in zip(
        emit(softmax(F16, length), TARGET), (few, many), strict=True
    ):
        programs = sympy.sympify(choice.grid[0]).subs({symbol("s0"): 4800})
        assert (programs, choice.unit.warps) == (4800 // rows, warps)
        text = choice.unit.text
        assert text.count("tl.load(") == pieces
        before, _, after = text.partition("gdc_launch_dependents()\n")
        assert "tl.load(" not in after and "= tl.sum(" in after and "= tl.sum(" not in before


def test_long_rows_are_walked_and_read_again() -> None:
    (choice,) = emit(layer_norm(40000), TARGET)
    assert choice.unit.text.count("for c0 in range(0, 40000") == 3


def test_units_say_what_is_passed() -> None:
    kernel = softmax(F16)
    unit = emit(kernel, TARGET)[0].unit
    pointers, sizes = [("p0", "*fp16"), ("p1", "*fp16")], kernel.sizes()
    assert list(unit.signature) == [*pointers, *((f"n{k}", "i64") for k in range(len(sizes)))]
    assert unit.aligned == ("p0", "p1")


def test_what_may_start_early_waits_before_it_touches_memory() -> None:
    for kernel in GOLDEN.values():
        for unit in (c.unit for c in emit(kernel, TARGET)):
            before, _, after = unit.text.partition("gdc_wait()\n")
            assert unit.early and "tl.load(" in after and "tl.load(" not in before
            assert "tl.store(" not in before
    for choice in emit(softmax(), GpuTarget(arch=80)):
        assert not choice.unit.early and "gdc" not in choice.unit.text


def test_equal_kernels_are_one_unit_whatever_their_symbols() -> None:
    other = softmax().inner.subs(symbol("s1"), symbol("s7"))
    renamed = softmax(inner=other)
    first, second = emit(softmax(), TARGET), emit(renamed, TARGET)
    assert [c.unit for c in first] == [c.unit for c in second]


def test_a_grid_counts_tiles() -> None:
    (choice,) = emit(pointwise_kernel("neg", [F32], F32), TARGET)
    counts = {n: int(sympy.sympify(choice.grid[0]).subs({S0: n})) for n in (0, 1, 1024, 1025)}
    assert counts == {0: 0, 1: 1, 1024: 1, 1025: 2}


@pytest.mark.parametrize("known", [(None, 3), (3, None), (64, 2), (5, 7), (2, 64), (1000, 1)])
def test_a_tile_that_transposes_is_no_wider_than_what_there_is(
    known: tuple[int | None, int | None],
) -> None:
    tile = transposed(*known)
    for side, size in zip((tile.rows, tile.columns), known, strict=True):
        assert size is None or side < 2 * size
        assert size is not None or side == 1024  # the other side is short
    assert 1 <= tile.warps <= 8 and 32 * tile.warps <= max(32, tile.elements)
    assert transposed(None, None) == transposed(512, 4096) == KernelTile(64, 64, 8)
