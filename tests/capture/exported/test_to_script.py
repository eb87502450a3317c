# SPDX-License-Identifier: Apache-2.0
"""A converted program answers like the model it was exported from, at its sizes and at others."""

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from exported_models import CASES, Case, Computes, Counts, Shared, interface
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from blade.capture.exported.export_script import export
from blade.capture.exported.interface import Interface
from blade.capture.exported.to_script import to_script
from blade.capture.outputs import tensors_of
from blade.errors import InputError, Refused


def expect_alike(module: Any, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    with torch.no_grad():
        got, want = module(*inputs), tensors_of(model(*inputs))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_round_trip(case: Case) -> None:
    sample = case.inputs(case.sample)
    module = to_script(export(case.model, interface(*sample)), interface(*sample))
    for shapes in (case.sample, *case.others):
        expect_alike(module, case.model, case.inputs(shapes))
        expect_alike(module, case.model, tuple(-abs(one) for one in case.inputs(shapes)))


DECOMPOSED = ("index", "several results", "made from sizes", "item", "attention", "cond", "scan")


@pytest.mark.parametrize("case", [c for c in CASES if c.name in DECOMPOSED], ids=lambda c: c.name)
def test_saved_and_decomposed(case: Case) -> None:
    sample = case.inputs(case.sample)
    program = export(case.model, interface(*sample)).run_decompositions()
    module = torch.jit.freeze(to_script(program, interface(*sample)))
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    expect_alike(torch.jit.load(buffer), case.model, case.inputs(case.others[0]))


def programs(model: nn.Module, *sample: torch.Tensor) -> Iterator[ExportedProgram]:
    """As exported, and with writes as outputs."""
    program = torch.export.export(model, sample)
    yield program
    yield program.run_decompositions()


def test_a_buffer_that_is_written() -> None:
    x = torch.randn(3)
    for program in programs(Counts().eval(), x):
        program.state_dict["calls"].zero_()  # the programs share it
        module, model = to_script(program, interface(x)), Counts()
        for _ in range(3):
            torch.testing.assert_close(module(x), model(x))
        assert module.calls == 3 == program.state_dict["calls"]  # the same memory


class WritesArgument(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + 1


def test_an_argument_that_is_written() -> None:
    for program in programs(WritesArgument(), torch.ones(3)):
        x = torch.randn(3)
        want = x * 2
        result = to_script(program, interface(x))(x)
        torch.testing.assert_close(x, want)
        torch.testing.assert_close(result, want + 1)


def test_weights_are_shared_and_keep_their_names() -> None:
    model = Shared().eval()
    x = torch.randn(4, 3)
    module = to_script(torch.export.export(model, (x,)), interface(x))
    assert set(module.state_dict()) == set(model.state_dict())
    weights = dict(module.named_parameters(remove_duplicate=False))
    assert weights["tied.weight"].data_ptr() == model.tied.weight.data_ptr()
    assert str(module.graph).count('prim::GetAttr[name="weight"]') == 1


@torch.library.custom_op("blade_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float, shift: torch.Tensor | None = None) -> torch.Tensor:
    return x * by if shift is None else x * by + shift


@scaled.register_fake
def _(x: torch.Tensor, by: float, shift: torch.Tensor | None = None) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("blade_tests::shift_", mutates_args=("x",))
def shift_(x: torch.Tensor, by: float) -> None:
    x.add_(by)


class CallsOwnOps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 0
        shift_(y, 3.0)
        return scaled(y, 2)


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*:FutureWarning")
def test_ops_of_the_users_own() -> None:
    x = torch.randn(2, 3)
    for program in programs(CallsOwnOps(), x):
        expect_alike(to_script(program, interface(x)), CallsOwnOps(), (torch.randn(2, 3),))


class Takes(nn.Module):
    def forward(self, states: Any, *rest: Any, scale: Any = 1, mask: Any = None) -> torch.Tensor:
        by_name, (values, gains) = states
        total = by_name["keys"] @ values + gains[0] + by_name["more"] + sum(rest)
        return total * scale if mask is None else total * scale + mask


def test_arguments_in_containers() -> None:
    def sample(n: int) -> tuple[Any, ...]:
        states = {"keys": torch.randn(n, 3), "more": torch.randn(n, 3)}
        return (states, (torch.randn(3, 3), [torch.randn(3)])), torch.randn(n, 3), torch.randn(n, 3)

    def bind(entries: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return entries[:2], {"mask": entries[2], "scale": 3}

    dims = {0: torch.export.Dim.AUTO}
    states, first, mask = sample(4)
    program = torch.export.export(
        Takes(),
        (states, first),
        {"scale": 3, "mask": mask},
        dynamic_shapes={
            "states": ({"keys": dims, "more": dims}, (None, [None])),
            "rest": (dims,),
            "scale": None,
            "mask": dims,
        },
    )
    names = ("states", "rest_0", "mask")
    module = to_script(program, Interface(names, (states, first, mask), bind, tensors_of))
    for n in (4, 7):
        states, first, mask = sample(n)
        want = Takes()(states, first, scale=3, mask=mask)
        torch.testing.assert_close(module(states, first, mask), want)
    states, first, _ = sample(4)
    with pytest.raises(
        torch.jit.Error, match=r"mask\.size\(0\) == states\[0\]\['keys'\]\.size\(0\)"
    ):
        module(states, first, mask)
    other = Interface(
        names, (states, first, mask), lambda e: (e[:2], {"mask": e[2], "scale": 4}), tensors_of
    )
    with pytest.raises(InputError, match="scale == 3 does not hold; the program was"):
        to_script(program, other)
    with pytest.raises(InputError, match="another structure"):
        to_script(program, interface(first))


def test_an_int_that_is_dynamic() -> None:
    model = Computes(lambda x, n: x[:n] * n)
    x = torch.randn(9)
    auto = torch.export.Dim.AUTO
    program = torch.export.export(model, (x, 4), dynamic_shapes={"inputs": ((auto,), auto)})
    taken = Interface(("x",), (x,), lambda entries: ((*entries, 3), {}), tensors_of)
    y = torch.randn(8)
    torch.testing.assert_close(to_script(program, taken)(y), y[:3] * 3)


def test_a_program_that_has_no_form_in_torchscript() -> None:
    class Shows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.ops.higher_order.print("size")
            return x + 1

    x = torch.randn(2)
    with pytest.raises(Refused, match="'print' has no form in TorchScript"):
        to_script(torch.export.export(Shows(), (x,)), interface(x))


def test_an_lstm() -> None:
    model = nn.LSTM(3, 4, batch_first=True).eval()
    x = torch.randn(2, 5, 3)
    module = to_script(export(model, interface(x)), interface(x))
    assert "aten::lstm" in str(module.graph)
    for batch in (2, 6):
        expect_alike(module, model, (torch.randn(batch, 5, 3),))
    assert len(pytree.tree_leaves(module(x))) == 3
